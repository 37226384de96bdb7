"""EAGLE-1 and EAGLE-2 (Li et al. 2024, arXiv 2401.15077 and 2406.16858): `yuhuili/EAGLE-*`. The weights are the same;
EAGLE-2 drafts dynamic trees with them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proposers.formats.shared.layers import LayerDims, context_of, layer_dims, rope_of
from proposers.formats.shared.layout import Fitted, Shape, Shapes, TensorLayout, renamed, taken
from proposers.formats.shared.values import (
    Config,
    check_unquantised,
    check_vocabulary,
    check_width,
    flag,
    integer,
    target_of,
)

if TYPE_CHECKING:
    import torch

FORMAT = "eagle"
RULES = ((r"^model\.", ""),)


@dataclass(frozen=True, kw_only=True)
class EagleSpec(Fitted):
    """An EAGLE head.

    Attributes:
        dims: of its decoder layers; layer 0 has no input norm, and there is no final norm.
        num_layers: nearly always 1.
        fc_bias: whether `fc` has a bias; the default is true.
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
    target = target_of(target_config)
    names = renamed(FORMAT, shapes, RULES)
    dims = layer_dims(FORMAT, config, names)
    vocab_size = integer(FORMAT, config, "vocab_size")
    check_vocabulary(FORMAT, vocab_size, target)
    check_width(FORMAT, "hidden_size", dims.hidden, target)
    num_layers = integer(FORMAT, config, "num_hidden_layers", default=1)
    fc_bias = flag(FORMAT, config, "bias", default=True)
    required = _required(dims, num_layers, fc_bias)
    optional = {"embed_tokens.weight": (vocab_size, dims.hidden)}
    return EagleSpec(
        stored=TensorLayout(FORMAT, required, optional).fit(shapes, RULES),
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


def _required(dims: LayerDims, num_layers: int, fc_bias: bool) -> dict[str, Shape]:
    required: dict[str, Shape] = {"fc.weight": (dims.hidden, 2 * dims.hidden)}
    if fc_bias:
        required["fc.bias"] = (dims.hidden,)
    for i in range(num_layers):
        required |= dims.tensors(f"layers.{i}.")
    del required["layers.0.input_layernorm.weight"]
    return required
