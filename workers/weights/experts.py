"""Putting experts with quantised weights into a model while it is loaded."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from workers.quantization.experts import QuantizedExperts, StackedLinear, is_described, stack, weights_of
from workers.weights.keeping import Keeper, placed
from workers.weights.partition import TensorSlice

if TYPE_CHECKING:
    from workers.weights.reader import Checkpoint


def quantize_experts(
    model: Any,
    checkpoint: "Checkpoint",
    slices: Mapping[str, TensorSlice | None],
    keeper: Keeper,
    device: torch.device,
) -> None:
    """Replace the experts of *model*, which is on the meta device, all of whose weights *keeper* quantises.

    As linear layers, each is quantised whole, and a rank then takes its slice. Experts whose computation is not known,
    or whose weights are missing or of another shape, are left to the loader.

    Raises:
        ModelError: the parts of a stored weight do not fit together.
    """
    for name, experts in [*model.named_modules()]:
        if is_described(experts):
            found = [
                _kept(experts.get_parameter(key), f"{name}.{key}", outputs, checkpoint, slices, keeper, device)
                for key, outputs in weights_of(experts).items()
            ]
            ups, downs = found
            if ups is not None and downs is not None:
                model.set_submodule(name, QuantizedExperts(experts, ups, downs))


def _kept(  # noqa: PLR0917
    weight: torch.Tensor,
    name: str,
    outputs: int,
    checkpoint: "Checkpoint",
    slices: Mapping[str, TensorSlice | None],
    keeper: Keeper,
    device: torch.device,
) -> StackedLinear | None:
    stored = checkpoint.find_experts(name, outputs)
    shape = weight.shape[outputs], weight.shape[3 - outputs]
    if len(stored) != len(weight) or any(expert.shape != shape for expert in stored):
        return None
    part = slices.get(name)
    own = None if part is None else TensorSlice(0 if part.dim == outputs else 1, part.ranges, part.length)
    kept = (keeper.keep(expert, is_head=False) for expert in stored)
    return stack((None if expert is None else placed(expert, own, device) for expert in kept), len(weight))
