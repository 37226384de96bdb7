"""Published bases and drafts, at full size on the meta device.

Weights are never made: names, slices and bytes in bfloat16 follow from the configs. Tiny twins of the same
architectures run end to end in `test_identity` and, split over ranks, in `test_tensor_parallel`.
"""

import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from proposers.formats import eagle, mlp_speculator, mtp
from protos.errors import ModelError
from tests.support.models import tiny_models
from tests.support.models.published_models import ACCELERATORS, BASES, EAGLES, PUBLISHED, Draft, opt
from workers.model.tensor_parallel import _slices
from workers.weights import families
from workers.weights.partition import partition_for
from workers.weights.plan import plan_for

Shape = tuple[int, ...]
GIB, BF16 = 2**30, 2
RANKS = (1, 4, 8, 16)


@functools.cache
def model_of(base: str, layers: int | None = None) -> Any:
    """The model without weights: the whole, or with fewer layers."""
    fewer = {"n_layer" if "n_layer" in BASES[base] else "num_hidden_layers": layers} if layers else {}
    described = {**BASES[base], **fewer}
    config = AutoConfig.for_model(described["model_type"], **{k: v for k, v in described.items() if k != "model_type"})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def shapes_of(base: str, layers: int | None = None) -> dict[str, Shape]:
    """Each parameter once, by its name; tied ones by the first of theirs."""
    return {name: tuple(weight.shape) for name, weight in model_of(base, layers).named_parameters()}


# A rank's share of a weight, independent of the code that cuts: by its name and the model's heads.
COLUMNS = re.compile(r"\.(q_proj|gate_proj|up_proj|fc1|c_fc|q_b_proj|kv_b_proj)\.(weight|bias)$")
ROWS = re.compile(r"(\.(o_proj|out_proj|down_proj|fc2)|attn\.c_proj|mlp\.c_proj)\.weight$")
KEYS = re.compile(r"\.(k_proj|v_proj)\.(weight|bias)$")
ENDS = re.compile(r"(embed_tokens|wte|lm_head)\.weight$")
EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")


def expected(base: str, name: str, shape: Shape, ranks: int) -> int:
    """How many numbers of a tensor each of *ranks* holds."""
    config, count = BASES[base], math.prod(shape)
    kv_heads = config.get("num_key_value_heads") or config.get("num_attention_heads", 1)
    if ENDS.search(name):
        return -(-shape[0] // ranks) * shape[1]
    if ".c_attn." in name:  # 48 heads of queries, one of keys, one of values
        head = config["n_embd"] // config["n_head"]
        return (config["n_head"] // ranks * head + 2 * head) * (shape[1] if len(shape) > 1 else 1)
    if KEYS.search(name):
        return count // kv_heads * max(1, kv_heads // ranks)
    return count // ranks if any(kind.search(name) for kind in (COLUMNS, ROWS, EXPERTS)) else count


def cuts_of(base: str, rank: int, ranks: int, layers: int | None = None) -> Mapping[str, Any]:
    model, kind = model_of(base, layers), BASES[base]["model_type"]
    return _slices(model, plan_for(model.config, kind, base), partition_for(model.config, base, rank, ranks))


def local(shape: Shape, cut: Any) -> int:
    """The numbers that a cut keeps; None is a bias that another rank adds, of which zeros stay."""
    return math.prod(shape) if cut is None else math.prod(shape) // shape[cut.dim] * cut.length


def check_covered(name: str, shape: Shape, cuts: list[Any]) -> None:
    """Together the ranks hold every row; what several hold is a whole head of keys or values."""
    if all(cut is None for cut in cuts):
        return
    dim = next(cut.dim for cut in cuts if cut is not None)
    held = sorted({piece for cut in cuts for piece in (cut.ranges if cut is not None else ())})
    end = 0
    for start, stop in held:
        if start < stop:
            assert start == end, (name, held)
            end = stop
    assert end == shape[dim], (name, held)


def divides(base: str, ranks: int) -> bool:
    config = BASES[base]
    heads = config.get("num_attention_heads") or config["n_head"]
    kv_heads = 1 if "n_head" in config else config.get("num_key_value_heads", heads)
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def test_sizes_are_the_published_ones() -> None:
    for base, count in PUBLISHED.items():
        assert sum(math.prod(shape) for shape in shapes_of(base).values()) == count, base
    assert sum(math.prod(shape) for shape in shapes_of("deepseek-v3.2").values()) / 1e9 == pytest.approx(671.03, 1e-3)


def check_slices(base: str, ranks: int, layers: int | None = None) -> None:
    """Check that every rank holds its share of every tensor, and that together they hold all of it."""
    if not divides(base, ranks):
        with pytest.raises(ModelError, match=rf"{ranks} ranks can.* evenly"):
            cuts_of(base, 0, ranks, layers)
        return
    shapes = shapes_of(base, layers)
    all_cuts = [cuts_of(base, rank, ranks, layers) for rank in range(ranks)]
    known = {name for name, _ in model_of(base, layers).named_parameters(remove_duplicate=False)}
    assert {name for cuts in all_cuts for name in cuts if not name.endswith("bias")} <= known
    for name, shape in shapes.items():
        held = {local(shape, cuts[name]) if name in cuts else math.prod(shape) for cuts in all_cuts}
        assert held == {expected(base, name, shape, ranks)}, (name, shape, ranks)
        check_covered(name, shape, [cuts.get(name) for cuts in all_cuts])


@pytest.mark.parametrize("base", BASES)
def test_slices_of_the_first_layers(base: str) -> None:
    """All later layers are like the last of these."""
    for ranks in RANKS:
        check_slices(base, ranks, layers=1 + BASES[base].get("first_k_dense_replace", 0))


@pytest.mark.full
@pytest.mark.parametrize("base", BASES)
def test_every_slice_of_every_base(base: str) -> None:
    for ranks in RANKS:
        check_slices(base, ranks)


@pytest.mark.parametrize("base", BASES)
def test_memory_a_gpu(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = shapes_of(base)
    whole = BF16 * sum(math.prod(shape) for shape in shapes.values())
    line = []
    for ranks in RANKS:
        each = BF16 * sum(expected(base, name, shape, ranks) for name, shape in shapes.items())
        line.append(f"T={ranks} {each / GIB:.1f}" if divides(base, ranks) else f"T={ranks} refused")
        assert not divides(base, ranks) or whole / ranks <= each <= whole / ranks * 1.25, "ranks hold little twice"
    with capsys.disabled():
        print(f"\n{base}: GiB of weights a GPU: {', '.join(line)}")


@pytest.mark.parametrize("name", ACCELERATORS)
def test_every_accelerator(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    draft = ACCELERATORS[name]
    config = draft.config
    vocab, width, inner, heads = (config[key] for key in ("vocab_size", "emb_dim", "inner_dim", "n_predict"))
    shapes: dict[str, Shape] = {}
    for i in range(1 if config["tie_weights"] else heads):
        shapes |= {
            f"speculator.emb.{i}.weight": (vocab, inner),
            f"speculator.head.{i}.weight": (vocab, inner),
            f"speculator.ln.{i}.weight": (inner,),
            f"speculator.ln.{i}.bias": (inner,),
        }
    for i in range(2 if config["tie_weights"] else heads):
        shapes[f"speculator.proj.{i}.weight"] = (inner, inner if i else width)
    spec = mlp_speculator.read(config, BASES[draft.base], shapes)
    assert set(spec.stored.values()) == set(shapes)
    tell(name, draft, shapes, capsys, borrowed=0)


@pytest.mark.parametrize("name", EAGLES)
def test_every_eagle_head(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    draft = EAGLES[name]
    config = draft.config
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "post_attention_layernorm": (hidden,),
    }
    shapes: dict[str, Shape] = {f"layers.0.{part}.weight": shape for part, shape in layer.items()}
    shapes["fc.weight"] = (hidden, 2 * hidden)
    if config.get("bias", True):
        shapes["fc.bias"] = (hidden,)
    spec = eagle.read(config, BASES[draft.base], shapes)
    assert set(spec.stored.values()) == set(shapes)
    assert not spec.has_embedding
    billions = sum(math.prod(shape) for shape in shapes.values()) / 1e9
    assert billions == pytest.approx(draft.billions, rel=0.12)  # the document rounds, and twice by more than that
    tell(name, draft, shapes, capsys, borrowed=2 * config["vocab_size"] * hidden)


def test_the_heads_of_deepseek(capsys: pytest.CaptureFixture[str]) -> None:
    config = BASES["deepseek-v3.2"]
    hidden, inner, vocab = 7168, 2048, 129280
    block: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_a_proj.weight": (1536, hidden),
        "self_attn.q_a_layernorm.weight": (1536,),
        "self_attn.q_b_proj.weight": (128 * 192, 1536),
        "self_attn.kv_a_proj_with_mqa.weight": (576, hidden),
        "self_attn.kv_a_layernorm.weight": (512,),
        "self_attn.kv_b_proj.weight": (128 * 256, 512),
        "self_attn.o_proj.weight": (hidden, 128 * 128),
        "mlp.gate.weight": (256, hidden),
        "mlp.gate.e_score_correction_bias": (256,),
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden),
        "shared_head.norm.weight": (hidden,),
        "shared_head.head.weight": (vocab, hidden),
        "embed_tokens.weight": (vocab, hidden),
    }
    for expert in (*(f"experts.{e}" for e in range(256)), "shared_experts"):
        block |= {
            f"mlp.{expert}.gate_proj.weight": (inner, hidden),
            f"mlp.{expert}.up_proj.weight": (inner, hidden),
            f"mlp.{expert}.down_proj.weight": (hidden, inner),
        }
    shapes = {f"model.layers.61.{name}": shape for name, shape in block.items()}
    spec = mtp.read(config, config, {"model.norm.weight": (hidden,), **shapes})
    assert set(spec.stored.values()) == set(shapes)
    assert sum(math.prod(shape) for shape in shapes.values()) / 1e9 == pytest.approx(14 - 0.5, rel=0.05)
    tell("DeepSeek-V3.2 MTP", Draft("deepseek-v3.2", {}), shapes, capsys, borrowed=0)
    assert "deepseek_v32" in families.REFUSED


def test_the_draft_model_of_the_first_snippet(capsys: pytest.CaptureFixture[str]) -> None:
    draft = opt(768, 3072, 12, 12)
    config = AutoConfig.for_model("opt", **{key: value for key, value in draft.items() if key != "model_type"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert sum(math.prod(shape) for shape in shapes.values()) == 125_239_296
    tell("facebook/opt-125m", Draft("facebook/opt-6.7b", draft), shapes, capsys, borrowed=0)


def tell(
    name: str, draft: Draft, shapes: Mapping[str, Shape], capsys: pytest.CaptureFixture[str], *, borrowed: int
) -> None:
    """Print what the draft's GPU holds: its own weights, and the target's ends where it borrows them."""
    own = sum(math.prod(shape) for shape in shapes.values())
    with capsys.disabled():
        print(
            f"\n{name} for {draft.base}: {BF16 * own / GIB:.2f} GiB on the draft's GPU, and "
            f"{BF16 * borrowed / GIB:.2f} GiB of the target's embedding and head"
        )


def test_every_architecture_has_a_twin_that_runs() -> None:
    assert {config["model_type"] for config in BASES.values()} <= set(tiny_models.FAMILIES)
