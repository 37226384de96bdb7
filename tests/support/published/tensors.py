"""The names, dtypes and shapes of a checkpoint's tensors, put together from those of its layers."""

from collections.abc import Callable, Mapping

Header = dict[str, tuple[str, tuple[int, ...]]]
"""By a tensor's name, its dtype as safetensors names it, and its shape."""
Store = Callable[[int, int], Header]
"""Returns what is stored for a linear weight `[O, I]`, by the end of its name after the module's."""


def bf16(outputs: int, inputs: int) -> Header:
    return {"weight": ("BF16", (outputs, inputs))}


def fp8_blocks(outputs: int, inputs: int) -> Header:
    """Blocks of 128 x 128, as DeepSeek-V3 and Qwen3-FP8 have them."""
    scales = -(-outputs // 128), -(-inputs // 128)
    return {"weight": ("F8_E4M3", (outputs, inputs)), "weight_scale_inv": ("F32", scales)}


def fp8_rows(outputs: int, inputs: int) -> Header:
    return {"weight": ("F8_E4M3", (outputs, inputs)), "weight_scale": ("BF16", (outputs, 1))}


def awq(outputs: int, inputs: int) -> Header:
    """Groups of 128."""
    return {
        "qweight": ("I32", (inputs, outputs // 8)),
        "qzeros": ("I32", (inputs // 128, outputs // 8)),
        "scales": ("F16", (inputs // 128, outputs)),
    }


def gptq(outputs: int, inputs: int) -> Header:
    """4 bits in groups of 128."""
    return {
        "qweight": ("I32", (inputs // 8, outputs)),
        "qzeros": ("I32", (inputs // 128, outputs // 8)),
        "scales": ("F16", (inputs // 128, outputs)),
        "g_idx": ("I32", (inputs,)),
    }


def vectors(**sizes: int) -> Header:
    """One-dimensional tensors; two underscores stand for a dot."""
    return {name.replace("__", "."): ("BF16", (size,)) for name, size in sizes.items()}


def norms(size: int, *names: str) -> Header:
    return {f"{name}.weight": ("BF16", (size,)) for name in names}


def linears(shapes: Mapping[str, tuple[int, int]], store: Store = bf16) -> Header:
    return {f"{name}.{end}": kind for name, shape in shapes.items() for end, kind in store(*shape).items()}


def under(prefix: str, *parts: Header) -> Header:
    return {f"{prefix}.{name}": kind for part in parts for name, kind in part.items()}


def biases(header: Header) -> Header:
    """A bias for each two-dimensional `weight` of *header*."""
    found = {name: kind for name, kind in header.items() if name.endswith(".weight") and len(kind[1]) == 2}
    return {name.removesuffix("weight") + "bias": (dtype, shape[:1]) for name, (dtype, shape) in found.items()}


def qkv(hidden: int, heads: int, kv_heads: int, size: int) -> dict[str, tuple[int, int]]:
    return {"q_proj": (heads * size, hidden), "k_proj": (kv_heads * size, hidden), "v_proj": (kv_heads * size, hidden)}


def attention(
    hidden: int, heads: int, kv_heads: int, size: int, store: Store = bf16, *, output: str = "o_proj"
) -> Header:
    shapes = qkv(hidden, heads, kv_heads, size)
    return under("self_attn", linears({**shapes, output: (hidden, heads * size)}, store))


def gated(
    prefix: str, hidden: int, inner: int, store: Store = bf16, names: str = "gate_proj up_proj down_proj"
) -> Header:
    gate, up, down = names.split()
    return under(prefix, linears({gate: (inner, hidden), up: (inner, hidden), down: (hidden, inner)}, store))


def mamba(  # noqa: PLR0917 - the sizes of a mixer
    prefix: str, hidden: int, heads: int, size: int, groups: int, state: int
) -> Header:
    """A Mamba-2 mixer with a convolution over 4 positions."""
    inner = heads * size
    convolved = inner + 2 * groups * state
    return under(
        prefix,
        vectors(A_log=heads, D=heads, dt_bias=heads, conv1d__bias=convolved),
        {"conv1d.weight": ("BF16", (convolved, 1, 4))},
        linears({"in_proj": (inner + convolved + heads, hidden), "out_proj": (hidden, inner)}),
    )


def whole(
    layers: list[Header], hidden: int, vocabulary: int, *, prefix: str = "model", head: str | None = "lm_head",
    embedding: str = "embed_tokens", norm: str = "norm",
) -> Header:  # fmt: skip
    """A model of *layers*; *head* None: tied to the embedding."""
    found = under(prefix, linears({embedding: (vocabulary, hidden)}), norms(hidden, norm))
    for i, layer in enumerate(layers):
        found |= under(f"{prefix}.layers.{i}", layer)
    return found if head is None else found | linears({head: (vocabulary, hidden)})
