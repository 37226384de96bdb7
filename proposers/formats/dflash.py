"""DFlash (arXiv 2602.06036): `z-lab/*-DFlash`, and `speculators`' own. Predicts a block of tokens in one forward."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from proposers.formats import speculators
from proposers.formats.shared.aux_layers import dflash_layers
from proposers.formats.shared.layers import LayerDims, context_of, layer_dims, rope_of
from proposers.formats.shared.layout import Fitted, Shape, Shapes, TensorLayout, refuse, renamed, taken
from proposers.formats.shared.masks import mask_token
from proposers.formats.shared.values import (
    Config,
    check_unquantised,
    check_vocabulary,
    check_width,
    flag,
    integer,
    section,
    target_of,
)

if TYPE_CHECKING:
    import torch

FORMAT = "dflash"
RULES = ((r"^model\.", ""),)
MAPS = ("d2t", "t2d")
SPECULATORS_BLOCK = 8
SLIDING = "sliding_attention"
QWEN3_WINDOW, QWEN3_FULL_LAYERS = 4096, 28  # the defaults of a Qwen3 config


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """What the tokens of a block attend to in one layer.

    Attributes:
        window: number of positions, a token's own and those right before; None for all.
        window_from_block: the window of all tokens is that of the first one; it hides no token of the block.
        causal: of the block, tokens attend only to those before them.
    """

    window: int | None
    window_from_block: bool
    causal: bool


@dataclass(frozen=True, kw_only=True)
class DFlashSpec(Fitted):
    """A DFlash head.

    Attributes:
        dims: of its decoder layers.
        attention: of each of them.
        inputs_of: the target's layers whose inputs it reads, in this order.
        target_hidden: width of each of those.
        vocab_size: the target's.
        draft_size: rows of its head; if fewer than the target's, `target_ids` maps them.
        block_size: tokens of a forward: the newest known one and masks.
        samples_anchor: the first draft token is predicted at the newest known token, not at the first mask.
        mask_token_id: an id of the embedding.
        has_embedding, has_head: the checkpoint has its own; else the target's is used.
        rope: rotary parameters, in the format of `transformers` 5.
        max_model_len: most positions.
    """

    dims: LayerDims
    attention: tuple[LayerAttention, ...]
    inputs_of: tuple[int, ...]
    target_hidden: int
    vocab_size: int
    draft_size: int
    block_size: int
    samples_anchor: bool
    mask_token_id: int
    has_embedding: bool
    has_head: bool
    rope: Mapping[str, Any]
    max_model_len: int


def features_of(config: Config, target_config: Config) -> tuple[int, ...]:
    """Return `inputs_of` from the configs alone; raises `ModelError` if the target has no such layers."""
    return dflash_layers(FORMAT, speculators.flattened(config), target_of(target_config))


def block_size_of(config: Config) -> int:
    """Return the size of a block from the config alone; raises `ModelError` if it is missing or below 2."""
    default = SPECULATORS_BLOCK if speculators.is_speculators(config) else None
    size = integer(FORMAT, {**section(config, "dflash_config"), **config}, "block_size", default=default)
    if size < 2:
        refuse(FORMAT, f"block_size in its config must be at least 2, got {size}")
    return size


def tokens_of(config: Config) -> int:
    """Return the number of draft tokens of a block, 0 if its size is not stated; raises like `block_size_of`."""
    plain = speculators.flattened(config)
    nested = section(plain, "dflash_config")
    anchor = flag(FORMAT, {**plain, **nested}, "sample_from_anchor", default=False)
    is_stated = speculators.is_speculators(config) or "block_size" in {**nested, **plain}
    return block_size_of(config) - (0 if anchor else 1) if is_stated else 0


def read(config: Config, target_config: Config, shapes: Shapes) -> DFlashSpec:
    """Check a checkpoint by its config and the shapes of its tensors.

    Raises:
        ModelError: it does not fit the target, or is inconsistent; names the tensor and both shapes.
    """
    check_unquantised(FORMAT, config)
    plain, target = speculators.flattened(config), target_of(target_config)
    nested = section(plain, "dflash_config")
    names = renamed(FORMAT, shapes, RULES)
    if flag(FORMAT, nested, "attention_sink_bias", default=False):
        refuse(FORMAT, "its attention has sinks (attention_sink_bias), which are not supported for this format")
    vocab_size = integer(FORMAT, plain, "vocab_size", default=target.vocab_size)
    check_vocabulary(FORMAT, vocab_size, target)
    check_width(
        FORMAT, "target_hidden_size", integer(FORMAT, plain, "target_hidden_size", default=target.hidden), target
    )
    spec = DFlashSpec(
        stored={},
        dims=layer_dims(FORMAT, plain, names),
        attention=_attention(plain, nested, from_speculators=speculators.is_speculators(config)),
        inputs_of=features_of(config, target_config),
        target_hidden=target.hidden,
        vocab_size=vocab_size,
        draft_size=integer(FORMAT, plain, "draft_vocab_size", default=vocab_size),
        block_size=block_size_of(config),
        samples_anchor=flag(FORMAT, {**plain, **nested}, "sample_from_anchor", default=False),
        mask_token_id=mask_token(FORMAT, plain, vocab_size),
        has_embedding="embed_tokens.weight" in names,
        has_head="lm_head.weight" in names,
        rope=rope_of(plain, target_config),
        max_model_len=context_of(FORMAT, plain, target),
    )
    stored = _layout(spec).fit(shapes, RULES)
    if "d2t" not in stored and spec.draft_size != spec.vocab_size:
        refuse(FORMAT, f"d2t should be [{spec.draft_size}], but the checkpoint has no such tensor")
    return replace(spec, stored=stored)


def load(spec: DFlashSpec, tensors: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """Return `fc.weight [H, n * Ht]`, `hidden_norm.weight [H]`, `norm.weight [H]`, `layers.{i}.*` as `transformers`
    names a Qwen3 layer, perhaps `embed_tokens.weight [V, H]` and `lm_head.weight [Vd, H]`, and where there are maps
    `target_ids`, int64 `[Vd]`: the target's id of each of the draft's.

    Raises:
        ModelError: the vocabulary maps have invalid ids, or disagree.
    """
    from proposers.formats.shared.vocabulary import target_ids  # noqa: PLC0415 - `read` and `features_of` need no torch

    found = taken(spec, tensors)
    d2t, t2d = (found.pop(name, None) for name in MAPS)
    if d2t is not None:
        found["target_ids"] = target_ids(FORMAT, d2t, t2d, spec.vocab_size)
    return found


def _attention(config: Config, nested: Config, *, from_speculators: bool) -> tuple[LayerAttention, ...]:
    """Return the attention of each layer.

    In `speculators`, the window of a sliding layer is the positions right before the block, from which all tokens of
    the block count; the block itself is outside of it. Blocks are causal in sliding layers, unless
    `sliding_window_non_causal`, and never in others. In other checkpoints each token has its own window.
    """
    windows = _windows_of_speculators(config) if from_speculators else _windows(config, nested)
    slides_causally = from_speculators and not flag(FORMAT, config, "sliding_window_non_causal", default=False)
    return tuple(
        LayerAttention(
            window=size + 1 if size is not None and from_speculators else size,
            window_from_block=size is not None and from_speculators,
            causal=flag(FORMAT, nested, "causal", default=size is not None and slides_causally),
        )
        for size in windows
    )


def _windows(config: Config, nested: Config) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, None for full attention."""
    num_layers = integer(FORMAT, config, "num_hidden_layers")
    size = integer(FORMAT, {**config, **nested}, "swa_window_size", "sliding_window", default=0) or None
    types = config.get("layer_types")
    if isinstance(types, list) and len(types) == num_layers:
        return tuple(size if kind == SLIDING else None for kind in types)
    everywhere = flag(FORMAT, {**config, **nested}, "use_swa", default=False)
    return (size if everywhere else None,) * num_layers


def _windows_of_speculators(config: Config) -> tuple[int | None, ...]:
    """Return the same for a config of Qwen3's layers, which `use_sliding_window` must allow to slide."""
    num_layers = integer(FORMAT, config, "num_hidden_layers")
    is_without = "sliding_window" in config and config["sliding_window"] is None
    if is_without or not flag(FORMAT, config, "use_sliding_window", default=False):
        return (None,) * num_layers
    size = integer(FORMAT, config, "sliding_window", default=QWEN3_WINDOW)
    first = integer(FORMAT, config, "max_window_layers", default=QWEN3_FULL_LAYERS)
    types = config.get("layer_types")
    if not isinstance(types, list) or len(types) != num_layers:
        types = [SLIDING if i >= first else "full_attention" for i in range(num_layers)]
    return tuple(size if kind == SLIDING else None for kind in types)


def _layout(spec: DFlashSpec) -> TensorLayout:
    hidden = spec.dims.hidden
    features = spec.target_hidden * len(spec.inputs_of)
    required: dict[str, Shape] = {
        "fc.weight": (hidden, features),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(len(spec.attention)):
        required |= spec.dims.tensors(f"layers.{i}.")
    ends: dict[str, Shape] = {
        "embed_tokens.weight": (spec.vocab_size, hidden),
        "lm_head.weight": (spec.draft_size, hidden),
    }
    if hidden != spec.target_hidden:
        required |= ends
    elif spec.draft_size != spec.vocab_size:
        required["lm_head.weight"] = ends["lm_head.weight"]
    return TensorLayout(FORMAT, required, {**ends, "d2t": (spec.draft_size,), "t2d": (spec.vocab_size,)})
