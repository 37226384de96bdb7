"""Changes that `batch_invariant` makes to a loaded model: the layout of weights, and the order of sums over ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from protos.errors import ConfigError
from workers.distributed.collectives import Collectives
from workers.invariant import ops

PRODUCTS = 2
"""Matrix products of a layer's experts: gate and up, then down."""


def lay_out(model: nn.Module) -> None:
    """Make the dimension over which products sum contiguous in every weight. Shapes do not change."""
    for module in model.modules():
        if isinstance(module, Conv1D) or getattr(module, "is_transposed", False):
            for weight in module.parameters(recurse=False):
                if weight.ndim >= 2 and "bias" not in _name_of(module, weight):
                    weight.data = weight.data.mT.contiguous().mT


def _name_of(module: nn.Module, weight: torch.Tensor) -> str:
    return next(name for name, own in module.named_parameters(recurse=False) if own is weight)


class SummedLinear(nn.Module):
    """A row-parallel layer that adds up sums in the same order for any number of ranks.

    Every rank adds up its shards of each sum, then those of all ranks are added as a tree.

    Args:
        linear: this rank's columns of the weight, `[N, K / T]`, or `[K / T, N]` in a `Conv1D`, and the whole bias.
        group: the ranks.
    """

    def __init__(self, linear: nn.Module, group: Collectives) -> None:
        super().__init__()
        weight = linear.get_parameter("weight")
        weight_NK = weight.t().contiguous() if isinstance(linear, Conv1D) else weight
        self.weight = nn.Parameter(weight_NK, requires_grad=False)
        bias: Any = getattr(linear, "bias", None)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[..., N]` in the dtype of *x*, the same on all ranks."""
        total = _total(ops.linear(x, self.weight, None, ops.SHARDS // self._group.size, True), self._group)
        return (total if self.bias is None else total + self.bias.float()).to(x.dtype)


class SummedExperts(TorchDispatchMode):
    """Makes the last product of experts that run under it sum over ranks as `SummedLinear` does.

    All ranks then compute the rest alike: biases, and the sum over a token's experts. For one forward of one layer.

    Args:
        group: the ranks, each of which holds a part of every expert's inner width.
    """

    def __init__(self, group: Collectives) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's own lacks annotations
        self._group = group
        self.products = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_product = func.overloadpacket.__name__ in ops.GROUPED
        self.products += is_product
        run = self._summed if is_product and self.products == PRODUCTS else func
        return run(*args, **(kwargs or {}))

    def _summed(self, x_MK: torch.Tensor, weight_EKN: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        part = ops.grouped(x_MK, weight_EKN, offs, ops.SHARDS // self._group.size, True)
        return _total(part, self._group).to(x_MK.dtype)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `workers.invariant.trace.InvariantDispatch`


def _total(part: torch.Tensor, group: Collectives) -> torch.Tensor:
    """Return the sum of all ranks' fp32 *part*, added pairwise as a tree."""
    if group.size == 1:
        return part
    parts = list(group.all_gather(part.unsqueeze(0), dim=0).unbind(0))
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def sum_in_order(model: nn.Module, name: str, group: Collectives) -> nn.Module:
    """Make the layer or the experts *name* of *model* sum over ranks in a fixed order; return the module now there.

    Raises:
        ConfigError: it is neither a linear layer nor experts.
    """
    module = model.get_submodule(name)
    if "down_proj" in dict(module.named_parameters(recurse=False)):
        module.forward = partial(_sum_last, group, module.forward)
        return module
    if not isinstance(module, (nn.Linear, Conv1D)):
        raise ConfigError(
            f"batch_invariant cannot split {name} ({type(module).__name__}) over ranks: the order of its "
            "sums is not known; use tensor_parallel_size=1"
        )
    owner, _, key = name.rpartition(".")
    summed = SummedLinear(module, group)
    setattr(model.get_submodule(owner), key, summed)
    return summed


def _sum_last(group: Collectives, forward: Callable[..., torch.Tensor], *args: Any, **named: Any) -> torch.Tensor:
    mode = SummedExperts(group)
    with mode:
        found = forward(*args, **named)
    if mode.products != PRODUCTS:
        raise ConfigError(
            f"batch_invariant: the model's experts are {mode.products} products, not {PRODUCTS}: which "
            "one ranks share is not known; use tensor_parallel_size=1"
        )
    return found
