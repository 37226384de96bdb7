"""The round protocol over threads: target ranks that die are started again, three times at most."""

import threading
from collections.abc import Callable

import pytest
from msgspec import structs

from protos.errors import EngineDeadError, NoRoomError, failure
from protos.messages import Abort, Request
from protos.worker_messages import FromWorker, Port, Progress, RoundDone, Setup, WorkerId
from runtime.supervision import target_supervisor
from tests.support.distributed.engine import PATIENT_S, Engine, StartEngine, assert_same, requests
from tests.support.distributed.thread_workers import Crash, ThreadPort
from workers.process import main as rank


@pytest.mark.parametrize(("world", "lost"), [(1, 0), (2, 0), (2, 1)])
def test_a_target_rank_that_dies_is_rebuilt_and_every_request_goes_on(
    start_engine: StartEngine, plain: dict[str, list[int]], world: int, lost: int
) -> None:
    engine = start_engine(tensor_parallel_size=world)
    assert engine.workers is not None
    engine.put(*requests(4, 20))
    engine.until(lambda: engine.num_out >= 30)
    before = len(engine.rounds)
    assert engine.proposed() > 0
    engine.workers.newest("target", lost).crash()
    engine.until(lambda: len(engine.rounds) > before)
    engine.until_drafting(epoch=2)
    assert_same(engine.finish(), plain)
    assert engine.proposed(before) > 0
    assert engine.built.controller.stats().target_losses == 1
    # Target 0's end of the pair goes with it, which may be noticed first.
    causes = engine.changes.keys() - {"started", "revived"}
    assert causes == {"targets_lost"} or (lost == 0 and causes == {"pair_lost"})
    assert set(engine.changes.values()) == {1}
    assert engine.workers.newest("draft").worker.incarnation == 0, "the draft had nothing to do with it"
    assert engine.workers.newest("target", lost).worker.incarnation == 1
    for port in engine.workers.ports.values():
        assert loads(port) == 1, "a rank that remains keeps its weights"
    if world == 2:
        assert engine.workers.newest("target", 1 - lost).worker.incarnation == 0


def dies_in_round(number: int, *, answers: bool) -> Callable[[ThreadPort], None]:
    """Return what makes the first target rank 0 die in this round, after or instead of sending its result."""

    def prepare(port: ThreadPort) -> None:
        if port.worker != WorkerId("target"):
            return
        send = port.send

        def send_or_die(message: FromWorker) -> None:
            is_last = isinstance(message, RoundDone) and message.round == number
            if not is_last or answers:
                send(message)
            if is_last:
                raise Crash

        port.send = send_or_die  # type: ignore[method-assign]

    return prepare


@pytest.mark.parametrize("answers", [True, False], ids=["answered", "not answered"])
@pytest.mark.parametrize("world", [1, 2])
def test_no_token_is_lost_or_doubled_if_rank_0_dies_around_its_answer(
    start_engine: StartEngine, plain: dict[str, list[int]], world: int, answers: bool
) -> None:
    engine = start_engine(tensor_parallel_size=world, on_start=dies_in_round(6, answers=answers))
    assert engine.workers is not None
    wanted = requests(4, 20)
    engine.put(*wanted)
    assert_same(engine.finish(), plain)
    assert {name: len(ids) for name, ids in engine.outputs.items()} == {
        request.request_id: request.max_tokens for request in wanted
    }
    stats = engine.built.controller.stats()
    assert (stats.target_losses, stats.generated_tokens) == (1, engine.num_out)
    assert engine.workers.newest("target").worker.incarnation == 1


def loads(port: ThreadPort) -> int:
    """Return how often a worker has read weights."""
    return sum(isinstance(message, Progress) and message.text.startswith("loading") for message in port.sent)


def test_both_lost_at_once_come_back(start_engine: StartEngine, plain: dict[str, list[int]]) -> None:
    engine = start_engine()
    assert engine.workers is not None
    engine.put(*requests())
    engine.until(lambda: engine.num_out >= 60)
    before = len(engine.rounds)
    engine.workers.newest("target").crash()
    engine.workers.newest("draft").crash()
    engine.until(lambda: len(engine.rounds) > before)
    engine.until_drafting(epoch=2)
    assert engine.finish() == plain
    assert engine.proposed(before) > 0


def test_three_failed_rebuilds_end_every_request_with_an_error(start_engine: StartEngine) -> None:
    def fail_again(port: ThreadPort) -> None:
        if port.worker.role == "target" and port.worker.incarnation:
            port.crash()

    engine = start_engine(on_start=fail_again)
    assert engine.workers is not None
    engine.put(*requests())
    engine.until(lambda: engine.num_out >= 30)
    open_now = engine.built.controller.scheduler.num_unfinished
    engine.workers.newest("target").crash()
    with pytest.raises(EngineDeadError, match="could not be rebuilt in 3 attempts"):
        engine.until(lambda: False)
    words = engine.built.controller.final_outputs
    assert len(words) == open_now > 0
    assert all(word.finish_reason == "error" and "3 attempts" in (word.error or "") for word in words)
    assert engine.workers.newest("target").worker.incarnation == 3


class Room:
    """A cluster that has no room for the successors of target ranks, from *rank* on, until `comes_back`."""

    def __init__(self, rank: int = 0) -> None:
        self.comes_back = threading.Event()
        self._rank = rank

    def body(self, port: Port, floor_s: float = PATIENT_S) -> None:
        assert isinstance(port, ThreadPort)
        worker = port.worker
        lacks = worker.role == "target" and worker.incarnation and worker.rank >= self._rank
        while lacks and not self.comes_back.wait(0.02):
            if port.is_gone:
                return
        rank.serve(port, floor_s=floor_s)


@pytest.mark.parametrize("lost", [0, 1])
def test_without_room_for_all_ranks_fewer_go_on_and_all_again_after_the_next_loss(
    start_engine: StartEngine, plain: dict[str, list[int]], lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_supervisor, "FEWER_AFTER_S", 1.0)
    room = Room(rank=1)
    engine = start_engine(body=room.body, tensor_parallel_size=2, min_tensor_parallel_size=1)
    assert engine.workers is not None
    engine.put(*requests(4, 20))
    engine.until(lambda: engine.num_out >= 30)
    before = len(engine.rounds)
    engine.workers.crash(*(engine.workers.newest("target", each) for each in range(lost, 2)))
    engine.until(lambda: len(engine.rounds) > before)
    assert worlds(engine)[-1] == 1
    engine.until(lambda: engine.num_out >= 60)
    room.comes_back.set()
    engine.workers.newest("target").crash()
    assert_same(engine.finish(), plain)
    assert worlds(engine)[-1] == 2
    assert engine.built.controller.stats().target_losses == 2


def worlds(engine: Engine) -> list[int]:
    """Return the sizes of the groups that were set up, in order."""
    assert engine.workers is not None
    ports = engine.workers.ports.values()
    setups = sorted((each.group, each.world) for port in ports for each in port.received if isinstance(each, Setup))
    return [world for _, world in setups]


def test_without_room_for_the_target_requests_end_in_time_and_are_served_again_when_there_is(
    start_engine: StartEngine, plain: dict[str, list[int]]
) -> None:
    room = Room()
    engine = start_engine(body=room.body, rebuild_timeout_s=2.0)
    assert engine.workers is not None
    controller = engine.built.controller
    engine.put(*requests())
    engine.until(lambda: engine.num_out >= 10)
    engine.workers.newest("target").crash()
    engine.until(lambda: controller.stats().target_losses == 1)
    engine.put(Abort(("0",)))
    engine.until(lambda: engine.reasons.get("0") == "abort")
    assert not num_refused(engine), "the others wait for room"
    engine.until(lambda: num_refused(engine) == len(requests()) - 1)
    outage = controller.stats().outage
    assert outage is not None
    assert (outage.lacks, outage.reason) == ("target rank 0 (restart 1)", "target rank 0 died: its thread ended")

    engine.put(*refused("new"))
    engine.until(lambda: num_refused(engine) == len(requests()))  # at once, since there is still no room
    engine.outputs.clear()
    room.comes_back.set()
    engine.until(lambda: controller.stats().outage is None)
    engine.put(*requests())
    assert_same(engine.finish(), plain)


def num_refused(engine: Engine) -> int:
    return sum("no room" in (reason or "") for reason in engine.reasons.values())


def refused(name: str) -> list[Request]:
    return [structs.replace(requests(1)[0], request_id=name)]


def test_a_request_that_ended_for_want_of_room_may_be_sent_again(start_engine: StartEngine) -> None:
    engine = start_engine(body=Room().body, rebuild_timeout_s=1.0)
    assert engine.workers is not None
    controller = engine.built.controller
    engine.workers.newest("target").crash()
    engine.until(lambda: controller.stats().outage is not None)
    controller.inbox.put(requests(1))  # type: ignore[attr-defined]
    while not (outputs := controller.step()):
        pass
    (output,) = outputs
    error = failure(output.error or "", output.retry_after_s)
    assert isinstance(error, NoRoomError)
    assert error.retry_after_s >= 1
    assert "there is no room for target rank 0 (restart 1)" in str(error)
