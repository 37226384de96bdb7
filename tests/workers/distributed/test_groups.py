"""Groups formed from a store: results and failures of their operations."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from protos.worker_messages import StoreAddress
from tests.support.distributed.ranks import on_ranks, told_of_a_silent_peer
from workers.distributed import torch_group
from workers.distributed.groups import Group, GroupError, Solo
from workers.distributed.store import address_towards, connect_store, open_store
from workers.distributed.torch_group import form


@pytest.mark.parametrize("size", [2, 3])
def test_collectives(size: int) -> None:
    def work(group: Group) -> None:
        mine = torch.full((2, 3), float(group.rank + 1))
        total = sum(range(1, size + 1))
        assert torch.equal(group.all_reduce(mine.clone()), torch.full((2, 3), float(total)))
        assert torch.equal(group.all_reduce(mine.clone().T), torch.full((3, 2), float(total)))
        row = torch.arange(1.0, size + 1)
        assert torch.equal(group.all_gather(mine), row.repeat_interleave(3).repeat(2, 1))
        assert torch.equal(group.all_gather(mine[:1], 0), row[:, None].expand(size, 3))
        joined = group.gather(mine, dst=1, dim=0)
        assert (joined is None) == (group.rank != 1)
        assert joined is None or torch.equal(joined, row.repeat_interleave(2)[:, None].expand(2 * size, 3))
        ids = torch.full((4,), group.rank)
        assert group.broadcast(ids, src=size - 1) is ids
        assert ids.tolist() == [size - 1] * 4
        assert group.all_reduce(torch.ones(2, dtype=torch.bfloat16)).tolist() == [size] * 2
        assert group.all_gather(torch.empty(0, 3)).shape == (0, 3 * size)

    on_ranks(size, work)


def test_point_to_point() -> None:
    def work(group: Group) -> list[int]:
        if group.rank == 0:
            group.send(torch.tensor([3, 4]), 1)
            return group.recv(torch.zeros(2, dtype=torch.int64), 1).tolist()  # type: ignore[no-any-return]
        got = group.recv(torch.zeros(2, dtype=torch.int64), 0)
        group.send(got * 2, 0)
        return got.tolist()  # type: ignore[no-any-return]

    assert on_ranks(2, work) == [[6, 8], [3, 4]]


def test_one_group_lives_on_when_another_dies() -> None:
    _store, address = open_store()

    def work(rank: int) -> float:
        store = connect_store(address)
        lasting = form("tp", store, rank, 2, timeout_s=20)
        for epoch in range(3):
            pair = form(f"pair-{epoch}", store, rank, 2, timeout_s=20)
            assert pair.broadcast(torch.tensor([epoch + rank])).item() == epoch
            pair.close()
            pair.close()
            with pytest.raises(GroupError, match=f"group pair-{epoch}: broadcast on rank {rank} after it was closed"):
                pair.broadcast(torch.zeros(1))
        return float(lasting.all_reduce(torch.ones(1)))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [2.0, 2.0]


def test_a_silent_peer_is_an_error_after_the_timeout() -> None:
    message = told_of_a_silent_peer(on_ranks, lambda group: group.recv(torch.zeros(1), 1), 0.5)
    assert message.startswith("group tp: recv from rank 1 on rank 0 failed: ")
    assert "500ms" in message


def test_a_peer_that_leaves_is_an_error_at_once() -> None:
    def work(group: Group) -> float:
        if group.rank == 1:
            return 0.0
        started = time.monotonic()
        with pytest.raises(GroupError):
            group.recv(torch.zeros(1), 1)
        return time.monotonic() - started

    assert on_ranks(2, work, timeout_s=30)[0] < 10


def test_a_rank_that_never_comes() -> None:
    store, _ = open_store()
    with pytest.raises(GroupError, match="group tp: rank 0 of 2 could not join: "):
        form("tp", store, 0, 2, timeout_s=0.3)


def test_stores_say_where_they_cannot_be() -> None:
    store, address = open_store()
    connect_store(address).set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(GroupError, match=r"a store cannot listen on 192\.0\.2\.1: "):
        open_store("192.0.2.1")
    with pytest.raises(GroupError, match=r"no store answers at 127\.0\.0\.1:9: "):
        connect_store(StoreAddress("127.0.0.1", 9), timeout_s=1)


def test_addresses() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    with pytest.raises(GroupError, match=r"finds no route to nowhere\.invalid"):
        address_towards("nowhere.invalid")


def test_solo() -> None:
    solo = form("tp", open_store()[0], 0, 1)
    assert isinstance(solo, Solo)
    mine = torch.ones(2)
    assert solo.all_reduce(mine) is solo.all_gather(mine) is solo.gather(mine) is solo.broadcast(mine) is mine
    with pytest.raises(GroupError, match="no rank 1 to send to"):
        solo.send(mine, 1)
    with pytest.raises(GroupError, match="no rank 1 to receive from"):
        solo.recv(mine, 1)
    solo.close()


class Nccl:
    """Stands for `ProcessGroupNCCL`: records the environment that it reads and its timeout."""

    Options = SimpleNamespace
    seen: ClassVar[list[tuple[str | None, ...]]] = []

    def __init__(self, _store: Any, _rank: int, _size: int, options: Any) -> None:
        self.seen.append((*map(os.environ.get, torch_group.NCCL_ENVIRONMENT), str(options._timeout)))

    def eager_connect_single_device(self, device: torch.device) -> None:
        assert device == torch.device("cuda", 1)


def test_over_nccl_a_failure_ends_the_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in torch_group.NCCL_ENVIRONMENT:
        monkeypatch.setenv(name, "1")  # as on some clusters
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(Nccl, "seen", [])
    store, _ = open_store()
    form("tp", store, 0, 2, "nccl", device=torch.device("cuda", 1), timeout_s=9, cpu_group=Solo())
    assert Nccl.seen == [("0", "0", "0", "3", "0:00:09")]
