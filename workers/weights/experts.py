"""Experts that keep quantised weights: where each is stored, and putting them into a model while it is loaded."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from workers.quantization.experts import QuantizedExperts, StackedLinear, is_described, stack, weights_of
from workers.quantization.weight import QuantizedWeight
from workers.weights.keeping import Keeper, sliced
from workers.weights.partition import TensorSlice
from workers.weights.quantized.stored import DequantizedWeight
from workers.weights.reader import Checkpoint, JoinedRows, StackedExperts, StoredWeight


@dataclass(frozen=True)
class OneExpert:
    """One of the experts that are stored as one tensor, as a weight `[N, K]`; *outputs*: the dimension of N in it."""

    stored: StoredWeight
    number: int
    outputs: int

    @property
    def shape(self) -> tuple[int, ...]:
        """See `StoredWeight`."""
        return self.stored.shape[self.outputs], self.stored.shape[3 - self.outputs]

    def read(self, dim: int, start: int, stop: int) -> torch.Tensor:
        """See `StoredWeight`."""
        weight = self.stored.read(0, self.number, self.number + 1)[0]
        return (weight if self.outputs == 1 else weight.T).narrow(dim, start, stop - start)

    def quantized(self) -> QuantizedWeight | None:
        """See `StoredWeight`."""
        return None


def expert_of(stored: StoredWeight, number: int, outputs: int) -> StoredWeight:
    """Return expert *number* of a weight of all experts, whose dimension *outputs* is the outputs, as `[N, K]`."""
    if isinstance(stored, StackedExperts) and outputs == 1:
        return JoinedRows(stored.parts_EP[number])
    if isinstance(stored, DequantizedWeight) and stored.expert is not None:
        return stored.expert(number)
    return OneExpert(stored, number, outputs)


def quantize_experts(
    model: Any, checkpoint: Checkpoint, slices: Mapping[str, TensorSlice | None], keeper: Keeper
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
                _kept(experts.get_parameter(key), f"{name}.{key}", outputs, checkpoint, slices, keeper)
                for key, outputs in weights_of(experts).items()
            ]
            ups, downs = found
            if ups is not None and downs is not None:
                model.set_submodule(name, QuantizedExperts(experts, ups, downs))


def _kept(  # noqa: PLR0917
    weight: torch.Tensor,
    name: str,
    outputs: int,
    checkpoint: Checkpoint,
    slices: Mapping[str, TensorSlice | None],
    keeper: Keeper,
) -> StackedLinear | None:
    stored = checkpoint.find(name)
    if stored is None or stored.shape != tuple(weight.shape):
        return None
    part = slices.get(name)
    own = None if part is None else TensorSlice(0 if part.dim == outputs else 1, part.ranges, part.length)
    return stack(_each(stored, outputs, own, keeper), len(weight))


def _each(
    stored: StoredWeight, outputs: int, part: TensorSlice | None, keeper: Keeper
) -> Iterator[QuantizedWeight | None]:
    for number in range(stored.shape[0]):
        kept = keeper.keep(expert_of(stored, number, outputs), is_head=False)
        yield None if kept is None else sliced(kept, part)
