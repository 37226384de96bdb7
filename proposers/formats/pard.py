"""PARD (An et al. 2025, arXiv 2504.18583): `amd/PARD-*`. A causal model trained to predict masked tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proposers.formats.shared.layout import Fitted, Shapes, TensorLayout, taken
from proposers.formats.shared.masks import mask_token
from proposers.formats.shared.values import Config, check_unquantised, integer

if TYPE_CHECKING:
    import torch

FORMAT = "pard"


@dataclass(frozen=True, kw_only=True)
class PardSpec(Fitted):
    """A causal model with a mask token. It serves a family of targets, whose vocabularies may have other padding.

    Attributes:
        vocab_size: its own.
        mask_token_id: an id of its own, which need not be one of the target's.
        max_model_len: most positions.
    """

    vocab_size: int
    mask_token_id: int
    max_model_len: int


def read(config: Config, target_config: Config, shapes: Shapes) -> PardSpec:
    """Check a checkpoint by its config and the shapes of its tensors.

    Raises:
        ModelError: it is inconsistent; names the tensor and both shapes.
    """
    from proposers.formats.causal import model_shapes  # noqa: PLC0415 - detection must not load transformers

    check_unquantised(FORMAT, config)
    vocab_size = integer(FORMAT, config, "vocab_size")
    mask = mask_token(FORMAT, config, vocab_size)
    stored, tied = model_shapes(FORMAT, config)
    return PardSpec(
        stored=TensorLayout(FORMAT, stored, tied).fit(shapes),
        vocab_size=vocab_size,
        mask_token_id=mask,
        max_model_len=integer(FORMAT, config, "max_position_embeddings"),
    )


def load(spec: PardSpec, tensors: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """Return the weights as `transformers` names them; tied ones only if they are stored."""
    return taken(spec, tensors)
