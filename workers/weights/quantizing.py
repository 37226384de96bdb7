"""Putting quantised linear layers into a model while it is loaded, and quantising modules that are loaded already."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workers.quantization.experts import QuantizedExperts, StackedLinear, is_described, stack, weights_of
from workers.quantization.linear import QuantizedEmbedding, QuantizedLinear
from workers.quantization.weight import QuantizedWeight
from workers.weights.keeping import ROUTERS, Keeper, placed
from workers.weights.partition import TensorSlice

if TYPE_CHECKING:
    from workers.weights.reader import Checkpoint

Scheme = Callable[[torch.Tensor], QuantizedWeight]


def quantize_linears(
    model: Any,
    checkpoint: "Checkpoint",
    slices: Mapping[str, TensorSlice | None],
    keeper: Keeper,
    device: torch.device,
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
        mine = None if kept is None else placed(kept, slices.get(f"{name}.weight"), device)
        if mine is None or not mine.is_suitable:
            continue
        layer = QuantizedLinear(mine, linear.bias)
        model.set_submodule(name, layer)
        if linear is head and is_tied and type(embedding) is nn.Embedding:
            model.set_input_embeddings(QuantizedEmbedding(layer, embedding.weight.dtype))


def quantize_module(module: nn.Module, scheme: Scheme, shared: Iterable[nn.Parameter]) -> int:
    """Quantise the linear layers and the experts of a loaded *module*; return the number of its linear layers.

    The weights in *shared* belong to another model, and are left as they are. So are routers.
    """
    foreign = {id(weight) for weight in shared}
    replaced: dict[int, QuantizedLinear] = {}  # by the identity of the layer, which may have several names
    for name, layer in list(module.named_modules(remove_duplicate=False)):
        if is_described(layer):
            _quantize_experts(module, name, layer, scheme)
        if type(layer) is not nn.Linear or id(layer.weight) in foreign or name.rpartition(".")[2] in ROUTERS:
            continue
        if id(layer) not in replaced:
            replaced[id(layer)] = QuantizedLinear(scheme(layer.weight.detach()), layer.bias)
        module.set_submodule(name, replaced[id(layer)])
    return len(replaced)


def _quantize_experts(module: nn.Module, name: str, experts: Any, scheme: Scheme) -> None:
    ups, downs = (
        _stacked(experts.get_parameter(key).detach(), outputs, scheme) for key, outputs in weights_of(experts).items()
    )
    if ups is not None and downs is not None:
        module.set_submodule(name, QuantizedExperts(experts, ups, downs))


def _stacked(weight: torch.Tensor, outputs: int, scheme: Scheme) -> StackedLinear | None:
    each = weight.unbind() if outputs == 1 else weight.mT.unbind()
    return stack(map(scheme, each), len(weight))
