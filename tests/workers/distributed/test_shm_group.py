"""Groups over shared memory: the same results as over gloo, and errors if a peer dies, leaves or hangs."""

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from protos.worker_messages import StoreAddress
from tests.support.distributed.ranks import Result, on_ranks, told_of_a_silent_peer
from workers.distributed import shm_group
from workers.distributed.groups import Group, GroupError
from workers.distributed.shm_group import BUFFER_BYTES, SharedMemoryGroup, with_shared_memory
from workers.distributed.store import connect_store, open_store
from workers.distributed.torch_group import TorchGroup, form


def nearby(size: int, work: Callable[[SharedMemoryGroup], Result], *, timeout_s: float = 60.0) -> list[Result]:
    def on_rank(far: Group) -> Result:
        group = with_shared_memory(far, "tp", timeout_s)
        assert isinstance(group, SharedMemoryGroup)
        try:
            return work(group)
        finally:
            group.close()

    return on_ranks(size, on_rank)


def open_files() -> int:
    """Return how many files of this process are shared memory of groups."""
    found = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(name.startswith("/memfd:slipstream-") for name in found)


def steps(group: Group) -> list[torch.Tensor | None]:
    """Run every collective with tensors of many shapes and dtypes; return all results."""
    found: list[torch.Tensor | None] = []
    dice = torch.Generator().manual_seed(group.rank)
    for shape in ((1, 5), (3, 2, 4), (7,), (0, 3)):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            mine = torch.randint(-50, 50, shape, generator=dice).to(dtype)
            found += [
                group.all_reduce(mine.clone()),
                group.all_gather(mine),
                group.all_gather(mine, 0),
                group.gather(mine),
                group.gather(mine, 1, 0),
                group.broadcast(mine.clone(), 1),
            ]
    return [*found, group.all_gather(torch.full((2, 3), float(group.rank)).T)]


@pytest.mark.parametrize("size", [2, 3])
def test_it_does_what_gloo_does(size: int) -> None:
    expected, found = on_ranks(size, steps), nearby(size, steps)
    for wanted, got in zip(expected, found, strict=True):
        assert len(wanted) == len(got)
        for a, b in zip(wanted, got, strict=True):
            assert (a is None) == (b is None)
            assert a is None or b is None or (a.dtype == b.dtype and torch.equal(a, b))


def test_results_lie_where_gloo_puts_them() -> None:
    def work(group: Group) -> None:
        mine = torch.ones(4)
        assert group.all_reduce(mine) is mine
        assert group.broadcast(mine) is mine
        assert mine.tolist() == [2.0] * 4
        assert group.all_gather(mine).data_ptr() != mine.data_ptr()

    nearby(2, work)


def test_ranks_that_run_ahead_write_over_nothing() -> None:
    """Rank 1 waits for no other rank in a `gather`: in thousands in a row, rank 0 misses none."""

    def work(group: Group) -> bool:
        fine = True
        for turn in range(3000):
            joined = group.gather(torch.tensor([turn * 10 + group.rank]))
            fine &= joined is None or joined.tolist() == [turn * 10, turn * 10 + 1]
        return fine

    assert nearby(2, work) == [True, True]


def test_large_tensors_and_messages_between_two_take_the_other_way() -> None:
    def work(group: Group) -> None:
        for count in (BUFFER_BYTES // 4, BUFFER_BYTES // 4 + 1):  # the largest that fits, and one more
            mine = torch.full((count,), float(group.rank + 1))
            assert group.all_gather(mine, 0).unique().tolist() == [1.0, 2.0]
            assert group.gather(mine, 0) is None or group.rank == 0
            assert group.all_reduce(mine).unique().tolist() == [3.0]
            assert group.broadcast(mine * group.rank, 1).unique().tolist() == [3.0]
        if group.rank:
            group.send(torch.ones(2), 0)
        else:
            assert group.recv(torch.zeros(2), 1).tolist() == [1.0, 1.0]

    nearby(2, work)


def test_nothing_stays_open() -> None:
    nearby(2, lambda group: group.all_reduce(torch.ones(1)))
    gc.collect()
    assert not open_files()


def test_ranks_that_give_tensors_of_different_sizes_are_told() -> None:
    def work(group: Group) -> None:
        with pytest.raises(GroupError, match=f"all_gather on rank {group.rank} failed: ranks gave tensors of d"):
            group.all_gather(torch.zeros(2 + group.rank))

    nearby(2, work)


def test_a_silent_peer_is_an_error_after_the_timeout() -> None:
    message = told_of_a_silent_peer(nearby, lambda group: group.all_reduce(torch.zeros(1)), 0.2)
    assert message == "group tp: all_reduce on rank 0 failed: timed out"


def test_a_peer_that_leaves_is_an_error_at_once() -> None:
    def work(group: Group) -> tuple[float, str]:
        if group.rank == 1:
            time.sleep(0.3)
            group.close()
            group.close()
            with pytest.raises(GroupError, match="group tp: all_gather on rank 1 after it was closed"):
                group.all_gather(torch.zeros(1))
            return 0.0, ""
        started = time.monotonic()
        with pytest.raises(GroupError) as caught:
            group.gather(torch.zeros(1))
        return time.monotonic() - started, str(caught.value)

    waited, message = nearby(2, work, timeout_s=30)[0]
    assert message == "group tp: gather on rank 0 failed: a rank has left"
    assert waited < 10


def test_closing_wakes_whoever_waits_in_the_same_process() -> None:
    def work(group: Group) -> str:
        if group.rank == 1:
            time.sleep(0.5)  # without an operation
            return ""
        threading.Timer(0.1, group.close).start()
        with pytest.raises(GroupError) as caught:
            group.all_reduce(torch.zeros(1))
        return str(caught.value)

    assert nearby(2, work, timeout_s=30)[0].endswith("a rank has left")


def _mute(address: StoreAddress, come: Any) -> None:
    group = with_shared_memory(form("tp", connect_store(address), 1, 2, timeout_s=30), "tp", 30)
    group.all_reduce(torch.ones(1))
    come.set()
    time.sleep(60)


def test_a_peer_that_is_killed_is_an_error_at_once() -> None:
    context = multiprocessing.get_context("spawn")
    come, (_store, address) = context.Event(), open_store()
    peer = context.Process(target=_mute, args=(address, come))
    peer.start()
    try:
        group = with_shared_memory(form("tp", connect_store(address), 0, 2, timeout_s=30), "tp", 30)
        assert group.all_reduce(torch.ones(1)).item() == 2
        assert come.wait(30)
        assert peer.pid is not None
        threading.Timer(0.3, os.kill, (peer.pid, signal.SIGKILL)).start()
        started = time.monotonic()
        with pytest.raises(GroupError, match="group tp: all_reduce on rank 0 failed: a rank has died"):
            group.all_reduce(torch.ones(1))
        assert time.monotonic() - started < 10
        group.close()
    finally:
        peer.kill()
        peer.join()


def kinds(size: int = 2) -> list[type]:
    return on_ranks(size, lambda group: type(with_shared_memory(group, "tp", 5)))


@pytest.mark.parametrize("call", ["posix_fallocate", "memfd_create"])
def test_without_room_it_is_gloo(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, call, _full)
    assert kinds() == [TorchGroup] * 2
    assert not open_files()


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_where_one_rank_has_it_not_none_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on two machines, or in two containers: rank 1 does not find the file of rank 0."""
    opened = shm_group._opened
    elsewhere = shm_group._MemoryFile(2**22 + 1, 3, 5)  # above the largest process id of Linux
    monkeypatch.setattr(shm_group, "_opened", lambda at, group: opened(elsewhere if group.rank else at, group))
    assert kinds() == [TorchGroup] * 2


def test_a_file_of_the_same_number_in_another_process_is_not_taken_for_it(tmp_path: Path) -> None:
    with (tmp_path / "other").open("w+b") as file, pytest.raises(OSError, match="is another file"):
        shm_group._MemoryFile(os.getpid(), file.fileno(), 5).open()


def test_without_a_compiler_it_is_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    shm_group.load_function.cache_clear()
    assert kinds() == [TorchGroup] * 2
    shm_group.load_function.cache_clear()
