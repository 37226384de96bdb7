"""A group whose ranks are processes of one machine and exchange tensors through shared memory.

gloo uses sockets, and each operation wakes threads: 1 to 2 ms on a slow machine, twice a layer. Polling shared memory
(`native/exchange.cpp`) takes a few microseconds.
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

from workers.distributed.groups import LOOPBACK, Group, GroupError, count_true
from workers.distributed.torch_group import form
from workers.native.build import KernelUnavailableError, load_function

NAME_BITS = 62
HEADER_BYTES = 4096
MAX_RANKS = HEADER_BYTES // 64
BUFFER_BYTES = 1 << 20
"""Larger tensors go through gloo: sending them takes longer than waking threads."""

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
    _fields_ += [(name, ctypes.c_int64) for name in ("file", "rank", "size", "buffer_bytes", "number")]
    _fields_ += [("given", ctypes.c_void_p), ("taken", ctypes.c_void_p)]
    _fields_ += [(name, ctypes.c_int64) for name in ("bytes", "first", "last", "timeout_ns", "outcome")]


class _Memory:
    """A mapped in-memory file. This rank's byte of it stays locked until the object or the process ends.

    Raises:
        OSError, KernelUnavailableError: shared memory does not work here.
    """

    def __init__(self, memory_file: "_MemoryFile", rank: int, size: int) -> None:
        self._run = {name: load_function("exchange", f"slipstream_{name}") for name in ("join", "exchange", "leave")}
        file = memory_file.open()
        weakref.finalize(self, os.close, file)  # not in `leave`: another thread may be waiting
        self._bytes = torch.frombuffer(mmap.mmap(file, bytes_for(size)), dtype=torch.uint8)
        self.call = _Exchange(memory=self._bytes.data_ptr(), file=file, rank=rank, size=size, buffer_bytes=BUFFER_BYTES)
        self._do("join")

    def exchange(self) -> None:
        """Run the exchange that `call` describes. Raises OSError if it fails."""
        self._do("exchange")

    def leave(self) -> None:
        """End the waits of other ranks for this one."""
        self._run["leave"](ctypes.byref(self.call))

    def _do(self, name: str) -> None:
        self._run[name](ctypes.byref(self.call))
        if self.call.outcome:
            raise OSError(FAILURES[self.call.outcome])


class SharedMemoryGroup:
    """A `Group` over `_Memory`. Large tensors, and those sent from rank to rank, go through *gloo*."""

    def __init__(self, gloo: Group, name: str, memory: _Memory, timeout_s: float) -> None:
        self.name, self.rank, self.size = name, gloo.rank, gloo.size
        self._gloo = gloo
        self._memory: _Memory | None = memory
        memory.call.timeout_ns = int(timeout_s * 1e9)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Group`."""
        if tensor.nbytes > BUFFER_BYTES:
            return self._gloo.all_reduce(tensor)
        tensor = tensor.contiguous()
        return torch.sum(self._exchange("all_reduce", tensor), 0, dtype=tensor.dtype, out=tensor)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """See `Group`."""
        if tensor.nbytes > BUFFER_BYTES:
            return self._gloo.all_gather(tensor, dim)
        return _joined(self._exchange("all_gather", tensor.contiguous()), dim)

    def gather(self, tensor: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """See `Group`."""
        if tensor.nbytes > BUFFER_BYTES:
            return self._gloo.gather(tensor, dst, dim)
        parts = self._exchange("gather", tensor.contiguous(), 0, self.size if self.rank == dst else 0)
        return _joined(parts, dim) if self.rank == dst else None

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """See `Group`."""
        if tensor.nbytes > BUFFER_BYTES:
            return self._gloo.broadcast(tensor, src)
        return tensor.copy_(self._exchange("broadcast", tensor, src, src + 1)[0])

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """See `Group`."""
        self._gloo.send(tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """See `Group`."""
        return self._gloo.recv(tensor, src)

    @property
    def cpu_group(self) -> Group:
        """See `Group`."""
        return self

    def check(self, done: torch.cuda.Event | None = None) -> None:
        """See `Group`."""
        self._gloo.check(done)

    def close(self) -> None:
        """See `Group`. Ranks that wait for this one get an error."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.leave()
        self._gloo.close()

    def _exchange(self, what: str, tensor: torch.Tensor, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Publish *tensor* and return those of the ranks first .. last - 1, `[ranks, ...]`."""
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
    """Return `[ranks, ...]` joined along dimension *dim* of a rank's tensor."""
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
    """Form a group as `form` does, with shared memory for tensors on CPUs if all ranks support it."""
    if backend == "nccl":
        cpu_group = form_with_shared_memory(f"{name}/cpu", store, rank, size, host=host, timeout_s=timeout_s)
        return form(name, store, rank, size, backend, device=device, timeout_s=timeout_s, cpu_group=cpu_group)
    group = form(name, store, rank, size, backend, host=host, timeout_s=timeout_s)
    return with_shared_memory(group, name, timeout_s) if size > 1 else group


def with_shared_memory(group: Group, name: str, timeout_s: float) -> Group:
    """Return *group* with shared memory if all its ranks support it, otherwise *group* itself.

    Called by all ranks at once.

    Args:
        group: of at least two ranks, for tensors on CPUs.
        name: for messages.
        timeout_s: how long an operation may take.

    Raises:
        GroupError: the ranks could not agree.
    """
    with _created(group) as created:
        memory_file = _MemoryFile(*group.broadcast(torch.tensor(created, dtype=torch.int64)).tolist())
        memory = _opened(memory_file, group)
        all_joined = count_true(group, memory is not None) == group.size
    return SharedMemoryGroup(group, name, memory, timeout_s) if memory is not None and all_joined else group


def bytes_for(size: int) -> int:
    """Return the size of the memory of *size* ranks."""
    return HEADER_BYTES + 2 * size * BUFFER_BYTES


class _MemoryFile(NamedTuple):
    """The in-memory file of rank 0: an open file of its process, without a path of its own."""

    process: int
    file: int
    number: int
    """Random, and part of the file's name: proves that the file found is that of rank 0."""

    def open(self) -> int:
        """Open the file. Raises `OSError` if it is not on this machine, or not in this container."""
        link = Path(f"/proc/{self.process}/fd/{self.file}")
        if str(link.readlink()) != f"/memfd:{_name_of(self.number)} (deleted)":
            raise OSError(f"{link} is another file")
        return os.open(link, os.O_RDWR | os.O_CLOEXEC)


NOWHERE = _MemoryFile(0, 0, 0)


def _name_of(number: int) -> str:
    return f"slipstream-{number:x}"


@contextmanager
def _created(group: Group) -> Iterator[_MemoryFile]:
    """Create the file on rank 0, its memory reserved; yield how other ranks open it, until the block ends."""
    number = secrets.randbits(NAME_BITS)
    file = None if group.rank or group.size > MAX_RANKS else _reserved(_name_of(number), bytes_for(group.size))
    try:
        yield NOWHERE if file is None else _MemoryFile(os.getpid(), file, number)
    finally:
        if file is not None:
            os.close(file)


def _reserved(name: str, num_bytes: int) -> int | None:
    """Return an open in-memory file; None if there is no room for it, or no support."""
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


def _opened(memory_file: _MemoryFile, group: Group) -> _Memory | None:
    try:
        return _Memory(memory_file, group.rank, group.size)
    except (OSError, KernelUnavailableError):
        return None
