"""Quantising the layers of a module that is loaded already, such as a draft's head."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from workers.quantization.experts import QuantizedExperts, StackedLinear, is_described, stack, weights_of
from workers.quantization.linear import QuantizedLinear
from workers.quantization.weight import QuantizedWeight
from workers.weights.keeping import ROUTERS

Scheme = Callable[[torch.Tensor], QuantizedWeight]


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
