"""Hydra heads (Ankner et al. 2024, arXiv 2402.05109): `ankner/hydra-*`. Medusa heads that also read the draft tokens.

Two of the published architectures are read. In `mlp`, head i is `hydra_mlp.{i}` and `hydra_lm_head.{i}`. In
`prefix-mlp` a Llama model of one layer over the target's states precedes them, misspelled `prefix_embeding_layer`, and
dropouts are counted as modules: block k is `hydra_mlp.{i}.{2k + 1}`, the output `hydra_lm_head.{i}.1`. Blocks after
the first are one module, repeated; some checkpoints store it once, some every time. Those that the authors' `train.py`
saves also hold the target's embedding, `input_embed_fn`, which is not read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from proposers.formats.shared.layers import LayerDims, context_of, layer_dims, rope_of
from proposers.formats.shared.layout import Fitted, Rules, Shape, Shapes, TensorLayout, refuse, renamed, taken
from proposers.formats.shared.values import (
    Config,
    TargetDims,
    check_unquantised,
    check_vocabulary,
    check_width,
    flag,
    integer,
)
from proposers.formats.shared.values import target_of as read_target

if TYPE_CHECKING:
    import torch

FORMAT = "hydra"
MLP, PREFIX = "mlp", "prefix-mlp"
EMBEDDING = "input_embed_fn.weight"
UNUSED = (r"^input_embed_fn\.weight$", r"^prefix\.embed_tokens\.", r"(^|\.)rotary_emb\.inv_freq$")


@dataclass(frozen=True, kw_only=True)
class HydraSpec(Fitted):
    """Hydra heads.

    Attributes:
        width: of the target's states and embedding.
        num_heads: head i (from 0) predicts the token i + 2 positions after the state's own.
        num_blocks: residual blocks of a head.
        grounded: head i reads the state and i + 1 embeddings, `(i + 2) width`; else the state alone.
        head_bias: outputs have biases.
        vocab_size: the target's.
        prefix: dimensions of the layer before the heads (a Llama layer and a norm); None without.
        rope: its rotary parameters, in the format of `transformers` 5.
        max_model_len: most positions.
    """

    width: int
    num_heads: int
    num_blocks: int
    grounded: bool
    head_bias: bool
    vocab_size: int
    prefix: LayerDims | None
    rope: Mapping[str, Any]
    max_model_len: int


def read(config: Config, target_config: Config, shapes: Shapes) -> HydraSpec:
    """Check a checkpoint by its config and the shapes of its tensors.

    Raises:
        ModelError: it does not fit the target, or is inconsistent; names the tensor and both shapes.
    """
    check_unquantised(FORMAT, config)
    target = read_target(target_config)
    check_vocabulary(FORMAT, integer(FORMAT, config, "vocab_size", default=target.vocab_size), target)
    check_width(FORMAT, "hidden_size", integer(FORMAT, config, "hidden_size", default=target.hidden), target)
    arch = _arch(config)
    num_blocks = integer(FORMAT, config, "hydra_num_layers", default=1)
    rules = _rules(arch, num_blocks)
    names = renamed(FORMAT, shapes, rules)
    _check_embedding(names, shapes, target)
    spec = _spec(config, target_config, target, num_blocks, names)
    spec = replace(spec, prefix=_prefix(target_config, names) if arch == PREFIX else None)
    return replace(spec, stored=_layout(spec).fit(shapes, rules))


def load(spec: HydraSpec, tensors: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """Return, for head i and block k, `blocks.{i}.{k}.weight [H, in]` and `.bias [H]`; for the first block of grounded
    heads, which reads `in = (i + 2) H`, also `blocks.{i}.0.res.weight [H, in]` and `.res.bias [H]`; `heads.{i}.weight
    [V, H]` and perhaps `.bias [V]`; with a prefix `prefix.layers.0.*`, as `transformers` names a Llama layer, and
    `prefix.norm.weight [H]`. Blocks that are one module are the same tensors under several names.
    """
    found = taken(spec, tensors)
    return found | {name: found[_first_of(spec, name)] for name in _blocks(spec) if name not in found}


def _arch(config: Config) -> str:
    arch = str(config.get("hydra_head_arch") or MLP)
    if arch not in (MLP, PREFIX):
        refuse(FORMAT, f"its hydra_head_arch {arch!r} is not supported; supported are {MLP} and {PREFIX}")
    offset = integer(FORMAT, config, "hidden_state_offset", default=0)
    if offset:
        refuse(FORMAT, f"its hidden_state_offset is {offset}; only 0, the target's last state, is supported")
    return arch


def _check_embedding(names: Mapping[str, str], shapes: Shapes, target: TargetDims) -> None:
    """Refuse a copy of another target's embedding; raises `ModelError` with both shapes."""
    stored, wanted = names.get(EMBEDDING), (target.vocab_size, target.hidden)
    if stored is not None and shapes[stored] != wanted:
        refuse(
            FORMAT,
            f"{stored} is {list(shapes[stored])}, but the target's embedding is {list(wanted)}: "
            "use the one that was trained for this target",
        )


def _rules(arch: str, num_blocks: int) -> Rules:
    blocks = [
        (
            rf"^hydra_mlp\.(\d+)\.{2 * k + 1 if arch == PREFIX else k}\.(linear\.|(?=res_connection\.))",
            rf"blocks.\1.{k}.",
        )
        for k in range(num_blocks)
    ]
    return (
        (r"^(model\.)?(hydra_heads?\.)?(?=hydra_|prefix_|input_embed_fn\.)", ""),
        *blocks,
        (r"^(blocks\.\d+\.\d+\.)res_connection\.", r"\1res."),
        (r"^hydra_lm_heads?\.(\d+)\." + (r"1\." if arch == PREFIX else ""), r"heads.\1."),
        (r"^prefix_embed+ing_layer\.(model\.)?", "prefix."),
    )


def _spec(
    config: Config, target_config: Config, target: TargetDims, num_blocks: int, names: Mapping[str, str]
) -> HydraSpec:
    return HydraSpec(
        stored={},
        width=target.hidden,
        num_heads=integer(FORMAT, config, "hydra_num_heads"),
        num_blocks=num_blocks,
        grounded=flag(FORMAT, config, "grounded_heads", default=True),
        head_bias="heads.0.bias" in names,
        vocab_size=target.vocab_size,
        prefix=None,
        rope=rope_of(target_config, target_config),
        max_model_len=context_of(FORMAT, {}, target),
    )


def _prefix(target_config: Config, names: Mapping[str, str]) -> LayerDims:
    """Return the dimensions of the prefix layer, which are the target's: its own config does not state them."""
    return layer_dims(FORMAT, target_config, [name for name in names if name.startswith("prefix.")])


def _blocks(spec: HydraSpec) -> dict[str, Shape]:
    wanted: dict[str, Shape] = {}
    for i in range(spec.num_heads):
        for k in range(spec.num_blocks):
            is_wide = spec.grounded and k == 0
            reads = (i + 2) * spec.width if is_wide else spec.width
            for part in ("", "res.") if is_wide else ("",):
                wanted[f"blocks.{i}.{k}.{part}weight"] = (spec.width, reads)
                wanted[f"blocks.{i}.{k}.{part}bias"] = (spec.width,)
    return wanted


def _first_of(spec: HydraSpec, name: str) -> str:
    """Return the name of the block that *name* repeats: the first one after the wide block."""
    part, head, block, leaf = name.split(".", 3)
    return f"{part}.{head}.{min(int(block), 1 if spec.grounded else 0)}.{leaf}"


def _layout(spec: HydraSpec) -> TensorLayout:
    blocks = _blocks(spec)
    required = {name: shape for name, shape in blocks.items() if _first_of(spec, name) == name}
    for i in range(spec.num_heads):
        required[f"heads.{i}.weight"] = (spec.vocab_size, spec.width)
        if spec.head_bias:
            required[f"heads.{i}.bias"] = (spec.vocab_size,)
    if spec.prefix is not None:
        required |= spec.prefix.tensors("prefix.layers.0.")
        required["prefix.norm.weight"] = (spec.width,)
    return TensorLayout(FORMAT, required, blocks, UNUSED)
