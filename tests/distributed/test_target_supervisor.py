"""Starting the workers, their devices and blocks, and losing and rebuilding the targets; with scripted workers."""

from collections.abc import Sequence

import pytest

from protos.config.engine import CacheConfig, EngineConfig, ModelConfig
from protos.errors import ConfigError, EngineDeadError, PlacementError, TargetLostError
from protos.messages import Verdict, WorkerInfo
from protos.worker_messages import (
    Allocate,
    Died,
    FromWorker,
    GroupLost,
    Heartbeat,
    Loaded,
    Placed,
    Rejoin,
    RoundDone,
    Setup,
    ToWorker,
    WorkerFailed,
    WorkerId,
)
from runtime.supervision.distributed_executor import DistributedExecutor
from runtime.supervision.kv_sizing import KVSizing
from runtime.supervision.startup import Devices
from tests.support.distributed.scripted_group import DRAFT, ONE, STORE, Clock, ScriptedGroup, make_executor, make_plan


def test_each_worker_gets_a_device_of_its_own() -> None:
    devices = Devices("auto")
    all_seen = Placed("h", "node", 1, ("gpu a", "gpu b"))
    assert devices.assign(ONE, all_seen) == "cuda:0"
    assert devices.assign(WorkerId("target", 1), all_seen) == "cuda:1"
    with pytest.raises(PlacementError, match=r"sees 2 device\(s\), and all are taken: 3 workers"):
        devices.assign(DRAFT, all_seen)
    assert devices.assign(DRAFT, Placed("h", "node", 1, ("gpu c",))) == "cuda:0"
    devices.release([ONE])
    assert devices.assign(WorkerId("target", 0, 1), all_seen) == "cuda:0"
    assert Devices("auto").assign(ONE, Placed("h", "node", 1)) == "cpu"
    with pytest.raises(PlacementError, match="sees no CUDA device"):
        Devices("cuda").assign(ONE, Placed("h", "node", 1))
    shared = Devices("auto", may_share=True)
    assert [shared.assign(WorkerId("target", i), Placed("h", "node", 1, ("gpu",))) for i in range(2)] == ["cuda:0"] * 2


def test_everybody_gets_the_fewest_blocks_that_anyone_has_room_for() -> None:
    clock = Clock()
    group = ScriptedGroup(clock, {"target": 50, "draft": 40})
    info = make_executor(group, clock, world=2).start()
    assert (info.num_blocks, info.max_model_len) == (40, 160)
    sent = {worker: message for worker, message in group.sent if isinstance(message, Allocate)}
    assert set(sent.values()) == {Allocate(40, 160, 97)}
    assert len(sent) == 3
    setups = {worker: message for worker, message in group.sent if isinstance(message, Setup)}
    assert setups[ONE].store == setups[WorkerId("target", 1)].store == STORE
    assert setups[DRAFT].store is None


def test_waiting_for_a_place_is_no_hang_and_is_said() -> None:
    class Crowded(ScriptedGroup):
        def receive(self, timeout_s: float) -> list[tuple[WorkerId, FromWorker]]:
            self.clock.now += timeout_s
            return [] if self.clock.now < 400 else super().receive(0.0)

    clock, lines = Clock(), []
    config = EngineConfig(ModelConfig("m", enforce_eager=True), CacheConfig(block_size=4))
    DistributedExecutor(Crowded(clock), config, lines.append, clock).start()
    assert clock.now >= 400
    assert lines.count("waiting for target rank 0 to be placed") == 10


def test_too_small_a_cache_and_a_failing_worker_end_the_start() -> None:
    clock = Clock()
    group = ScriptedGroup(clock, {"draft": 1})
    with pytest.raises(ConfigError, match="the KV cache of draft holds 1 blocks of 4 tokens"):
        make_executor(group, clock).start()
    assert group.is_closed
    group = ScriptedGroup(clock)
    group.mute = {DRAFT}
    group.post(DRAFT, WorkerFailed("no such folder", "ConfigError"))
    group.started.append(DRAFT)
    with pytest.raises(ConfigError, match="no such folder"):
        make_executor(group, clock).start()


@pytest.mark.parametrize("world", [1, 2])
def test_a_target_that_says_nothing_any_more_is_lost_within_five_seconds(world: int) -> None:
    clock = Clock()
    group = ScriptedGroup(clock)
    executor = make_executor(group, clock, world)
    executor.start()
    executor.run(make_plan())
    frozen = WorkerId("target", world - 1)
    group.mute = {frozen, ONE}
    group.post(ONE, Heartbeat("serving"))
    began = clock.now
    with pytest.raises(TargetLostError, match="hangs"):
        executor.run(make_plan(1))
    assert clock.now - began <= 5
    group.mute = set()
    while not executor.rebuild(0.1):
        pass
    assert group.killed == [frozen]
    assert [verdict.token_ids for verdict in executor.run(make_plan(2))] == [[1]]


class Hanging(ScriptedGroup):
    """Replacements never begin, or beat without ever loading; those of them do what the first ones did."""

    def __init__(self, clock: Clock, *, beats: bool) -> None:
        super().__init__(clock)
        self._beats = beats

    def start(self, workers: Sequence[WorkerId]) -> None:
        super().start(workers)
        for worker in workers:
            if worker.incarnation == 1 and not self._beats:
                self.messages.remove((worker, Placed("h", "node", 1, (), STORE)))
                self.post(worker, Heartbeat("placed"))
                self.mute.add(worker)

    def send(self, worker: WorkerId, message: ToWorker) -> None:
        if worker.incarnation != 1 or not isinstance(message, Setup):
            super().send(worker, message)


@pytest.mark.parametrize("beats", [False, True], ids=["silent", "standing still"])
def test_a_target_that_hangs_while_it_is_started_again_is_replaced(beats: bool) -> None:
    clock = Clock()
    group = Hanging(clock, beats=beats)
    executor = make_executor(group, clock, draft=False)
    executor.start()
    group.post(ONE, Died("signal SIGKILL"))
    with pytest.raises(TargetLostError):
        executor.poll()
    began = clock.now
    while not executor.rebuild(0.1):
        assert clock.now - began < 30
    assert group.killed == [ONE, WorkerId("target", 0, 1)]
    assert [verdict.token_ids for verdict in executor.run(make_plan(1))] == [[1]]


@pytest.mark.parametrize("beats", [False, True], ids=["silent", "standing still"])
def test_a_draft_that_hangs_while_it_is_started_again_is_replaced(beats: bool) -> None:
    clock = Clock()
    group = Hanging(clock, beats=beats)
    executor = make_executor(group, clock)
    executor.start()
    group.post(DRAFT, Died("signal SIGKILL"))
    executor.poll()
    began = clock.now
    while not executor.drafting.is_up:
        clock.now += 0.1
        executor.poll()
        group.messages += [(each, Heartbeat("serving")) for each in group.started if each not in group.mute]
        assert clock.now - began < 40, "a second failure in a row is followed by a pause"
    assert WorkerId("draft", 0, 1) in group.killed


RANK_1 = WorkerId("target", 1)


def lose(group: ScriptedGroup, executor: DistributedExecutor, *messages: tuple[WorkerId, FromWorker]) -> None:
    """Post *messages*, which lose the targets, and forget what was sent before."""
    for worker, message in messages:
        group.post(worker, message)
    group.sent.clear()
    group.started.clear()
    group.started += [ONE, RANK_1]
    with pytest.raises(TargetLostError):
        executor.poll()


@pytest.mark.parametrize("dead", [0, 1])
def test_the_other_ranks_keep_their_processes(dead: int) -> None:
    clock = Clock()
    group = ScriptedGroup(clock)
    executor = make_executor(group, clock, world=2, draft=False)
    executor.start()
    victim, other = WorkerId("target", dead), WorkerId("target", 1 - dead)
    lose(group, executor, (other, GroupLost("a rank has died")))
    assert not executor.rebuild(0.1), "which rank is gone is not known yet"
    assert not group.killed
    group.post(victim, Died("signal SIGKILL"))
    while not executor.rebuild(0.1):
        pass
    replacement = WorkerId("target", dead, 1)
    assert group.killed == [victim]
    assert group.started[2:] == [replacement]
    assert (other, Rejoin(STORE, 1)) in group.sent
    (setup,) = (message for worker, message in group.sent if isinstance(message, Setup))
    assert (setup.worker, setup.group) == (replacement, 1)
    assert [verdict.token_ids for verdict in executor.run(make_plan(1))] == [[1]]


def test_all_ranks_are_replaced_if_none_is_found_to_be_gone() -> None:
    clock = Clock()
    group = ScriptedGroup(clock)
    executor = make_executor(group, clock, world=2, draft=False)
    executor.start()
    lose(group, executor, (ONE, GroupLost("timed out")))
    while not executor.rebuild(0.1):
        pass
    assert set(group.killed) == {ONE, RANK_1}
    assert not any(isinstance(message, Rejoin) for _, message in group.sent)


def test_all_ranks_are_replaced_if_one_does_not_form_the_next_group() -> None:
    clock = Clock()
    group = ScriptedGroup(clock)
    executor = make_executor(group, clock, world=2, draft=False)
    executor.start()
    group.mute = {ONE}
    lose(group, executor, (RANK_1, Died("signal SIGKILL")))
    while not executor.rebuild(0.1):
        group.messages += [(ONE, Heartbeat("loading"))]  # it runs, but is stuck
    assert {ONE, RANK_1} <= set(group.killed)
    assert group.started[-2:] == [WorkerId("target", 0, 1), WorkerId("target", 1, 2)]


def test_a_replacement_may_find_a_little_less_memory() -> None:
    def found(num_blocks: int) -> dict[WorkerId, Loaded]:
        return {ONE: Loaded(WorkerInfo(num_blocks, 4, 1000, 97), 1)}

    sizing = KVSizing()
    decided = sizing.decide(found(1000))
    assert sizing.reuse(found(970)) == sizing.reuse(found(2000)) == decided
    with pytest.raises(EngineDeadError, match="target rank 0 has memory for 969 KV blocks, and 1000 are in use"):
        sizing.reuse(found(969))


@pytest.mark.parametrize(
    ("cache_bytes", "least", "of_three", "of_one"),
    [
        pytest.param(10_000, 1, 2, 1, id="one rank holds all"),
        pytest.param(4000, 1, 2, None, id="one rank lacks memory"),
        pytest.param(100, 1, None, None, id="two lack memory, too"),
        pytest.param(10_000, 3, None, None, id="fewer than allowed"),
    ],
)
def test_over_how_many_ranks_a_group_is_rebuilt(
    cache_bytes: int, least: int, of_three: int | None, of_one: int | None
) -> None:
    """Four ranks with 1000 bytes of weights each, and a context of ten blocks of 100 bytes; three share no heads."""
    sizing = KVSizing()
    loaded = Loaded(WorkerInfo(100, 4, 40, 97), 1000, cache_bytes, 100, (1, 2, 4))
    sizing.decide({WorkerId("target", rank): loaded for rank in range(4)})
    assert sizing.fewer_ranks(3, least) == of_three
    assert sizing.fewer_ranks(1, least) == of_one


def test_a_group_of_fewer_ranks_may_hold_fewer_blocks_and_one_of_all_as_many_as_at_first() -> None:
    def found(num_blocks: int) -> dict[WorkerId, Loaded]:
        return {ONE: Loaded(WorkerInfo(num_blocks, 4, 100, 97), 1)}

    sizing = KVSizing()
    sizing.decide(found(1000))
    assert sizing.refit(found(400)).num_blocks == sizing.info.num_blocks == 400
    assert sizing.for_draft({DRAFT: Loaded(WorkerInfo(1000, 4, 100, 97), 1)}).num_blocks == 1000, "all ranks may return"
    assert sizing.refit(found(2000)).num_blocks == 1000, "the draft has no more"
    with pytest.raises(EngineDeadError, match="memory for 24 KV blocks, and a sequence of 100 tokens takes 25"):
        sizing.refit(found(24))


def test_messages_of_a_replaced_worker_are_ignored() -> None:
    clock = Clock()
    group = ScriptedGroup(clock)
    executor = make_executor(group, clock, draft=False)
    executor.start()
    group.post(ONE, Died("signal SIGKILL"))
    with pytest.raises(TargetLostError, match="target rank 0 died: signal SIGKILL"):
        executor.run(make_plan())
    while not executor.rebuild(0.1):
        pass
    group.killed.clear()
    group.post(ONE, Died("again"))
    executor.poll()
    group.started.append(ONE)
    group.post(ONE, RoundDone(1, [Verdict(0, [9])]))
    assert [verdict.token_ids for verdict in executor.run(make_plan(1))] == [[1]]


def test_losing_the_targets_again_and_again_is_the_end() -> None:
    clock = Clock()
    group = ScriptedGroup(clock)
    executor = make_executor(group, clock, draft=False)
    executor.start()
    for loss in range(4):
        group.post(WorkerId("target", 0, loss), Died("signal SIGSEGV"))
        with pytest.raises(TargetLostError):
            executor.poll()
        if loss == 3:
            break
        while not executor.rebuild(0.1):
            pass
    with pytest.raises(EngineDeadError, match=r"lost 4 times .*SIGSEGV"):
        executor.rebuild(0.1)
