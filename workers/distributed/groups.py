"""Process groups formed from a store, without the single default group of `torch.distributed`.

So one process can form and close several independent groups (tensor parallelism, the draft channel), and can hold
several ranks. A group is used by one thread at a time. An operation that fails or times out leaves its group unusable:
close it and form another.
"""

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed.distributed_c10d import (
    BroadcastOptions,
    GatherOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
)

from protos.errors import SlipstreamError

LOOPBACK = "127.0.0.1"
POLL_S = 0.0002
"""How often an operation that is not complete when it should be is looked at."""

NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
}
"""Turns off what ends every process of a store if one group fails: the controller detects hangs.

A process whose group fails ends with its communicator as it is (3): aborting it may hang, or free memory in use.
"""
_environment = threading.Lock()


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

    def check(self) -> None:
        """Raise `GroupError` if an operation since the last check has failed, or takes longer than it may.

        Called when a result was read, so that it waits for no operation that works.
        """
        ...

    def close(self) -> None:
        """Close the connections. May be called twice."""
        ...


def all_agree(group: Group, is_so: bool, device: torch.device) -> bool:
    """Whether *is_so* is true on all ranks of *group*, all of which must call this. Raises `GroupError`."""
    denials = group.all_reduce(torch.tensor([float(not is_so)], device=device))
    return not denials.item()


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

    def check(self) -> None:
        """Nothing to check."""

    def close(self) -> None:
        """Nothing to close."""


class TorchGroup:
    """A group over gloo or NCCL. Built by `form`.

    Args:
        name: for messages.
        backend: of torch.
        rank: this rank.
        size: number of ranks.
        queue_s: how long a queued operation may take, on NCCL; None: operations are complete when a call returns.
    """

    def __init__(self, name: str, backend: Any, rank: int, size: int, queue_s: float | None = None) -> None:
        # `backend` is a ProcessGroupGloo or ProcessGroupNCCL, which have no common static type.
        self.name, self.rank, self.size = name, rank, size
        self._backend, self._queue_s = backend, queue_s
        self._queued: list[tuple[str, float, Any]] = []  # operations since the last check: name, begin, and work

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Group`."""
        tensor = tensor.contiguous()
        self._do("all_reduce", lambda group: group.allreduce([tensor]))
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """See `Group`."""
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self._do("all_gather", lambda group: group.allgather([parts], [tensor]))
        return torch.cat(parts, dim)

    def gather(self, tensor: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """See `Group`."""
        tensor = tensor.contiguous()
        options = GatherOptions()
        options.rootRank = dst
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == dst else []
        self._do("gather", lambda group: group.gather([parts] if parts else [], [tensor], options))
        return torch.cat(parts, dim) if parts else None

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """See `Group`."""
        options = BroadcastOptions()
        options.rootRank = src
        self._do("broadcast", lambda group: group.broadcast([tensor], options))
        return tensor

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """See `Group`."""
        tensor = tensor.contiguous()
        self._do(f"send to rank {dst}", lambda group: group.send([tensor], dst, 0))

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """See `Group`."""
        self._do(f"recv from rank {src}", lambda group: group.recv([tensor], src, 0))
        return tensor

    def close(self) -> None:
        """See `Group`. A thread that waits on the group is woken over NCCL; over gloo it waits until its timeout."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.abort()

    def _do(self, what: str, start: Callable[[Any], Any]) -> None:
        if self._backend is None:
            raise GroupError(f"group {self.name}: {what} on rank {self.rank} after it was closed")
        began = time.monotonic()
        try:
            work = start(self._backend)
            work.wait()
        except RuntimeError as error:
            raise GroupError(f"group {self.name}: {what} on rank {self.rank} failed: {first_line(error)}") from error
        if self._queue_s is not None:
            self._queued.append((what, began, work))

    def check(self) -> None:
        """See `Group`."""
        queued, self._queued = self._queued, []
        for what, began, work in queued:
            while not work.is_completed():
                if time.monotonic() - began > (self._queue_s or 0.0):
                    raise GroupError(f"group {self.name}: {what} on rank {self.rank} takes over {self._queue_s} s")
                time.sleep(POLL_S)
            error = work.exception()
            if error is not None:
                raise GroupError(f"group {self.name}: {what} on rank {self.rank} failed: {first_line(error)}")


def form(
    name: str,
    store: Store,
    rank: int,
    size: int,
    backend: str = "gloo",
    *,
    device: torch.device | None = None,
    host: str = LOOPBACK,
    timeout_s: float = 60.0,
) -> Group:
    """Form a group; return once all *size* ranks have joined.

    Args:
        name: identifies the group on its store; to be used once.
        store: any store that all ranks reach.
        rank: this rank, 0 to size - 1.
        size: number of ranks; one rank needs no store and gets a `Solo`, except on NCCL.
        backend: "gloo" for CPU tensors, "nccl" for CUDA tensors.
        device: the CUDA device of this rank, for "nccl".
        host: an address of this machine that the other ranks reach; see `address_towards`.
        timeout_s: how long forming may take, and then each operation.

    Raises:
        GroupError: a rank did not join in time, or a connection failed.
    """
    if size == 1 and backend == "gloo":
        return Solo()
    prefixed = PrefixStore(name, store)
    prefixed.set_timeout(timedelta(seconds=timeout_s))
    try:
        if backend == "nccl":
            made = _nccl(prefixed, rank, size, device, timeout_s)
            return TorchGroup(name, made, rank, size, timeout_s)
        return TorchGroup(name, _gloo(prefixed, rank, size, host, timeout_s), rank, size)
    except RuntimeError as error:
        raise GroupError(f"group {name}: rank {rank} of {size} could not join: {first_line(error)}") from error


def _gloo(store: Store, rank: int, size: int, host: str, timeout_s: float) -> Any:
    gloo: Any = ProcessGroupGloo  # its options are private in torch
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [gloo.create_device(hostname=host)]
    return gloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, device: torch.device | None, timeout_s: float) -> Any:
    nccl: Any = getattr(torch.distributed, "ProcessGroupNCCL")  # noqa: B009 - not in builds of torch without CUDA
    own = torch.device("cuda", torch.cuda.current_device()) if device is None else device
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    with torch.cuda.device(own):
        with _environment:  # a group reads the environment when it is made
            os.environ |= NCCL_ENVIRONMENT
            backend = nccl(store, rank, size, options)
        backend.eager_connect_single_device(own)
    return backend


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
