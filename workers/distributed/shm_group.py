"""A group whose ranks are processes of one machine, which exchange through memory that they share.

gloo sends everything over sockets, and each of its operations wakes threads up: 1 to 2 ms on a machine where that is
slow, and two of them a layer. Here ranks look at each other's memory (`native/exchange.cpp`): some microseconds.
"""

import ctypes
import mmap
import os
import secrets
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.distributed_c10d import Store

from workers.distributed.groups import LOOPBACK, Group, GroupError, form
from workers.native.build import KernelUnavailableError, load_function

NAME_BITS = 62
HEADER_BYTES = 4096
MOST_RANKS = HEADER_BYTES // 64
PLACE_BYTES = 1 << 20
"""Larger tensors go through gloo: they take longer than waking up does."""

FAILURES = (
    "",
    "timed out",
    "a rank has left",
    "a rank has died",
    "the memory cannot be locked",
    "ranks gave tensors of different sizes",
)


class _Exchange(ctypes.Structure):
    _fields_ = [("memory", ctypes.c_void_p)]
    _fields_ += [(name, ctypes.c_int64) for name in ("file", "rank", "size", "place_bytes", "number")]
    _fields_ += [("given", ctypes.c_void_p), ("taken", ctypes.c_void_p)]
    _fields_ += [(name, ctypes.c_int64) for name in ("bytes", "first", "last", "timeout_ns", "outcome")]


class _Memory:
    """A file in main memory, mapped; of which this rank's byte stays locked until the object or the process ends.

    Raises:
        OSError, KernelUnavailableError: this cannot be had here.
    """

    def __init__(self, place: "_Place", rank: int, size: int) -> None:
        self._run = {name: load_function("exchange", f"slipstream_{name}") for name in ("join", "exchange", "leave")}
        file = place.open()
        weakref.finalize(self, os.close, file)  # not before: another thread may be waiting
        self._bytes = torch.frombuffer(mmap.mmap(file, bytes_for(size)), dtype=torch.uint8)
        self.call = _Exchange(memory=self._bytes.data_ptr(), file=file, rank=rank, size=size, place_bytes=PLACE_BYTES)
        self._do("join")

    def exchange(self) -> None:
        """Do what is written in `call`. Raises OSError where it fails."""
        self._do("exchange")

    def leave(self) -> None:
        """Let nobody wait for this rank, whatever it does."""
        self._run["leave"](ctypes.byref(self.call))

    def _do(self, name: str) -> None:
        self._run[name](ctypes.byref(self.call))
        if self.call.outcome:
            raise OSError(FAILURES[self.call.outcome])


class SharedMemoryGroup:
    """A `Group` over `_Memory`; what is too large for it, and what two ranks say to each other, goes over *far*."""

    def __init__(self, far: Group, name: str, memory: _Memory, timeout_s: float) -> None:
        self.name, self.rank, self.size = name, far.rank, far.size
        self._far = far
        self._memory: _Memory | None = memory
        memory.call.timeout_ns = int(timeout_s * 1e9)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Group`."""
        if tensor.nbytes > PLACE_BYTES:
            return self._far.all_reduce(tensor)
        tensor = tensor.contiguous()
        return torch.sum(self._exchange("all_reduce", tensor), 0, dtype=tensor.dtype, out=tensor)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """See `Group`."""
        if tensor.nbytes > PLACE_BYTES:
            return self._far.all_gather(tensor, dim)
        return _joined(self._exchange("all_gather", tensor.contiguous()), dim)

    def gather(self, tensor: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """See `Group`."""
        if tensor.nbytes > PLACE_BYTES:
            return self._far.gather(tensor, dst, dim)
        parts = self._exchange("gather", tensor.contiguous(), 0, self.size if self.rank == dst else 0)
        return _joined(parts, dim) if self.rank == dst else None

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """See `Group`."""
        if tensor.nbytes > PLACE_BYTES:
            return self._far.broadcast(tensor, src)
        return tensor.copy_(self._exchange("broadcast", tensor, src, src + 1)[0])

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """See `Group`."""
        self._far.send(tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """See `Group`."""
        return self._far.recv(tensor, src)

    def close(self) -> None:
        """See `Group`. Whoever waits for this rank is told, in whatever process."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.leave()
        self._far.close()

    def _exchange(self, what: str, tensor: torch.Tensor, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Put down *tensor* and return those of the ranks first .. last - 1, `[ranks, ...]`."""
        memory = self._memory
        if memory is None:
            raise GroupError(f"group {self.name}: {what} on rank {self.rank} after it was closed")
        call, last = memory.call, self.size if last is None else last
        taken = tensor.new_empty(last - first, *tensor.shape)
        call.number += 1
        call.given, call.taken, call.bytes = tensor.data_ptr(), taken.data_ptr(), tensor.nbytes
        call.first, call.last = first, last
        try:
            memory.exchange()
        except OSError as error:
            raise GroupError(f"group {self.name}: {what} on rank {self.rank} failed: {error}") from error
        return taken


def _joined(parts: torch.Tensor, dim: int) -> torch.Tensor:
    """Return `[ranks, ...]` joined along *dim* of what a rank gave: along the first, it lies so already."""
    return torch.cat(parts.unbind(0), dim) if dim else parts.flatten(0, 1)


def form_with_shared_memory(
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
    """Form a group as `form` does, and exchange through shared memory where tensors are on CPUs and all ranks can."""
    group = form(name, store, rank, size, backend, device=device, host=host, timeout_s=timeout_s)
    return with_shared_memory(group, name, timeout_s) if backend == "gloo" and size > 1 else group


def with_shared_memory(group: Group, name: str, timeout_s: float) -> Group:
    """Return *group* as one that exchanges through shared memory where its ranks can, itself where they cannot.

    Called by all ranks at once.

    Args:
        group: of two ranks at least, of tensors on CPUs.
        name: for messages.
        timeout_s: how long an operation may take.

    Raises:
        GroupError: the ranks could not agree.
    """
    with _made(group) as made:
        place = _Place(*group.broadcast(torch.tensor(made, dtype=torch.int64)).tolist())
        memory = _opened(place, group)
        all_have_it = _count(memory is not None, group) == group.size
    return SharedMemoryGroup(group, name, memory, timeout_s) if memory is not None and all_have_it else group


def bytes_for(size: int) -> int:
    """Return the size of the memory of *size* ranks."""
    return HEADER_BYTES + 2 * size * PLACE_BYTES


class _Place(NamedTuple):
    """Where the memory is that rank 0 made: an open file of its process, which has no other name."""

    process: int
    file: int
    number: int
    """Cannot be guessed: who finds a file that is called so shares its memory with rank 0."""

    def open(self) -> int:
        """Return the file, opened anew. Raises `OSError`: it is not on this machine, or not in this container."""
        link = Path(f"/proc/{self.process}/fd/{self.file}")
        if str(link.readlink()) != f"/memfd:{_called(self.number)} (deleted)":
            raise OSError(f"{link} is another file")
        return os.open(link, os.O_RDWR | os.O_CLOEXEC)


NOWHERE = _Place(0, 0, 0)


def _called(number: int) -> str:
    return f"slipstream-{number:x}"


@contextmanager
def _made(group: Group) -> Iterator[_Place]:
    """Make the memory on rank 0, with room for all of it, and say where it is while it may be opened."""
    number = secrets.randbits(NAME_BITS)
    file = None if group.rank or group.size > MOST_RANKS else _reserved(_called(number), bytes_for(group.size))
    try:
        yield NOWHERE if file is None else _Place(os.getpid(), file, number)
    finally:
        if file is not None:
            os.close(file)


def _reserved(name: str, num_bytes: int) -> int | None:
    """Return an open file in main memory; None where there is no room, or no such thing."""
    if sys.platform != "linux":
        return None
    try:
        file = os.memfd_create(name)
    except OSError:
        return None
    try:
        os.posix_fallocate(file, 0, num_bytes)
    except OSError:
        os.close(file)
        return None
    return file


def _count(answer: bool, group: Group) -> int:
    """Return how many ranks say yes."""
    # The dtype is named: another thread that loads a model may have changed torch's default.
    return int(group.all_reduce(torch.tensor([answer], dtype=torch.int64)).item())


def _opened(place: _Place, group: Group) -> _Memory | None:
    try:
        return _Memory(place, group.rank, group.size)
    except (OSError, KernelUnavailableError):
        return None
