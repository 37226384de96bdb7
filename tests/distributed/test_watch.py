"""What counts as a hang, how long a draft is waited for, who gets which device: with a clock of our own, no threads."""

from collections.abc import Sequence

import pytest

from protos.config.engine import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SpeculativeConfig
from protos.errors import ConfigError, EngineDeadError, PlacementError, TargetLostError
from protos.messages import RoundPlan, Row, Verdict, WorkerInfo
from protos.worker_messages import (
    Allocate,
    Died,
    Drafted,
    FormPair,
    FromWorker,
    Heartbeat,
    Loaded,
    PairFailed,
    PairReady,
    Placed,
    Plan,
    RoundDone,
    Setup,
    StoreAddress,
    ToWorker,
    WorkerFailed,
    WorkerId,
    WorkerReady,
)
from runtime.supervision.distributed_executor import DistributedExecutor
from runtime.supervision.draft_supervisor import MAX_RETRY_S
from runtime.supervision.kv_sizing import KVSizing
from runtime.supervision.round_times import RoundTimePredictor
from runtime.supervision.startup import Devices
from runtime.supervision.watchdog import Watchdog
from workers.draft.deadline import DraftDeadline

ONE, DRAFT = WorkerId("target"), WorkerId("draft")
STORE = StoreAddress("127.0.0.1", 1)


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def pass_time(watch: Watchdog, clock: Clock, seconds: float, step_s: float = 0.25) -> None:
    for _ in range(round(seconds / step_s)):
        clock.now += step_s
        watch.look()


def test_silence_for_three_seconds_is_a_hang_once_a_worker_serves() -> None:
    clock = Clock()
    watch = Watchdog(clock)
    watch.add(ONE)
    pass_time(watch, clock, 30)
    assert not watch.silent(), "loading may take as long as it takes"
    watch.serves(ONE)
    pass_time(watch, clock, 2.75)
    watch.heard(ONE)
    pass_time(watch, clock, 3)
    assert not watch.silent()
    pass_time(watch, clock, 0.5)
    assert [worker for worker, _ in watch.silent()] == [ONE]


def test_time_in_which_nobody_looked_does_not_count() -> None:
    clock = Clock()
    watch = Watchdog(clock)
    watch.serves(ONE)
    watch.begin_round(0.0)
    clock.now += 3600  # the caller of an offline engine was busy elsewhere, or our own process was stopped
    watch.look()
    assert not watch.silent()
    assert watch.overdue() is None


def test_a_healthy_long_round_survives_and_an_overlong_one_does_not() -> None:
    clock = Clock()
    watch = Watchdog(clock)
    watch.begin_round(1.1)
    pass_time(watch, clock, 20)
    assert watch.overdue() is None
    pass_time(watch, clock, 3)
    assert "22.0 s" in str(watch.overdue())
    watch.begin_round(0.001)
    pass_time(watch, clock, 5)
    assert watch.overdue() is None
    pass_time(watch, clock, 0.5)
    assert "5.0 s" in str(watch.overdue())
    watch.extend_round(10)
    assert watch.overdue() is None, "the clock stood still while a group formed"


def test_the_pace_grows_with_tokens_and_learns_slowness() -> None:
    pace = RoundTimePredictor({1: 0.1, 64: 0.2})
    assert pace.predict(1) == pytest.approx(0.1)
    assert pace.predict(64) == pytest.approx(0.2)
    assert pace.predict(6400) == pytest.approx(20)
    pace.update(64, 2.0)
    assert pace.predict(64) == pytest.approx(2.0)
    for _ in range(1000):
        pace.update(64, 0.2)
    assert pace.predict(64) == pytest.approx(0.2)
    assert RoundTimePredictor({}).predict(1000) == 0


def test_one_deadline_an_outage() -> None:
    clock = Clock()
    patience = DraftDeadline(clock)
    assert patience.ask(0, 5) == pytest.approx(0.05)
    patience.missed()
    for number in range(1, 20):
        assert patience.ask(number, 5) == 0
        clock.now += 0.02
        patience.arrived(Drafted(number - 10, 1, 0.2)) if number >= 10 else None  # 200 ms late, every round
        assert patience.is_skipping


def test_a_draft_that_is_on_time_again_is_waited_for_again_though_it_is_slower_than_a_plain_round() -> None:
    clock = Clock()
    patience = DraftDeadline(clock)
    patience.ask(0, 5)
    patience.missed()
    patience.ask(1, 5)
    clock.now += 0.01
    assert patience.ask(2, 5) == 0
    clock.now += 0.03
    patience.arrived(Drafted(1, 1, 0.04))  # 40 ms after target 0 could verify round 1, when it is at round 2 already
    assert not patience.is_skipping
    assert patience.ask(3, 5) > 0


def test_ids_that_come_before_the_plan_end_an_outage_too() -> None:
    patience = DraftDeadline(Clock())
    patience.ask(0, 5)
    patience.missed()
    patience.arrived(Drafted(1, 1, 0.001))
    assert patience.ask(1, 5) > 0


def test_the_deadline_follows_the_median_leg_as_far_as_that_can_pay() -> None:
    patience = DraftDeadline(Clock())
    for leg in (0.1, 0.1, 0.1, 5.0):
        patience.arrived(Drafted(0, 1, leg))
    assert patience.limit_s(5) == pytest.approx(0.3)
    patience.scored(0.02)
    assert patience.limit_s(5) == pytest.approx(0.1)
    assert patience.limit_s(1) == pytest.approx(0.05)


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


class ScriptedGang:
    """A gang whose workers say what the test says. Every look at the mail takes a quarter of a second."""

    def __init__(self, clock: Clock, blocks: dict[str, int] | None = None) -> None:
        self.clock, self.blocks = clock, blocks or {}
        self.mail: list[tuple[WorkerId, FromWorker]] = []
        self.sent: list[tuple[WorkerId, ToWorker]] = []
        self.started: list[WorkerId] = []
        self.killed: list[WorkerId] = []
        self.mute: set[WorkerId] = set()
        self.is_closed = False

    def say(self, worker: WorkerId, message: FromWorker) -> None:
        self.mail.append((worker, message))

    def start(self, workers: Sequence[WorkerId]) -> None:
        self.started += workers
        for worker in workers:
            self.say(worker, Placed("h", "node", 1, (), STORE))

    def send(self, worker: WorkerId, message: ToWorker) -> None:
        self.sent.append((worker, message))
        if worker in self.mute:
            return
        if isinstance(message, Setup):
            info = WorkerInfo(self.blocks.get(worker.role, 64), 4, 1000, 97)
            self.say(worker, Loaded(info, 1))
        elif isinstance(message, Allocate):
            self.say(worker, WorkerReady({1: 0.001}))
        elif isinstance(message, FormPair):
            self.say(worker, PairReady(message.epoch))
        elif isinstance(message, Plan) and worker.role == "target" and worker.rank == 0:
            self.say(worker, RoundDone(message.plan.round, [Verdict(0, [1])]))

    def receive(self, timeout_s: float) -> list[tuple[WorkerId, FromWorker]]:
        self.clock.now += timeout_s
        mail, self.mail = self.mail, []
        alive = [worker for worker in self.started if worker not in self.killed]
        beats = [(worker, Heartbeat("serving")) for worker in alive if worker not in self.mute] if timeout_s else []
        return [(worker, message) for worker, message in [*mail, *beats] if worker in alive]

    def kill(self, workers: Sequence[WorkerId], *, waits: bool = True) -> None:
        self.killed += workers

    def close(self) -> None:
        self.is_closed = True


def executor(gang: ScriptedGang, clock: Clock, world: int = 1, *, draft: bool = True) -> DistributedExecutor:
    speculative = SpeculativeConfig("draft_model", 3, model="d", placement="dedicated") if draft else None
    config = EngineConfig(
        ModelConfig("m", enforce_eager=True),
        CacheConfig(block_size=4),
        speculative=speculative,
        parallel=ParallelConfig(tensor_parallel_size=world, executor="ray"),
    )
    return DistributedExecutor(gang, config, lambda line: None, clock)


def a_plan(number: int = 0, epoch: int = 0) -> RoundPlan:
    return RoundPlan(number, [Row(0, 0, 4, 4, k=2 if epoch else 0)], epoch=epoch)


def test_everybody_gets_the_fewest_blocks_that_anyone_has_room_for() -> None:
    clock = Clock()
    gang = ScriptedGang(clock, {"target": 50, "draft": 40})
    info = executor(gang, clock, world=2).start()
    assert (info.num_blocks, info.max_model_len) == (40, 160)
    told = {worker: message for worker, message in gang.sent if isinstance(message, Allocate)}
    assert set(told.values()) == {Allocate(40, 160, 97)}
    assert len(told) == 3
    setups = {worker: message for worker, message in gang.sent if isinstance(message, Setup)}
    assert setups[ONE].store == setups[WorkerId("target", 1)].store == STORE
    assert setups[DRAFT].store is None


def test_waiting_for_a_place_is_no_hang_and_is_said() -> None:
    class Crowded(ScriptedGang):
        def receive(self, timeout_s: float) -> list[tuple[WorkerId, FromWorker]]:
            self.clock.now += timeout_s
            return [] if self.clock.now < 400 else super().receive(0.0)

    clock, said = Clock(), []
    config = EngineConfig(ModelConfig("m", enforce_eager=True), CacheConfig(block_size=4))
    DistributedExecutor(Crowded(clock), config, said.append, clock).start()
    assert clock.now >= 400
    assert said.count("waiting for target rank 0 to be placed") == 10


def test_too_small_a_cache_and_a_failing_worker_end_the_start() -> None:
    clock = Clock()
    gang = ScriptedGang(clock, {"draft": 1})
    with pytest.raises(ConfigError, match="the KV cache of draft holds 1 blocks of 4 tokens"):
        executor(gang, clock).start()
    assert gang.is_closed
    gang = ScriptedGang(clock)
    gang.mute = {DRAFT}
    gang.say(DRAFT, WorkerFailed("no such folder", "ConfigError"))
    gang.started.append(DRAFT)
    with pytest.raises(ConfigError, match="no such folder"):
        executor(gang, clock).start()


@pytest.mark.parametrize("world", [1, 2])
def test_a_target_that_says_nothing_any_more_is_lost_within_five_seconds(world: int) -> None:
    clock = Clock()
    gang = ScriptedGang(clock)
    run = executor(gang, clock, world)
    run.start()
    run.run(a_plan())
    frozen = WorkerId("target", world - 1)
    gang.mute = {frozen, ONE}
    gang.say(ONE, Heartbeat("serving"))
    began = clock.now
    with pytest.raises(TargetLostError, match="hangs"):
        run.run(a_plan(1))
    assert clock.now - began <= 5
    gang.mute = set()
    while not run.rebuild(0.1):
        pass
    assert set(gang.killed) == {WorkerId("target", rank) for rank in range(world)}
    assert [verdict.token_ids for verdict in run.run(a_plan(2))] == [[1]]


def test_a_draft_that_says_nothing_any_more_is_replaced_beside_the_rounds() -> None:
    clock = Clock()
    gang = ScriptedGang(clock)
    run = executor(gang, clock)
    run.start()
    assert run.drafting.is_up
    gang.mute = {DRAFT}
    number = 0
    while run.drafting.epoch == 1:
        clock.now += 0.5
        gang.say(ONE, Heartbeat("serving"))
        run.poll()
        run.run(a_plan(number, run.drafting.epoch))
        number += 1
        assert number < 12
    assert gang.killed == [DRAFT]
    while not run.drafting.is_up:
        clock.now += 0.1
        run.poll()
    assert run.drafting.epoch == 2
    assert dict(run.drafting.changes) == {"started": 1, "lost": 1, "revived": 1}
    assert gang.started[-1] == WorkerId("draft", 0, 1)


def test_a_draft_that_beats_but_gets_nothing_done_is_replaced() -> None:
    clock = Clock()
    gang = ScriptedGang(clock)
    run = executor(gang, clock)
    run.start()
    for number in range(100):
        gang.say(DRAFT, Heartbeat("serving", min(number - 1, 49)))  # always a round behind, then stuck
        gang.say(ONE, Heartbeat("serving", number - 1))
        clock.now += 0.5
        run.run(a_plan(number, run.drafting.epoch))
        if gang.killed:
            break
    assert 60 < number < 99, number
    assert gang.killed == [DRAFT]


def wait(run: DistributedExecutor, gang: ScriptedGang, clock: Clock, seconds: int) -> None:
    """Let time pass in which nobody dies."""
    for _ in range(seconds * 4):
        clock.now += 0.25
        for worker in gang.started:
            gang.say(worker, Heartbeat("serving"))
        run.poll()


def test_a_pair_that_breaks_is_formed_again_and_a_draft_that_cannot_be_paired_is_replaced() -> None:
    clock = Clock()
    gang = ScriptedGang(clock)
    run = executor(gang, clock)
    run.start()
    gang.say(ONE, PairFailed(1, "connection reset"))
    run.poll()
    assert not run.drafting.is_up
    wait(run, gang, clock, 2)
    assert run.drafting.epoch == 2
    for epoch in (2, 3, 4):
        gang.say(DRAFT, PairFailed(epoch, "connection reset"))
        wait(run, gang, clock, 2)
    assert run.drafting.epoch == 5
    assert not gang.killed, "each of these pairs was formed before it broke"
    gang.mute = {DRAFT}
    gang.say(ONE, PairFailed(5, "gone"))
    wait(run, gang, clock, 300)
    assert gang.killed == [DRAFT]


def test_a_draft_that_dies_as_soon_as_it_serves_is_replaced_ever_more_slowly() -> None:
    clock = Clock()
    gang = ScriptedGang(clock)
    run = executor(gang, clock)
    run.start()
    wait(run, gang, clock, 20)
    for _ in range(100):
        if run.drafting.is_up:
            gang.say(gang.started[-1], Died("signal SIGSEGV"))
        wait(run, gang, clock, 1)
    assert 5 <= len(gang.started) - 2 <= 10
    wait(run, gang, clock, 70)
    assert run.drafting.is_up


def test_a_draft_that_served_long_is_replaced_at_once_even_if_its_pair_broke_first() -> None:
    clock = Clock()
    gang = ScriptedGang(clock)
    run = executor(gang, clock)
    run.start()
    for number in range(1, 9):
        wait(run, gang, clock, 20)
        assert run.drafting.is_up
        gang.say(ONE, PairFailed(run.drafting.epoch, "connection reset"))
        run.poll()
        gang.say(gang.started[-1], Died("signal SIGKILL"))
        run.poll()
        wait(run, gang, clock, 2)
        assert run.drafting.is_up
        assert len(gang.started) == 2 + number


def test_a_draft_that_never_serves_is_tried_for_ever() -> None:
    clock = Clock()
    gang = ScriptedGang(clock)
    run = executor(gang, clock)
    run.start()
    keeper = run._keeper
    assert keeper is not None
    for _ in range(1100):  # 2.0**1024 is no number
        keeper.lost("died: signal SIGSEGV")
    assert keeper._retry_at is not None
    assert keeper._retry_at - keeper._watch.now == pytest.approx(MAX_RETRY_S)


def test_a_replacement_may_find_a_little_less_memory() -> None:
    def found(num_blocks: int) -> dict[WorkerId, Loaded]:
        return {ONE: Loaded(WorkerInfo(num_blocks, 4, 1000, 97), 1)}

    sizing = KVSizing()
    settled = sizing.settle(found(1000))
    assert sizing.as_before(found(970)) == sizing.as_before(found(2000)) == settled
    with pytest.raises(EngineDeadError, match="target rank 0 has memory for 969 KV blocks, and 1000 are in use"):
        sizing.as_before(found(969))


def test_being_late_is_said_and_counted_once_an_outage() -> None:
    clock = Clock()
    gang = ScriptedGang(clock)
    run = executor(gang, clock)
    run.start()
    gang.mute = {ONE}
    results = [
        RoundDone(0, [], draft_missed=True),
        RoundDone(1, []),
        RoundDone(2, [Verdict(0, [1], proposed=2)]),
        RoundDone(3, [], draft_missed=True),
    ]
    for done in results:
        gang.say(ONE, done)
        run.run(a_plan(done.round, 1))
    assert dict(run.drafting.changes) == {"started": 1, "late": 2, "in_time": 1}


def test_mail_of_a_worker_that_was_replaced_is_nobodys() -> None:
    clock = Clock()
    gang = ScriptedGang(clock)
    run = executor(gang, clock, draft=False)
    run.start()
    gang.say(ONE, Died("signal SIGKILL"))
    with pytest.raises(TargetLostError, match="target rank 0 died: signal SIGKILL"):
        run.run(a_plan())
    while not run.rebuild(0.1):
        pass
    gang.killed.clear()
    gang.say(ONE, Died("again"))
    run.poll()
    gang.started.append(ONE)
    gang.say(ONE, RoundDone(1, [Verdict(0, [9])]))
    assert [verdict.token_ids for verdict in run.run(a_plan(1))] == [[1]]


def test_losing_the_targets_again_and_again_is_the_end() -> None:
    clock = Clock()
    gang = ScriptedGang(clock)
    run = executor(gang, clock, draft=False)
    run.start()
    for loss in range(4):
        gang.say(WorkerId("target", 0, loss), Died("signal SIGSEGV"))
        with pytest.raises(TargetLostError):
            run.poll()
        if loss == 3:
            break
        while not run.rebuild(0.1):
            pass
    with pytest.raises(EngineDeadError, match=r"lost 4 times .*SIGSEGV"):
        run.rebuild(0.1)
