"""Groups of ranks with collective operations on tensors: what all kinds have in common, and the group of one rank."""

from typing import Protocol

import torch

from protos.errors import SlipstreamError

LOOPBACK = "127.0.0.1"


class GroupError(SlipstreamError, RuntimeError):
    """A group could not be formed, or an operation on it failed: a peer died, or timed out."""


class Group(Protocol):
    """Ranks `0..size-1` with collective operations on tensors.

    Tensors have one dtype and, unless stated otherwise, one shape on all ranks, and are on the group's device. On CUDA
    an operation is queued on the current stream; on a CPU it is complete when the call returns. Every operation raises
    `GroupError`; one that is queued fails later, with a meaningless result, which `check` tells.
    """

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks, in *tensor* itself where that is contiguous."""
        ...

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return the tensors of all ranks, in the order of ranks, joined along *dim*."""
        ...

    def gather(self, tensor: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """As `all_gather`, on rank *dst* only; None elsewhere."""
        ...

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Copy the tensor of rank *src* into *tensor*, which must be contiguous, and return it."""
        ...

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Send to *dst*, which must call `recv` with the same shape and dtype."""
        ...

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Receive from *src* into *tensor*, which must be contiguous, and return it."""
        ...

    @property
    def cpu_group(self) -> "Group":
        """The group of the same ranks for tensors of the host: this one itself, unless it is for devices alone."""
        ...

    def check(self, done: torch.cuda.Event | None = None) -> None:
        """Raise `GroupError` if an operation since the last check has failed, or takes longer than it may.

        Called when a result was read, so that it waits for no operation that works.

        Args:
            done: follows operations that a graph has launched, of which nothing else is known: wait for it, too.
        """
        ...

    def close(self) -> None:
        """Close the connections. May be called twice."""
        ...


def count_true(group: Group, answer: bool) -> int:
    """Return on how many ranks of *group*, which is for CPUs, *answer* is true; all call this. Raises `GroupError`."""
    # The dtype is explicit: another thread that loads a model may have changed torch's default.
    return int(group.all_reduce(torch.tensor([answer], dtype=torch.int64)).item())


def all_agree(group: Group, is_so: bool) -> bool:
    """Whether *is_so* is true on all ranks of *group*, as `count_true`."""
    return count_true(group, is_so) == group.size


class Solo:
    """The group of one rank."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return *tensor*."""
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return *tensor*."""
        return tensor

    def gather(self, tensor: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """Return *tensor*."""
        return tensor

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Return *tensor*."""
        return tensor

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Raise an error: there is no other rank."""
        raise GroupError(f"a group of one rank has no rank {dst} to send to")

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Raise an error: there is no other rank."""
        raise GroupError(f"a group of one rank has no rank {src} to receive from")

    @property
    def cpu_group(self) -> Group:
        """This group."""
        return self

    def check(self, done: torch.cuda.Event | None = None) -> None:
        """Nothing to check."""

    def close(self) -> None:
        """Nothing to close."""


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
