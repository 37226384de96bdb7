"""Names and shapes of tensors as published checkpoints have them, written down apart from the loader."""

from collections.abc import Iterable
from typing import Any

Tensors = dict[str, tuple[int, ...]]
"""The shape of each tensor, by its name."""


def linear(name: str, outputs: int, inputs: int, *, bias: bool = False) -> Tensors:
    return {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if bias else {})


def norms(prefix: str, size: int, *names: str) -> Tensors:
    return {f"{prefix}{name}.weight": (size,) for name in names}


def ends(c: dict[str, Any], prefix: str = "model.", head: str = "lm_head") -> Tensors:
    """The embedding, the last norm, and the head if it is not tied."""
    vocab, hidden = c["vocab_size"], c["hidden_size"]
    tied = {} if c.get("tie_word_embeddings") else linear(head, vocab, hidden)
    return {f"{prefix}embed_tokens.weight": (vocab, hidden), f"{prefix}norm.weight": (hidden,)} | tied


def attention(
    prefix: str,
    c: dict[str, Any],
    *,
    bias: str = "",
    normed: int = 0,
    out: str = "o_proj",
    norm_names: tuple[str, str] = ("q_norm", "k_norm"),
) -> Tensors:
    """Llama's attention. *bias*: letters of the projections with one; *normed*: size of the norms of q and k."""
    hidden, heads, kv_heads = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    size = c.get("head_dim") or hidden // heads
    tensors: Tensors = {}
    for letter, rows in (("q", heads * size), ("k", kv_heads * size), ("v", kv_heads * size)):
        tensors |= linear(f"{prefix}{letter}_proj", rows, hidden, bias=letter in bias)
    tensors |= linear(f"{prefix}{out}", hidden, heads * size, bias="o" in bias)
    return tensors | (norms(prefix, normed, *norm_names) if normed else {})


def gated(
    prefix: str, hidden: int, inner: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Tensors:
    """A gated MLP. *names*: of its gate, its other input and its output."""
    gate, up, down = names
    return (
        linear(f"{prefix}{gate}", inner, hidden)
        | linear(f"{prefix}{up}", inner, hidden)
        | linear(f"{prefix}{down}", hidden, inner)
    )


def experts(
    prefix: str,
    count: int,
    hidden: int,
    inner: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Tensors:
    """Experts that are stored one by one."""
    return merged(gated(f"{prefix}{index}.", hidden, inner, names) for index in range(count))


def merged(parts: Iterable[Tensors]) -> Tensors:
    together: Tensors = {}
    for part in parts:
        assert together.keys().isdisjoint(part)
        together |= part
    return together


NORMS = ("input_layernorm", "post_attention_layernorm")


def dense(c: dict[str, Any], prefix: str = "model.", head: str = "lm_head", **attending: Any) -> Tensors:
    """Llama, and families whose layers have the same parts. *attending*: see `attention`."""
    hidden, tensors = c["hidden_size"], ends(c, prefix, head)
    for layer in range(c["num_hidden_layers"]):
        at = f"{prefix}layers.{layer}."
        tensors |= attention(f"{at}self_attn.", c, **attending)
        tensors |= gated(f"{at}mlp.", hidden, c["intermediate_size"]) | norms(at, hidden, *NORMS)
    return tensors


def siglip(prefix: str, layers: int, hidden: int, inner: int) -> Tensors:
    """The tensors of a vision tower that carry its layers; never read."""
    tensors: Tensors = {f"{prefix}embeddings.patch_embedding.weight": (hidden, 3, 14, 14)}
    for layer in range(layers):
        at = f"{prefix}encoder.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            tensors |= linear(f"{at}self_attn.{name}", hidden, hidden, bias=True)
        tensors |= linear(f"{at}mlp.fc1", inner, hidden, bias=True) | linear(f"{at}mlp.fc2", hidden, inner, bias=True)
    return tensors
