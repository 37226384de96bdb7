"""What layers with quantised weights have in common."""

import torch
from torch import nn

from workers.quantization.layout import LaidOut
from workers.quantization.weight import QuantizedWeight


class QuantizedLayer(nn.Module):
    """Holds one quantised weight, or several of the same form, stacked.

    Args:
        form: one of the weights.
        weights: as the kernel reads them, with a dimension for the experts where there are several.
    """

    zeros: nn.Parameter | None

    def __init__(self, form: QuantizedWeight, weights: LaidOut) -> None:
        super().__init__()
        self.out_features, self.in_features = form.shape
        self.code, self.group = form.code, form.group
        self.codes, self.scales = _frozen(weights.codes), _frozen(weights.scales)
        self.register_parameter("zeros", None if weights.zeros is None else _frozen(weights.zeros))

    @property
    def laid_out(self) -> LaidOut:
        """The weights."""
        return LaidOut(self.codes, self.scales, self.zeros)

    def extra_repr(self) -> str:
        """Describe it."""
        return f"{self.in_features}, {self.out_features}, {self.code.name.lower()}, group={self.group}"


def layers_of(model: nn.Module) -> tuple[str, ...]:
    """Return the name and the form of every quantised layer of *model*."""
    found = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, QuantizedLayer))
    return tuple(f"{name} {layer.extra_repr()}" for name, layer in found)


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
