"""Which layers of a model keep quantised weights, and putting those layers into the model while it is loaded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from workers.quantization.linear import QuantizedEmbedding, QuantizedLinear
from workers.quantization.schemes import int8
from workers.quantization.weight import QuantizedWeight
from workers.weights.partition import TensorSlice

if TYPE_CHECKING:
    from workers.weights.reader import Checkpoint, StoredWeight

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


def quantize_linears(
    model: Any, checkpoint: "Checkpoint", slices: Mapping[str, TensorSlice | None], keeper: Keeper
) -> None:
    """Replace the linear layers of *model*, which is on the meta device, whose weights *keeper* quantises.

    Weights are read one by one, and whole: a rank quantises all of a weight and then takes its slice, so that scales
    do not depend on the number of ranks. Layers whose weights are missing or of another shape are left to the loader.

    Raises:
        ModelError: the parts of a stored weight do not fit together.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    names = {module: name for name, module in model.named_modules()}
    for name, linear in list(model.named_modules()):
        if type(linear) is not nn.Linear or name.rpartition(".")[2] in ROUTERS:
            continue
        source = names[embedding] if linear is head and is_tied else name
        stored = checkpoint.find(f"{source}.weight") or checkpoint.find(f"{name}.weight")
        if stored is None or stored.shape != tuple(linear.weight.shape):
            continue
        kept = keeper.keep(stored, is_head=linear is head)
        mine = None if kept is None else sliced(kept, slices.get(f"{name}.weight"))
        if mine is None or not mine.is_suitable:
            continue
        layer = QuantizedLinear(mine, linear.bias)
        model.set_submodule(name, layer)
        if linear is head and is_tied and type(embedding) is nn.Embedding:
            model.set_input_embeddings(QuantizedEmbedding(layer, embedding.weight.dtype))


def sliced(weight: QuantizedWeight, part: TensorSlice | None) -> QuantizedWeight:
    """Return a rank's slice of a weight."""
    if part is None:
        return weight
    return weight.outputs(part.ranges, part.length) if part.dim == 0 else weight.inputs(part.ranges)
