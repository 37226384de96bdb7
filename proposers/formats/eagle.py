"""EAGLE-1 and EAGLE-2 (Li et al. 2024, arXiv 2401.15077 and 2406.16858): `yuhuili/EAGLE-*`. The weights are the same;
EAGLE-2 drafts dynamic trees with them.

vLLM's converted checkpoints (`model_type` "eagle") have the layers' config in a section `model`, no bias unless stated,
and tensors that are not used: a copy of the target's head, and weights of the two norms that EAGLE does not have.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proposers.formats.shared.layers import LayerDims, context_of, layer_dims, rope_of
from proposers.formats.shared.layout import COMPUTED, Fitted, Shape, Shapes, TensorLayout, refuse, renamed, taken
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

FORMAT = "eagle"
RULES = ((r"^(model\.)+", ""),)
CONVERTED = "model"
UNUSED = (COMPUTED, r"^lm_head\.weight$", r"^norm\.weight$", r"^layers\.0\.input_layernorm\.weight$")
"""Tensors of converted checkpoints."""


@dataclass(frozen=True, kw_only=True)
class EagleSpec(Fitted):
    """An EAGLE head.

    Attributes:
        dims: of its decoder layers; layer 0 has no input norm, and there is no final norm.
        num_layers: nearly always 1.
        fc_bias: whether `fc` has a bias; the default is true, and false for converted checkpoints.
        has_embedding: the checkpoint has its own; else the target's is used.
        vocab_size: the target's.
        rope: rotary parameters, in the format of `transformers` 5; the authors read none from the target.
        max_model_len: most positions.
    """

    dims: LayerDims
    num_layers: int
    fc_bias: bool
    has_embedding: bool
    vocab_size: int
    rope: Mapping[str, Any]
    max_model_len: int


def read(config: Config, target_config: Config, shapes: Shapes) -> EagleSpec:
    """Check a checkpoint by its config and the shapes of its tensors.

    Raises:
        ModelError: it does not fit the target, or is inconsistent; names the tensor and both shapes.
    """
    check_unquantised(FORMAT, config)
    target, is_converted = target_of(target_config), bool(section(config, CONVERTED))
    config = _flattened(config)
    names = renamed(FORMAT, shapes, RULES)
    dims = layer_dims(FORMAT, config, names)
    vocab_size = integer(FORMAT, config, "vocab_size")
    check_vocabulary(FORMAT, vocab_size, target)
    check_width(FORMAT, "hidden_size", dims.hidden, target)
    num_layers = integer(FORMAT, config, "num_hidden_layers", default=1)
    fc_bias = flag(FORMAT, config, "eagle_fc_bias", "bias", default=not is_converted)
    required = _required(dims, num_layers, fc_bias)
    optional = {"embed_tokens.weight": (vocab_size, dims.hidden)}
    return EagleSpec(
        stored=TensorLayout(FORMAT, required, optional, UNUSED if is_converted else (COMPUTED,)).fit(shapes, RULES),
        dims=dims,
        num_layers=num_layers,
        fc_bias=fc_bias,
        has_embedding="embed_tokens.weight" in names,
        vocab_size=vocab_size,
        rope=rope_of(config),
        max_model_len=context_of(FORMAT, config, target),
    )


def load(spec: EagleSpec, tensors: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """Return `fc.weight [H, 2H]`, perhaps `fc.bias [H]` and `embed_tokens.weight [V, H]`, and `layers.{i}.*` as
    `transformers` names a Llama layer; layer 0 without its `input_layernorm`.
    """
    return taken(spec, tensors)


def _flattened(config: Config) -> Config:
    """Return *config* with the section of a converted checkpoint at the top level; other configs unchanged.

    Raises:
        ModelError: it has a smaller vocabulary of its own, or norms of its inputs.
    """
    layers = section(config, CONVERTED)
    if not layers:
        return config
    plain = {**layers, **{key: value for key, value in config.items() if key != CONVERTED and value is not None}}
    full = integer(FORMAT, plain, "vocab_size")
    kept = integer(FORMAT, plain, "truncated_vocab_size", default=full)
    if kept != full:
        refuse(
            FORMAT, f"truncated_vocab_size is {kept} of {full}: a smaller vocabulary is not supported for this format"
        )
    if flag(FORMAT, plain, "add_para_norm", default=False):
        refuse(FORMAT, "it normalises its inputs (add_para_norm), which is not supported for this format")
    return plain


def _required(dims: LayerDims, num_layers: int, fc_bias: bool) -> dict[str, Shape]:
    required: dict[str, Shape] = {"fc.weight": (dims.hidden, 2 * dims.hidden)}
    if fc_bias:
        required["fc.bias"] = (dims.hidden,)
    for i in range(num_layers):
        required |= dims.tensors(f"layers.{i}.")
    del required["layers.0.input_layernorm.weight"]
    return required
