"""Collectives within a forward as torch operators, so that tracing can record them.

A traced graph cannot hold a group, so operators take a number that identifies the `Collectives`.
"""

import itertools
from weakref import WeakValueDictionary

import torch
from torch.fx.node import has_side_effect

from workers.distributed.groups import Group

_NUMBERS = itertools.count()
_COLLECTIVES: "WeakValueDictionary[int, Collectives]" = WeakValueDictionary()


class Collectives:
    """The collectives of one group. Results never share memory with arguments."""

    def __init__(self, group: Group) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size
        self._number = next(_NUMBERS)
        _COLLECTIVES[self._number] = self

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks."""
        found: torch.Tensor = torch.ops.slipstream.all_reduce(tensor, self._number)
        return found

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return the tensors of all ranks, in the order of ranks, joined along *dim*."""
        found: torch.Tensor = torch.ops.slipstream.all_gather(tensor, dim, self._number)
        return found

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """As `all_gather` along the last dimension, on rank 0 only; None elsewhere."""
        found: torch.Tensor = torch.ops.slipstream.gather(tensor, self._number)
        return None if self.rank else found


def _all_reduce(tensor: torch.Tensor, number: int) -> torch.Tensor:
    return _COLLECTIVES[number].group.all_reduce(tensor.clone())


def _all_gather(tensor: torch.Tensor, dim: int, number: int) -> torch.Tensor:
    return _COLLECTIVES[number].group.all_gather(tensor, dim)


def _gather(tensor: torch.Tensor, number: int) -> torch.Tensor:
    whole = _COLLECTIVES[number].group.gather(tensor)
    return tensor.new_empty(0) if whole is None else whole


def _same_shape(tensor: torch.Tensor, _number: int) -> torch.Tensor:
    return torch.empty_like(tensor)


def _joined_shape(tensor: torch.Tensor, dim: int, number: int) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[dim] = shape[dim] * _COLLECTIVES[number].size
    return tensor.new_empty(shape)


def _gathered_shape(tensor: torch.Tensor, number: int) -> torch.Tensor:
    return tensor.new_empty(0) if _COLLECTIVES[number].rank else _joined_shape(tensor, -1, number)


def _define() -> torch.library.Library:
    library = torch.library.Library("slipstream", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema, run, shape in (
        ("all_reduce(Tensor tensor, int group) -> Tensor", _all_reduce, _same_shape),
        ("all_gather(Tensor tensor, int dim, int group) -> Tensor", _all_gather, _joined_shape),
        ("gather(Tensor tensor, int group) -> Tensor", _gather, _gathered_shape),
    ):
        name = schema.partition("(")[0]
        library.define(schema)  # type: ignore[no-untyped-call]
        for device in ("CPU", "CUDA"):
            library.impl(name, run, device)  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"slipstream::{name}", shape, lib=library)
    return library


_LIBRARY = _define()
has_side_effect(torch.ops.slipstream.gather.default)  # keeps the call on ranks that get no result
