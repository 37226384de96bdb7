"""Operations of NCCL that fail or never end are noticed by ranks, though no call says so: the group is built anew.

Over a stand-in for NCCL, whose results are garbage then, as on a device.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from protos.worker_messages import WorkerFailed
from runtime.supervision.target_supervisor import TargetSupervisor
from tests.support.distributed import fake_nccl
from tests.support.distributed.engine import Models, assert_same, configure, requests, threaded
from tests.support.distributed.fake_nccl import Operation, Records
from workers.distributed.groups import Group, GroupError
from workers.distributed.store import connect_store, open_store
from workers.distributed.torch_group import form

LIMIT_S = 1.0


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Iterator[Records]:
    records = fake_nccl.install(monkeypatch)
    records.timeout_s = 5.0  # of gloo beneath: ranks here cannot be killed while they wait
    monkeypatch.setattr("workers.process.loading.TP_TIMEOUT_S", LIMIT_S)
    monkeypatch.setattr(TargetSupervisor, "_is_reusable", lambda _: False)  # as on devices
    yield records


def on_two(work: Callable[[Group], str]) -> list[str]:
    """Run *work* on both ranks of a group over the stand-in."""
    _store, address = open_store()

    def rank_of(rank: int) -> str:
        group = form("tp", connect_store(address), rank, 2, "nccl", device=torch.device("cpu"), timeout_s=LIMIT_S)
        try:
            return work(group)
        finally:
            group.close()

    with ThreadPoolExecutor(2, thread_name_prefix="rank") as pool:
        return list(pool.map(rank_of, range(2)))


def error_of(check: Callable[[], object]) -> str:
    began = time.monotonic()
    try:
        check()
    except GroupError as error:
        assert time.monotonic() - began < LIMIT_S + 1
        return str(error)
    return ""


def test_a_check_tells_what_failed_and_what_never_ends(records: Records) -> None:
    def work(group: Group) -> str:
        assert group.all_reduce(torch.ones(3)).tolist() == [2] * 3
        assert not error_of(group.check)
        records.fails = lambda operation: operation.what == "allgather"
        group.all_gather(torch.ones(1, 2))  # says nothing
        failed = error_of(group.check)
        assert not error_of(group.check), "it was told"
        records.hangs = lambda operation: operation.what == "broadcast"
        group.broadcast(torch.ones(3))
        return f"{failed}; {error_of(group.check)}"

    for rank, told in enumerate(on_two(work)):
        assert told == (
            f"group tp: all_gather on rank {rank} failed: NCCL communicator was aborted on rank 0.; "
            f"group tp: broadcast on rank {rank} takes over 1.0 s"
        )


class Once:
    """Names operations of one kind for a while: from the first on, until the group is left."""

    def __init__(self, what: str, after: int, ranks: tuple[str, ...]) -> None:
        self._what, self._after, self._ranks = what, after, ranks
        self._counts: dict[str, int] = {}
        self.num_named = 0

    def __call__(self, operation: Operation) -> bool:
        if operation.what != self._what or operation.thread not in self._ranks:
            return False
        self._counts[operation.thread] = self._counts.get(operation.thread, 0) + 1
        is_named = self._counts[operation.thread] > self._after
        self.num_named += is_named
        return is_named


@pytest.mark.parametrize("kind", ["fails", "hangs"])
@pytest.mark.parametrize("what", ["allreduce", "gather"])
def test_a_group_with_a_lost_operation_is_built_anew(
    models: Models, plain: dict[str, list[int]], records: Records, kind: str, what: str
) -> None:
    """No verdict of garbage reaches the controller, and no rank waits for ever."""
    config = configure(models, tensor_parallel_size=2)
    engine = threaded(config, backend="nccl", floor_s=2.0)
    named = Once(what, 0, ("target rank 0", "target rank 1"))  # not those of the next incarnations
    try:
        engine.put(*requests(4, 16))
        engine.until(lambda: engine.num_out >= 8 and engine.proposed() > 0)
        setattr(records, kind, named)
        engine.until(lambda: engine.built.controller.stats().target_losses > 0, limit_s=20)
        assert_same(engine.finish(), plain)
    finally:
        engine.built.shutdown()
    assert named.num_named > 0
    assert engine.built.controller.stats().target_losses == 1
    assert {name: len(ids) for name, ids in engine.outputs.items()} == {str(i): 16 + i for i in range(4)}
    assert engine.workers is not None
    reasons = [m.reason for port in engine.workers.ports.values() for m in port.sent if isinstance(m, WorkerFailed)]
    assert any("failed" in reason if kind == "fails" else "takes over 1.0 s" in reason for reason in reasons)
