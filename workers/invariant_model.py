"""What `batch_invariant` makes of a loaded model: weights laid out as our products read them, and sums over ranks."""

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from protos.errors import ConfigError
from workers import invariant_native
from workers import invariant_ops as ops
from workers.groups import Group
from workers.native_library import KernelUnavailableError


def check_possible(name: str, device: torch.device, ranks: int) -> None:
    """Refuse what cannot be kept, before any weights are read.

    Raises:
        ConfigError: there is no compiler for the operators of CPUs, or the ranks do not divide the parts of sums.
    """
    if ops.SHARDS % ranks:
        raise ConfigError(f"batch_invariant adds up sums in {ops.SHARDS} parts, which {ranks} ranks cannot share: "
                          f"tensor_parallel_size must be 1, 2, 4 or {ops.SHARDS}")
    if device.type != "cpu":
        return
    try:
        invariant_native.check_available()
    except KernelUnavailableError as error:
        raise ConfigError(f"{name}: batch_invariant needs operators of its own on a CPU, and {error}; install a C++ "
                          "compiler or leave batch_invariant out") from error


def lay_out(model: nn.Module) -> None:
    """Let the numbers that a product adds up lie side by side in every weight; shapes stay as they are."""
    for module in model.modules():
        if isinstance(module, Conv1D) or getattr(module, "is_transposed", False):
            for weight in module.parameters(recurse=False):
                if weight.ndim >= 2 and "bias" not in _name_of(module, weight):
                    weight.data = weight.data.mT.contiguous().mT


def _name_of(module: nn.Module, weight: torch.Tensor) -> str:
    return next(name for name, own in module.named_parameters(recurse=False) if own is weight)


class SummedLinear(nn.Module):
    """A row-parallel layer: every rank adds up its parts of each sum, and all ranks' are added up in one order.

    Args:
        linear: this rank's columns of the weight, `[N, K / T]`, or `[K / T, N]` in a `Conv1D`; rank 0 alone has a bias.
        group: the ranks.
    """

    def __init__(self, linear: nn.Module, group: Group) -> None:
        super().__init__()
        weight = linear.get_parameter("weight")
        weight_NK = weight.t().contiguous() if isinstance(linear, Conv1D) else weight
        self.weight = nn.Parameter(weight_NK, requires_grad=False)
        bias: Any = getattr(linear, "bias", None)
        self.bias = None if bias is None else nn.Parameter(group.all_reduce(bias.detach().clone()), requires_grad=False)
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[..., N]` in the dtype of *x*, the same on all ranks."""
        size = self._group.size
        part = ops.linear(x, self.weight, None, ops.SHARDS // size, True)
        parts = list(self._group.all_gather(part.unsqueeze(0), dim=0).unbind(0))
        while len(parts) > 1:
            parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
        total = parts[0] if self.bias is None else parts[0] + self.bias.float()
        return total.to(x.dtype)


def sum_in_order(model: nn.Module, name: str, group: Group) -> nn.Module:
    """Replace the row-parallel layer *name* of *model* (counted from it) and return what stands there now.

    Raises:
        ConfigError: it is not a linear layer.
    """
    linear = model.get_submodule(name)
    if not isinstance(linear, (nn.Linear, Conv1D)):
        raise ConfigError(f"batch_invariant cannot split {name} ({type(linear).__name__}) over ranks: the sums of "
                          "experts have no fixed order there; use tensor_parallel_size=1")
    owner, _, key = name.rpartition(".")
    summed = SummedLinear(linear, group)
    setattr(model.get_submodule(owner), key, summed)
    return summed
