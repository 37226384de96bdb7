"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840), with extensions of NVIDIA's, vLLM's and `speculators`' checkpoints."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from proposers.formats import speculators
from proposers.formats.shared.aux_layers import eagle_layers
from proposers.formats.shared.layers import LayerDims, context_of, layer_dims, rope_of
from proposers.formats.shared.layout import Fitted, Shape, Shapes, TensorLayout, refuse, renamed, taken
from proposers.formats.shared.values import (
    Config,
    TargetDims,
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

FORMAT = "eagle3"
RULES = (
    (r"^model\.", ""),
    (r"^midlayer\.", "layers.0."),
    (r"^aux_norm_low\.", "fc_norm.0."),
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
)
MASK = "mask_hidden"
MAPS = ("d2t", "t2d")


@dataclass(frozen=True, kw_only=True)
class Eagle3Spec(Fitted):
    """An EAGLE-3 head.

    Attributes:
        dims: of its decoder layers; layer 0 reads embedding and state, `2 hidden`, and has a `hidden_norm`.
        num_layers: of them.
        inputs_of: the target's layers whose inputs it reads, in this order; empty: the state the target's head reads.
        target_hidden: width of each of those.
        vocab_size: the target's.
        draft_size: rows of its head; if fewer than the target's, `target_ids` maps them.
        norm_before_residual: the residual of layer 0 starts from the normalised state.
        norm_before_fc: one norm over all states, `input_norm`, before `fc`.
        fc_norm: a norm for each of the states, `fc_norm.{i}`, before `fc`.
        norm_output: the states fed back are those after the last norm.
        has_fc: `fc` projects the states to `hidden`; else they are used directly.
        has_embedding, has_head: the checkpoint has its own; else the target's is used.
        rope: rotary parameters, in the format of `transformers` 5; the authors read none from the target.
        max_model_len: most positions.
    """

    dims: LayerDims
    num_layers: int
    inputs_of: tuple[int, ...]
    target_hidden: int
    vocab_size: int
    draft_size: int
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    has_fc: bool
    has_embedding: bool
    has_head: bool
    rope: Mapping[str, Any]
    max_model_len: int

    @property
    def features(self) -> int:
        """Total width of the target's states that it reads."""
        return self.target_hidden * max(1, len(self.inputs_of))


def features_of(config: Config, target_config: Config) -> tuple[int, ...]:
    """Return `inputs_of` from the configs alone; raises `ModelError` if the target has no such layers."""
    plain = speculators.flattened(config)
    return eagle_layers(FORMAT, plain, target_of(target_config)) if _uses_aux(plain) else ()


def read(config: Config, target_config: Config, shapes: Shapes) -> Eagle3Spec:
    """Check a checkpoint by its config and the shapes of its tensors; a P-EAGLE one may be read as EAGLE-3.

    Raises:
        ModelError: it does not fit the target, or is inconsistent; names the tensor and both shapes.
    """
    return read_as(FORMAT, config, target_config, shapes)


def read_as(title: str, config: Config, target_config: Config, shapes: Shapes) -> Eagle3Spec:
    """See `read`; *title* is the checkpoint's name in messages."""
    check_unquantised(title, config)
    plain, target = speculators.flattened(config), target_of(target_config)
    names = renamed(title, shapes, RULES)
    dims = layer_dims(title, plain, names)
    vocab_size = integer(title, plain, "vocab_size", default=target.vocab_size)
    check_vocabulary(title, vocab_size, target)
    check_width(title, "target_hidden_size", integer(title, plain, "target_hidden_size", default=target.hidden), target)
    inputs_of = features_of(config, target_config)
    nested = section(plain, "eagle_config")
    spec = Eagle3Spec(
        stored={},
        dims=dims,
        num_layers=integer(title, plain, "num_hidden_layers", default=1),
        inputs_of=inputs_of,
        target_hidden=target.hidden,
        vocab_size=vocab_size,
        draft_size=integer(title, plain, "draft_vocab_size", default=vocab_size),
        norm_before_residual=flag(title, plain, "norm_before_residual", default=False),
        norm_before_fc=flag(title, {**nested, **plain}, "norm_before_fc", default="input_norm.weight" in names),
        fc_norm=flag(title, {**nested, **plain}, "fc_norm", "use_aux_norm", default="fc_norm.0.weight" in names),
        norm_output=flag(title, plain, "norm_output", default=False),
        has_fc=bool(inputs_of) or "fc.weight" in names,
        has_embedding="embed_tokens.weight" in names,
        has_head="lm_head.weight" in names,
        rope=rope_of(plain),
        max_model_len=context_of(title, plain, target),
    )
    _check(title, plain, spec, target)
    stored = _layout(title, spec, shapes.get(names.get(MASK, ""))).fit(shapes, RULES)
    if "d2t" not in stored and spec.draft_size != spec.vocab_size:
        refuse(title, f"d2t should be [{spec.draft_size}], but the checkpoint has no such tensor")
    return replace(spec, stored=stored)


def load(spec: Eagle3Spec, tensors: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """Return `layers.{i}.*` as `transformers` names a Llama layer (layer 0 also `hidden_norm.weight [H]`, its queries,
    keys and values `[., 2H]`), `norm.weight [H]`, and, depending on the spec, `fc.weight [H, features]`,
    `input_norm.weight [features]`, `fc_norm.{i}.weight [Ht]`, `embed_tokens.weight [V, H]`, `lm_head.weight [Vd, H]`,
    and where there are maps `target_ids`, int64 `[Vd]`: the target's id of each of the draft's.

    Raises:
        ModelError: the vocabulary maps have invalid ids, or disagree.
    """
    from proposers.formats.shared.vocabulary import target_ids  # noqa: PLC0415 - `read` and `features_of` need no torch

    found = taken(spec, tensors)
    found.pop(MASK, None)
    d2t, t2d = (found.pop(name, None) for name in MAPS)
    if d2t is not None:
        found["target_ids"] = target_ids(FORMAT, d2t, t2d, spec.vocab_size)
    return found


def _layout(title: str, spec: Eagle3Spec, mask: Shape | None) -> TensorLayout:
    """Return the tensors of a checkpoint of *spec*, whose `mask_hidden` has the shape *mask*."""
    hidden, dims = spec.dims.hidden, spec.dims
    required: dict[str, Shape] = {"norm.weight": (hidden,), "layers.0.hidden_norm.weight": (hidden,)}
    for i in range(spec.num_layers):
        required |= dims.tensors(f"layers.{i}.", 2 * hidden if i == 0 else None)
    if spec.has_fc:
        required["fc.weight"] = (hidden, spec.features)
    if spec.norm_before_fc:
        required["input_norm.weight"] = (spec.features,)
    if spec.fc_norm:
        required |= {f"fc_norm.{i}.weight": (spec.target_hidden,) for i in range(len(spec.inputs_of))}
    ends: dict[str, Shape] = {
        "embed_tokens.weight": (spec.vocab_size, hidden),
        "lm_head.weight": (spec.draft_size, hidden),
    }
    borrowed = hidden == spec.target_hidden
    if not borrowed:
        required |= ends
    elif spec.draft_size != spec.vocab_size:
        required["lm_head.weight"] = ends["lm_head.weight"]
    maps: dict[str, Shape] = {"d2t": (spec.draft_size,), "t2d": (spec.vocab_size,)}
    whole = mask if mask and math.prod(mask) == spec.features else (1, 1, spec.features)
    return TensorLayout(title, required, {**ends, **maps, MASK: whole})


def _uses_aux(config: Config) -> bool:
    nested = section(config, "eagle_config")
    return flag(FORMAT, {**config, **nested}, "use_aux_hidden_state", default=True)


def _check(title: str, config: Config, spec: Eagle3Spec, target: TargetDims) -> None:
    count = integer(title, config, "num_aux_hidden_states", default=len(spec.inputs_of))
    if count != len(spec.inputs_of):
        refuse(title, f"num_aux_hidden_states is {count}, but it names {len(spec.inputs_of)} layers of the target")
    if not 0 < spec.draft_size <= target.vocab_size:
        refuse(title, f"draft_vocab_size is {spec.draft_size}, but the target's vocabulary has {target.vocab_size}")
