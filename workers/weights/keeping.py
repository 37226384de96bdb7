"""Which weights of a model are kept quantised."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from workers.quantization.schemes import int8
from workers.quantization.weight import QuantizedWeight

if TYPE_CHECKING:
    from workers.weights.partition import TensorSlice
    from workers.weights.reader import StoredWeight

ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Names of layers that choose experts: they are small, and an error there sends a token to another expert."""


class Keeper(Protocol):
    """Decides how the weight of one linear layer, or of one expert, is held."""

    def keep(self, stored: "StoredWeight", *, is_head: bool) -> QuantizedWeight | None:
        """Return the weight quantised; None: its values are computed with."""
        ...


class AsValues:
    """Every weight is dequantised when it is loaded."""

    def keep(self, stored: "StoredWeight", *, is_head: bool) -> QuantizedWeight | None:
        """See `Keeper`."""
        return None


class AsStored:
    """What is stored quantised stays so, where the kernel takes it."""

    def keep(self, stored: "StoredWeight", *, is_head: bool) -> QuantizedWeight | None:
        """See `Keeper`. Raises `ModelError` if its parts do not fit together."""
        return stored.quantized()


@dataclass(frozen=True)
class OnTheFly:
    """Every weight is quantised when it is read, by *scheme*; the head, whose errors weigh most, to int8."""

    scheme: Callable[[torch.Tensor], QuantizedWeight]

    def keep(self, stored: "StoredWeight", *, is_head: bool) -> QuantizedWeight | None:
        """See `Keeper`."""
        scheme = int8 if is_head else self.scheme
        return scheme(stored.read(0, 0, stored.shape[0]))


def placed(weight: QuantizedWeight, part: "TensorSlice | None", device: torch.device) -> QuantizedWeight:
    """Return a rank's slice of a weight, on *device*."""
    if part is not None:
        weight = weight.outputs(part.ranges, part.length) if part.dim == 0 else weight.inputs(part.ranges)
    return weight.to(device)
