"""Experts of a mixture of experts whose weights stay quantised.

`transformers` describes how the experts of a family compute (`use_experts_implementation`): with gates or without, with
biases, outputs or inputs first, and what is between the two products. All of that is kept; the products alone change.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from workers.quantization import products
from workers.quantization.layer import QuantizedLayer
from workers.quantization.layout import LaidOut, lay_out
from workers.quantization.weight import QuantizedWeight

TRAITS = frozenset({"has_gate", "has_bias", "is_transposed"})
"""What `transformers` sets in experts whose computation it describes."""


def is_described(module: nn.Module) -> bool:
    """Whether *module* is experts whose computation `transformers` describes."""
    return vars(module).keys() >= TRAITS


def weights_of(experts: Any) -> Mapping[str, int]:
    """Return the names of both weights, ups first, and which dimension of theirs, 1 or 2, is the outputs."""
    dim = 2 if experts.is_transposed else 1
    return {"gate_up_proj" if experts.has_gate else "up_proj": dim, "down_proj": dim}


class StackedLinear(QuantizedLayer):
    """One linear layer for each expert, over quantised weights of one form.

    Products and sums are fp32. Only weights of experts that have rows are read. The results for a row depend on no
    other row, to the bit; see `QuantizedLinear` for GPUs.
    """

    def forward(self, x_RK: torch.Tensor, ids_S: torch.Tensor, bias_EN: torch.Tensor | None) -> torch.Tensor:
        """Return `[S, N]`; each row of *x_RK* is used for S / R consecutive experts of *ids_S*."""
        return products.experts(x_RK, ids_S, self.laid_out, bias_EN, self.out_features, self.group, self.code)

    def extra_repr(self) -> str:
        """See `QuantizedLayer`."""
        return f"{len(self.codes)} x {super().extra_repr()}"


def stack(weights: Iterable[QuantizedWeight | None], count: int) -> StackedLinear | None:
    """Return *count* weights as one layer; None if one is missing, is not suitable, or has another form than the first.

    Each is laid out as it comes, so that they are held once.
    """
    first: QuantizedWeight | None = None
    room: list[torch.Tensor | None] = []
    for expert, weight in enumerate(weights):
        if weight is None or not weight.is_suitable or (first is not None and weight.form != first.form):
            return None
        laid_out = lay_out(weight)
        parts = (laid_out.codes, laid_out.scales, laid_out.zeros)
        if first is None:
            first = weight
            room = [None if part is None else part.new_empty(count, *part.shape) for part in parts]
        for whole, part in zip(room, parts, strict=True):
            if whole is not None and part is not None:
                whole[expert] = part
    codes, scales, zeros = room
    assert first is not None and codes is not None and scales is not None, "there is an expert"
    return StackedLinear(first, LaidOut(codes, scales, zeros))


class QuantizedExperts(nn.Module):
    """Takes the place of the experts of a `transformers` model.

    Biases, and modules between and after the products, keep their names, so they are loaded as before.

    Args:
        experts: what it takes the place of.
        ups: of gates and ups, or of ups alone.
        downs: from the inner width to the hidden size.
    """

    def __init__(self, experts: Any, ups: StackedLinear, downs: StackedLinear) -> None:
        super().__init__()
        for name, child in experts.named_children():
            self.add_module(name, child)
        self._up, self._down = weights_of(experts)
        for name, layer in ((self._up, ups), (self._down, downs)):
            self.add_module(name, layer)
            self.register_parameter(f"{name}_bias", experts.get_parameter(f"{name}_bias") if experts.has_bias else None)
        self._activate: Callable[[torch.Tensor], torch.Tensor] = (
            experts._apply_gate if experts.has_gate else experts.act_fn
        )
        self._has_norm = bool(vars(experts).get("has_post_expert_norm"))  # older releases have none

    def forward(self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """Return the sums `[T, H]` of each token's experts.

        Args:
            x_TH: hidden states.
            ids_TK: the K experts of each token; those that do not exist add nothing.
            weights_TK: the factor of each.
        """
        ids_S = ids_TK.reshape(-1)
        found = self._activate(self._multiply(self._up, x_TH, ids_S))
        found = self._multiply(self._down, found, ids_S)
        if self._has_norm:
            found = self.get_submodule("post_expert_norm")(found)
        weighted = found.view(*ids_TK.shape, -1) * weights_TK.unsqueeze(-1)
        return weighted.sum(1).to(x_TH.dtype)

    def _multiply(self, name: str, x_RK: torch.Tensor, ids_S: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = getattr(self, name)(x_RK, ids_S, getattr(self, f"{name}_bias"))
        return found
