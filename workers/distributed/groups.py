"""Process groups made straight from a store, without `torch.distributed`'s one default group.

So several independent groups (`tp`, `pair`) can live and die in one process, and several ranks in one process. A group
is used by one thread at a time. An operation that fails or times out leaves its group unusable: close it, form another.
"""

import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined] # its stubs do not list it
from torch.distributed.distributed_c10d import (
    BroadcastOptions,
    GatherOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
)

from protos.errors import SlipstreamError
from protos.worker_messages import StoreAddress

LOOPBACK = "127.0.0.1"

NCCL_LEAVES_IT_TO_US = {
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""Who hangs is for the controller to judge: torch would end every process on a store of which one group failed."""
WHEN_NCCL_FAILS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
ENDS_PROCESS, ENDS_GROUP = "3", "2"
_environment = threading.Lock()


class GroupError(SlipstreamError, RuntimeError):
    """A group could not be formed, or an operation on it failed: a peer died, or was silent for too long."""


class Group(Protocol):
    """Ranks `0..size-1` that work on tensors together.

    Tensors are of one dtype and, unless said otherwise, of one shape on all ranks, and lie on the group's device. On
    CUDA an operation is queued on the current stream; on a CPU it has happened when the call returns. Every operation
    raises `GroupError`.
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
        """As `all_gather`, at *dst* alone; None elsewhere."""
        ...

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Return the tensor of *src*; *tensor*, which must be contiguous, becomes it."""
        ...

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Send to *dst*, which must call `recv` with the same shape and dtype."""
        ...

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Fill *tensor*, which must be contiguous, with what *src* sends, and return it."""
        ...

    def close(self) -> None:
        """Give up the connections. May be called twice."""
        ...


def all_agree(group: Group, is_so: bool, device: torch.device) -> bool:
    """Whether something *is_so* on all ranks of *group*, which must all ask. Raises `GroupError`."""
    denials = group.all_reduce(torch.tensor([float(not is_so)], device=device))
    return not denials.item()


class Solo:
    """The group of one rank."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of one is itself."""
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Nothing to join."""
        return tensor

    def gather(self, tensor: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """Nothing to join."""
        return tensor

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Everybody has it."""
        return tensor

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Nobody is there."""
        raise GroupError(f"a group of one rank has no rank {dst} to send to")

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Nobody is there."""
        raise GroupError(f"a group of one rank has no rank {src} to receive from")

    def close(self) -> None:
        """Nothing is held."""


class TorchGroup:
    """Ranks over gloo or NCCL. Built by `form`, which owns the details of either."""

    def __init__(self, name: str, backend: Any, rank: int, size: int) -> None:
        # `backend` is a ProcessGroupGloo or ProcessGroupNCCL: alike in use, without a common static type.
        self.name, self.rank, self.size = name, rank, size
        self._backend = backend

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
        """See `Group`. A thread that waits on the group is woken over NCCL; over gloo it waits for its timeout."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.abort()

    def _do(self, what: str, start: Callable[[Any], Any]) -> None:
        if self._backend is None:
            raise GroupError(f"group {self.name}: {what} on rank {self.rank} after it was closed")
        try:
            start(self._backend).wait()
        except RuntimeError as error:
            raise GroupError(f"group {self.name}: {what} on rank {self.rank} failed: {_first_line(error)}") from error


def close_without_waiting(group: Group, device: torch.device) -> None:
    """Close *group*, of which another thread may be waiting, without waiting for anything.

    Over gloo that thread is left to close it itself, when it notices or its operation times out. What waits over NCCL
    is a kernel on the device, which nothing but this ends.
    """
    if device.type == "cuda":
        threading.Thread(target=group.close, name="leaving a group", daemon=True).start()


def open_store(host: str = LOOPBACK) -> tuple[TCPStore, StoreAddress]:
    """Open a store that listens on *host* alone, on a port that the system chooses; it lives as long as the object.

    Raises:
        GroupError: this machine cannot listen on *host*.
    """
    try:
        listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise GroupError(f"a store cannot listen on {host}: {error}") from error
    port = int(listening.getsockname()[1])
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    return store, StoreAddress(host, port)


def connect_store(address: StoreAddress, timeout_s: float = 60.0) -> TCPStore:
    """Connect to the store at *address*; its operations wait at most *timeout_s*.

    Raises:
        GroupError: nobody answers there.
    """
    # Asked by hand first: where nobody listens, torch would retry aloud, with stack traces on stderr.
    try:
        socket.create_connection((address.host, address.port), timeout_s).close()
        return TCPStore(address.host, address.port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except (OSError, RuntimeError) as error:
        raise GroupError(f"no store answers at {address.host}:{address.port}: {_first_line(error)}") from error


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
    is_vital: bool = True,
) -> Group:
    """Form a group; returns when all *size* ranks came.

    Args:
        name: keeps groups on one store apart: a name serves once.
        store: any store that all ranks reach.
        rank: this rank, 0 to size - 1.
        size: number of ranks; one rank needs no store and gets a `Solo`, except on NCCL.
        backend: "gloo" for CPU tensors, "nccl" for CUDA tensors.
        device: the CUDA device of this rank, for "nccl".
        host: an address of this machine that the other ranks reach; see `address_towards`.
        timeout_s: how long forming may take, and then each operation.
        is_vital: whether a failure on a device must end this process, before anybody reads what an operation that was
            broken off has left there. Else it ends the group alone.

    Raises:
        GroupError: a rank did not come in time, or a connection failed.
    """
    if size == 1 and backend == "gloo":
        return Solo()
    prefixed = PrefixStore(name, store)
    prefixed.set_timeout(timedelta(seconds=timeout_s))
    try:
        if backend == "nccl":
            made = _nccl(prefixed, rank, size, device, timeout_s, is_vital=is_vital)
            return TorchGroup(name, made, rank, size)
        return TorchGroup(name, _gloo(prefixed, rank, size, host, timeout_s), rank, size)
    except RuntimeError as error:
        raise GroupError(f"group {name}: rank {rank} of {size} could not join: {_first_line(error)}") from error


def _gloo(store: Store, rank: int, size: int, host: str, timeout_s: float) -> Any:
    gloo: Any = ProcessGroupGloo  # whose options torch keeps private
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [gloo.create_device(hostname=host)]
    return gloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, device: torch.device | None, timeout_s: float, *, is_vital: bool) -> Any:
    nccl: Any = getattr(torch.distributed, "ProcessGroupNCCL")  # noqa: B009 - not in builds of torch without CUDA
    place = torch.device("cuda", torch.cuda.current_device()) if device is None else device
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    with torch.cuda.device(place):
        with _environment:  # of which a group takes its share as it is made
            os.environ |= {**NCCL_LEAVES_IT_TO_US, WHEN_NCCL_FAILS: ENDS_PROCESS if is_vital else ENDS_GROUP}
            backend = nccl(store, rank, size, options)
        backend.eager_connect_single_device(place)
    return backend


def address_towards(host: str) -> str:
    """Return the address of this machine from which it reaches *host*; nothing is sent.

    Raises:
        GroupError: *host* is unknown, or there is no way to it.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise GroupError(f"this machine finds no way to {host}: {error}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
