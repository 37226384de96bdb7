"""A draft killed at any point of a round leaves nothing on the device of target rank 0 that waits for it."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from msgspec import structs

from protos.messages import Request
from protos.worker_messages import FormDraftChannel
from runtime.supervision import draft_supervisor
from tests.support.distributed import fake_nccl
from tests.support.distributed.engine import Engine, K, Models, configure, requests, threaded
from tests.support.distributed.fake_nccl import Operation, Records
from tests.support.distributed.thread_workers import Crash
from tests.support.models.tiny_heads import METHODS
from workers import staging
from workers.draft import channel, feature_channel
from workers.draft.announce import Announcer
from workers.draft.engine import DraftEngine
from workers.draft.feature_channel import FeatureReceiver
from workers.draft.sender import DraftSender
from workers.process import draft_rank
from workers.process.draft_rank import DraftRank

READS_FEATURES = "test_all"


def speculation(models: Models) -> dict[str, Any]:
    """A draft on a worker of its own that reads the target's features."""
    method, folder = METHODS[READS_FEATURES], models[1]
    return {"method": method, "model": str(folder), "num_speculative_tokens": K, "placement": "dedicated"}


class Killer:
    """Kills the draft's thread at one point, once: before or after a call that it makes there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, records: Records) -> None:
        self._monkeypatch, self._records = monkeypatch, records
        self._is_armed = False
        self.outstanding: list[Operation] = []  # when the draft died
        self.points: dict[str, int] = {}
        self._point = ""

    def watch(self, owner: Any, name: str, *, dies_after: bool) -> None:
        """Add the point before or after each call of *owner.name* in the draft's thread."""
        call: Callable[..., Any] = getattr(owner, name)
        point = f"{'after' if dies_after else 'before'} {name}"
        self.points[point] = 0

        def watched(*arguments: Any, **keys: Any) -> Any:
            if not threading.current_thread().name.startswith("draft"):
                return call(*arguments, **keys)
            if not dies_after:
                self._reach(point)
            found = call(*arguments, **keys)
            if dies_after:
                self._reach(point)
            return found

        self._monkeypatch.setattr(owner, name, watched)

    def arm(self, point: str) -> None:
        self._point, self._is_armed = point, True

    def _reach(self, point: str) -> None:
        if self._is_armed and self._point == point:
            self._is_armed = False
            self.points[point] += 1
            self.outstanding = self._records.outstanding()
            raise Crash


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Iterator[Records]:
    monkeypatch.setattr(draft_supervisor, "RETRY_S", 0.0)
    yield fake_nccl.install(monkeypatch)


def batch(name: str, count: int = 3) -> list[Request]:
    return [structs.replace(request, request_id=f"{name}/{request.request_id}") for request in requests(count, 16)]


def assert_as_plain(outputs: dict[str, list[int]], plain: dict[str, list[int]], name: str) -> None:
    for request in batch(name):
        ids = outputs[request.request_id]
        assert ids == plain[request.request_id.partition("/")[2]][: len(ids)]
        assert len(ids) == request.max_tokens


def kill(engine: Engine, killer: Killer, point: str) -> None:
    """Run until the draft died at *point*, with as many requests as that takes."""
    more = 0
    while engine.built.executor.drafting.is_up:
        if not engine.built.controller.scheduler.num_unfinished:
            more += 1
            assert more < 20, f"{point} is not reached"
            engine.put(*batch(f"{point} {more}"))
        engine.step()
    assert killer.points[point] == 1


def settled(records: Records) -> bool:
    """Whether all operations end soon."""
    until = time.monotonic() + 2
    while records.outstanding() and time.monotonic() < until:
        time.sleep(0.01)
    return not records.outstanding()


def test_no_operation_of_nccl_is_left(
    models: Models, plain: dict[str, list[int]], records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    killer = Killer(monkeypatch, records)
    killer.watch(DraftRank, "_run", dies_after=False)
    killer.watch(DraftEngine, "propose_ready", dies_after=False)
    killer.watch(DraftEngine, "propose_ready", dies_after=True)
    killer.watch(draft_rank, "encode", dies_after=True)
    killer.watch(Announcer, "send", dies_after=True)
    killer.watch(DraftSender, "post", dies_after=True)
    killer.watch(FeatureReceiver, "take", dies_after=True)
    killer.watch(DraftSender, "acknowledge", dies_after=False)
    config = configure(models, speculative_config=speculation(models), tensor_parallel_size=2)
    engine = threaded(config, backend="nccl", floor_s=0.2)
    try:
        for epoch, point in enumerate(killer.points, 1):
            engine.until_drafting(epoch)
            killer.arm(point)
            engine.put(*batch(point))
            kill(engine, killer, point)
            assert settled(records), f"{point}: {records.outstanding()}"
            assert all(operation.is_over for operation in killer.outstanding), "they ended without the draft"
            assert all(operation.size == 2 for operation in killer.outstanding), "only of the target's own group"
            engine.finish()
            assert_as_plain(engine.outputs, plain, point)
    finally:
        engine.built.shutdown()
    assert killer.points == dict.fromkeys(killer.points, 1)
    assert engine.accepted > 0
    assert {operation.what for operation in records.operations} >= {"allreduce", "gather"}
    assert all(name.startswith("target rank ") for name in records.threads()), "only target ranks use NCCL"


def test_a_draft_that_dies_while_its_channel_is_formed(
    models: Models, plain: dict[str, list[int]], records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    join, killed = channel.join_as_draft, threading.Event()
    engine: Engine | None = None

    def die(order: FormDraftChannel, *arguments: Any, **keys: Any) -> DraftSender:
        if order.epoch == 2:
            assert engine is not None
            assert engine.workers is not None
            killed.set()
            engine.workers.newest("draft").crash()
            raise Crash
        return join(order, *arguments, **keys)

    monkeypatch.setattr("workers.process.loading.join_as_draft", die)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)  # the crash is meant
    config = configure(models, speculative_config=speculation(models), tensor_parallel_size=2)
    engine = threaded(config, backend="nccl", floor_s=0.2)
    try:
        assert engine.workers is not None
        engine.workers.newest("draft").crash()
        engine.put(*batch("forming"))
        engine.until(killed.is_set)
        engine.finish()
        assert settled(records)
    finally:
        engine.built.shutdown()
    assert_as_plain(engine.outputs, plain, "forming")
    assert all(name.startswith("target rank ") for name in records.threads())


def test_a_draft_that_stops_reading_features_blocks_a_thread_alone(
    models: Models, plain: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = threaded(configure(models, speculative_config=speculation(models)), floor_s=0.2)
    fetch, may_read = FeatureReceiver._fetch, threading.Event()

    def stand_still(end: FeatureReceiver, announced: feature_channel.FeaturesSent) -> Any:
        assert may_read.wait(60)
        return fetch(end, announced)

    monkeypatch.setattr(FeatureReceiver, "_fetch", stand_still)
    try:
        engine.put(*batch("features"))
        engine.finish()
    finally:
        may_read.set()
        engine.built.shutdown()
    assert_as_plain(engine.outputs, plain, "features")


def test_features_that_cannot_be_staged_are_a_gap(
    models: Models, plain: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA: every tensor goes through the buffer, for which there is no memory now and then."""
    num_bytes: list[int] = []

    def copy(_staging: Any, states_NF: torch.Tensor, host_NF: torch.Tensor, _is_computed: Any) -> None:
        num_bytes.append(states_NF.nbytes)
        if len(num_bytes) in {3, 5}:
            raise torch.OutOfMemoryError("no memory")
        host_NF.copy_(states_NF)

    monkeypatch.setattr(staging.HostStaging, "_allocate", lambda _, size: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(staging.HostStaging, "_copy", copy)
    made = staging.HostStaging.__init__
    monkeypatch.setattr(staging.HostStaging, "__init__", lambda self, device: made(self, torch.device("cuda")))
    engine = threaded(configure(models, speculative_config=speculation(models)))
    try:
        engine.put(*batch("staging"))
        engine.finish()
    finally:
        engine.built.shutdown()
    assert_as_plain(engine.outputs, plain, "staging")
    assert len(num_bytes) > 8
    assert engine.accepted > 0
    assert engine.changes == {"started": 1}


def test_a_staged_tensor_is_in_the_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[int] = []

    def allocate(_staging: Any, size: int) -> torch.Tensor:
        allocated.append(size)
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(staging.HostStaging, "_allocate", allocate)
    monkeypatch.setattr(staging.HostStaging, "_copy", lambda _, source, host, __: host.copy_(source))
    staged = staging.HostStaging(torch.device("cuda"))
    for rows in (4, 2, 4, 6):
        states_NF = torch.randn(rows, 8, dtype=torch.bfloat16)
        host_NF = staged.to_host(states_NF)
        assert torch.equal(host_NF, states_NF)
        assert host_NF.data_ptr() != states_NF.data_ptr()
    assert allocated == [4 * 8 * 2, 6 * 8 * 2]
    same = torch.randn(2, 2)
    assert staging.HostStaging(torch.device("cpu")).to_host(same) is same
