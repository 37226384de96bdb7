"""Ranks of a group as threads of one process."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

import pytest
import torch

from workers.distributed.groups import Group, GroupError
from workers.distributed.store import connect_store, open_store
from workers.distributed.torch_group import form

Result = TypeVar("Result")


def on_ranks(size: int, work: Callable[[Group], Result], *, timeout_s: float = 60.0) -> list[Result]:
    """Run *work* on every rank of a gloo group, a thread each, and return what they returned.

    Raises the first error of any rank.
    """
    _store, address = open_store()

    def rank_of(rank: int) -> Result:
        group = form("tp", connect_store(address), rank, size, timeout_s=timeout_s)
        try:
            return work(group)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank_of, range(size)))


def told_of_a_silent_peer(run: Callable[..., list[str]], wait: Callable[[Group], object], timeout_s: float) -> str:
    """Let rank 0 *wait* for a rank 1 that does nothing, both run by *run*; return the error's message."""
    done = threading.Event()

    def work(group: Group) -> str:
        if group.rank == 1:
            done.wait(20)
            return ""
        with pytest.raises(GroupError) as caught:
            wait(group)
        done.set()
        return str(caught.value)

    return run(2, work, timeout_s=timeout_s)[0]


class Board:
    """Shared memory of the ranks of a `ThreadGroup`."""

    def __init__(self, size: int) -> None:
        self.barrier = Barrier(size, timeout=60)
        self.tensors: list[torch.Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.tensors[rank] = tensor.clone()
        self.barrier.wait()
        found = list(self.tensors)
        self.barrier.wait()
        return found


class ThreadGroup:
    """A group that exchanges tensors in memory; much faster than gloo if ranks outnumber processors."""

    def __init__(self, board: Board, rank: int, size: int) -> None:
        self._board, self.rank, self.size = board, rank, size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = self._board.exchange(self.rank, tensor)
        assert len({part.shape for part in parts}) == 1
        return torch.stack(parts).sum(0)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._board.exchange(self.rank, tensor), dim)

    def gather(self, tensor: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        joined = self.all_gather(tensor, dim)
        return joined if self.rank == dst else None

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        return tensor.copy_(self._board.exchange(self.rank, tensor)[src])

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        raise NotImplementedError

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        raise NotImplementedError

    @property
    def cpu_group(self) -> Group:
        return self

    def check(self, done: torch.cuda.Event | None = None) -> None: ...

    def close(self) -> None:
        self._board.barrier.abort()


def in_memory(size: int, work: Callable[[Group], Result]) -> list[Result]:
    """Run *work* on every rank of a `ThreadGroup` and return the results; raises the ranks' errors."""
    board = Board(size)

    def rank_of(rank: int) -> Result:
        try:
            return work(ThreadGroup(board, rank, size))
        except BaseException:
            board.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(rank_of, rank) for rank in range(size)]
    errors = [error for future in running if (error := future.exception()) is not None]
    told = [error for error in errors if not isinstance(error, BrokenBarrierError)]
    if errors:
        raise (told or errors)[0]
    return [future.result() for future in running]
