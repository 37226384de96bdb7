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
from typing import Any

import torch
from torch.distributed.distributed_c10d import (
    BroadcastOptions,
    GatherOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
)

from workers.distributed.groups import LOOPBACK, Group, GroupError, Solo, first_line

POLL_S = 0.0002
"""How often an operation that is not complete when it should be is looked at."""
SPIN_S = 0.1
"""How long it is looked at without a pause, so that the step that waits for it is not late. Steps take less."""

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


class TorchGroup:
    """A group over gloo or NCCL. Built by `form`.

    Args:
        name: for messages.
        backend: of torch.
        rank: this rank.
        size: number of ranks.
        queue_s: how long a queued operation may take, on NCCL; None: operations are complete when a call returns.
        cpu_group: of the same ranks, closed with this one; None where this one is for tensors of the host.
    """

    def __init__(  # noqa: PLR0917 - `form` calls it
        self,
        name: str,
        backend: Any,
        rank: int,
        size: int,
        queue_s: float | None = None,
        cpu_group: Group | None = None,
    ) -> None:
        # `backend` is a ProcessGroupGloo or ProcessGroupNCCL, which have no common static type.
        self.name, self.rank, self.size = name, rank, size
        self._backend, self._queue_s, self._cpu_group = backend, queue_s, cpu_group
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

    @property
    def cpu_group(self) -> Group:
        """See `Group`."""
        return self._cpu_group or self

    def close(self) -> None:
        """See `Group`. A thread that waits on the group is woken over NCCL; over gloo it waits until its timeout."""
        if self._cpu_group is not None:
            self._cpu_group.close()
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
        # The work of an operation that a graph captures stands for none that runs, and must not be asked.
        if self._queue_s is not None and not torch.cuda.is_current_stream_capturing():
            self._queued.append((what, began, work))

    def check(self, done: torch.cuda.Event | None = None) -> None:
        """See `Group`."""
        queued, self._queued = self._queued, []
        for what, began, work in queued:
            self._wait(what, began, work.is_completed)
            error = work.exception()
            if error is not None:
                raise GroupError(f"group {self.name}: {what} on rank {self.rank} failed: {first_line(error)}")
        if done is not None:
            self._wait("a CUDA graph", time.monotonic(), done.query)

    def _wait(self, what: str, began: float, is_over: Callable[[], bool]) -> None:
        while not is_over():
            waited = time.monotonic() - began
            if waited > (self._queue_s or 0.0):
                raise GroupError(f"group {self.name}: {what} on rank {self.rank} takes over {self._queue_s} s")
            time.sleep(0.0 if waited < SPIN_S else POLL_S)  # other threads run meanwhile


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
    cpu_group: Group | None = None,
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
        cpu_group: of the same ranks, which one on "nccl" closes; None: it forms one over gloo.

    Raises:
        GroupError: a rank did not join in time, or a connection failed.
    """
    if size == 1 and backend == "gloo":
        return Solo()
    prefixed = PrefixStore(name, store)
    prefixed.set_timeout(timedelta(seconds=timeout_s))
    try:
        if backend == "nccl":
            cpu_group = cpu_group or form(f"{name}/cpu", store, rank, size, host=host, timeout_s=timeout_s)
            made = _nccl(prefixed, rank, size, device, timeout_s)
            return TorchGroup(name, made, rank, size, timeout_s, cpu_group)
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
