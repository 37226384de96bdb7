"""P-EAGLE: an EAGLE-3 head that predicts all draft tokens in one forward, from a mask token and a mask state."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proposers.formats import eagle3, speculators
from proposers.formats.shared.layout import Shapes, refuse
from proposers.formats.shared.masks import mask_token
from proposers.formats.shared.values import Config

if TYPE_CHECKING:
    import torch

FORMAT = "p_eagle"
features_of = eagle3.features_of


@dataclass(frozen=True, kw_only=True)
class ParallelEagleSpec(eagle3.Eagle3Spec):
    """An EAGLE-3 head with a mask; `mask_token_id` is an id of the target."""

    mask_token_id: int


def read(config: Config, target_config: Config, shapes: Shapes) -> ParallelEagleSpec:
    """Check a checkpoint by its config and the shapes of its tensors.

    Raises:
        ModelError: it does not fit the target, or is inconsistent; names the tensor and both shapes.
    """
    spec = eagle3.read_as(FORMAT, config, target_config, shapes)
    if eagle3.MASK not in spec.stored:
        refuse(FORMAT, f"{eagle3.MASK} should be [1, 1, {spec.features}], but the checkpoint has no such tensor")
    mask = mask_token(FORMAT, speculators.flattened(config), spec.vocab_size)
    return ParallelEagleSpec(**vars(spec), mask_token_id=mask)


def load(spec: ParallelEagleSpec, tensors: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """Return what `eagle3.load` does, and `mask_hidden [features]`: the state of masked positions, before `fc`."""
    mask_F = tensors[spec.stored[eagle3.MASK]].reshape(-1)
    return {**eagle3.load(spec, tensors), eagle3.MASK: mask_F}
