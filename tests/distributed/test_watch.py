"""What counts as a hang, and how long a draft is waited for."""

import pytest

from protos.messages import WorkerInfo
from protos.worker_messages import Drafted, Heartbeat, Loaded, WorkerId
from runtime.supervision.round_times import RoundTimePredictor
from runtime.supervision.watchdog import DOES_CPU_S, Watchdog
from tests.support.distributed.scripted_group import ONE, Clock
from workers.draft.deadline import DraftDeadline

INFO = WorkerInfo(64, 4, 1000, 97)


def pass_time(watchdog: Watchdog, clock: Clock, seconds: float, step_s: float = 0.25) -> None:
    for _ in range(round(seconds / step_s)):
        clock.now += step_s
        watchdog.tick()


def test_silence_for_three_seconds_is_a_hang_once_a_worker_serves() -> None:
    clock = Clock()
    watchdog = Watchdog(clock)
    watchdog.add(ONE)
    pass_time(watchdog, clock, 30)
    assert not watchdog.silent(), "loading may take as long as it takes"
    watchdog.mark_serving(ONE)
    pass_time(watchdog, clock, 2.75)
    watchdog.heard(ONE, Heartbeat("serving"))
    pass_time(watchdog, clock, 3)
    assert not watchdog.silent()
    pass_time(watchdog, clock, 0.5)
    assert [worker for worker, _ in watchdog.silent()] == [ONE]


def restarted(watchdog: Watchdog, clock: Clock, first_start_s: float) -> WorkerId:
    """Let a worker start in *first_start_s* and serve; return its replacement, whose process runs."""
    watchdog.add(ONE)
    beat(watchdog, clock, ONE, first_start_s)
    watchdog.mark_serving(ONE)
    watchdog.remove(ONE)
    again = WorkerId("target", 0, 1)
    watchdog.heard(again, Heartbeat("placed"))
    return again


def beat(watchdog: Watchdog, clock: Clock, worker: WorkerId, seconds: float, cpu_s: float = 0.0) -> None:
    """Let a worker only beat for that long; every second it takes *cpu_s* of the processor."""
    for second in range(round(seconds)):
        pass_time(watchdog, clock, 1.0)
        watchdog.heard(worker, Heartbeat("loading", cpu_s=(second + 1) * cpu_s))


def test_a_worker_that_falls_silent_while_it_is_started_again_hangs() -> None:
    clock = Clock()
    watchdog = Watchdog(clock)
    again = restarted(watchdog, clock, 5)
    pass_time(watchdog, clock, 25)
    assert not watchdog.silent()
    pass_time(watchdog, clock, 0.5)
    assert [worker for worker, _ in watchdog.silent()] == [again]


def test_a_start_that_stands_still_hangs_though_it_beats() -> None:
    clock = Clock()
    watchdog = Watchdog(clock)
    again = restarted(watchdog, clock, 60)
    beat(watchdog, clock, again, 60)
    assert not watchdog.silent(), "as long as earlier starts it may do nothing that is seen"
    watchdog.heard(again, Loaded(INFO, 1))
    beat(watchdog, clock, again, 25)
    assert not watchdog.silent()
    beat(watchdog, clock, again, 1)
    assert ["longer than the 60 s" in why for _, why in watchdog.silent()] == [True]


def test_a_long_start_that_goes_on_is_no_hang() -> None:
    clock = Clock()
    watchdog = Watchdog(clock)
    again = restarted(watchdog, clock, 5)
    beat(watchdog, clock, again, 600, cpu_s=DOES_CPU_S / 10)  # a slow disk
    assert not watchdog.silent()
    for _ in range(30):
        beat(watchdog, clock, again, 20)
        watchdog.mark_active("target")  # another rank waits for its place
    assert not watchdog.silent()


def test_time_without_polling_does_not_count() -> None:
    clock = Clock()
    watchdog = Watchdog(clock)
    watchdog.mark_serving(ONE)
    watchdog.begin_round(0.0)
    clock.now += 3600  # the caller of an offline engine was busy, or this process was stopped
    watchdog.tick()
    assert not watchdog.silent()
    assert watchdog.overdue() is None


def test_a_healthy_long_round_survives_and_an_overlong_one_does_not() -> None:
    clock = Clock()
    watchdog = Watchdog(clock)
    watchdog.begin_round(1.1)
    pass_time(watchdog, clock, 20)
    assert watchdog.overdue() is None
    pass_time(watchdog, clock, 3)
    assert "22.0 s" in str(watchdog.overdue())
    watchdog.begin_round(0.001)
    pass_time(watchdog, clock, 5)
    assert watchdog.overdue() is None
    pass_time(watchdog, clock, 0.5)
    assert "5.0 s" in str(watchdog.overdue())
    watchdog.extend_round(10)
    assert watchdog.overdue() is None, "the clock stood still while a group formed"


def test_the_pace_grows_with_tokens_and_learns_slowness() -> None:
    predictor = RoundTimePredictor({1: 0.1, 64: 0.2})
    assert predictor.predict(1) == pytest.approx(0.1)
    assert predictor.predict(64) == pytest.approx(0.2)
    assert predictor.predict(6400) == pytest.approx(20)
    predictor.update(64, 2.0)
    assert predictor.predict(64) == pytest.approx(2.0)
    for _ in range(1000):
        predictor.update(64, 0.2)
    assert predictor.predict(64) == pytest.approx(0.2)
    assert RoundTimePredictor({}).predict(1000) == 0


def test_one_deadline_an_outage() -> None:
    clock = Clock()
    deadline = DraftDeadline(clock)
    assert deadline.start(0, 5) == pytest.approx(0.05)
    deadline.missed()
    for number in range(1, 20):
        assert deadline.start(number, 5) == 0
        clock.now += 0.02
        deadline.arrived(Drafted(number - 10, 1, 0.2)) if number >= 10 else None  # 200 ms late, every round
        assert deadline.is_skipping


def test_a_draft_that_is_on_time_again_is_waited_for_again_though_it_is_slower_than_a_plain_round() -> None:
    clock = Clock()
    deadline = DraftDeadline(clock)
    deadline.start(0, 5)
    deadline.missed()
    deadline.start(1, 5)
    clock.now += 0.01
    assert deadline.start(2, 5) == 0
    clock.now += 0.03
    deadline.arrived(Drafted(1, 1, 0.04))  # 40 ms after target 0 could verify round 1, when it is at round 2 already
    assert not deadline.is_skipping
    assert deadline.start(3, 5) > 0


def test_ids_that_come_before_the_plan_end_an_outage_too() -> None:
    deadline = DraftDeadline(Clock())
    deadline.start(0, 5)
    deadline.missed()
    deadline.arrived(Drafted(1, 1, 0.001))
    assert deadline.start(1, 5) > 0


@pytest.mark.parametrize("way_s", [0.001, 0.005, 0.02])
def test_a_draft_on_another_machine_is_waited_for_where_steps_are_long(way_s: float) -> None:
    """Drafting takes 20 ms and a step 60 ms; the plan and the table are each *way_s* under way."""
    clock = Clock()
    deadline = DraftDeadline(clock, floor_s=0.0)
    for number in range(8):
        limit = deadline.start(number, 5)
        clock.now += 0.02 + 2 * way_s
        if limit < 0.02 + 2 * way_s and not deadline.is_skipping:
            deadline.missed()
        deadline.arrived(Drafted(number, 1, 0.02))
        deadline.scored(0.06)
        clock.now += 0.06
    assert deadline.start(8, 5) == pytest.approx(min(3 * (0.02 + 2 * way_s), 0.3))
    assert deadline.start(9, 1) == pytest.approx(0.06), "but not for longer than its draft tokens can save"


def test_a_draft_that_is_under_way_for_longer_than_it_can_save_is_not_waited_for() -> None:
    clock = Clock()
    deadline = DraftDeadline(clock)
    for number in range(8):
        if deadline.start(number, 5):
            deadline.missed()
        clock.now += 0.06
        deadline.arrived(Drafted(number, 1, 0.002))
        deadline.scored(0.004)
    assert deadline.limit_s(5) == pytest.approx(0.05)
    assert deadline.is_skipping


def test_the_deadline_follows_the_median_leg_as_far_as_that_can_pay() -> None:
    deadline = DraftDeadline(Clock())
    for leg in (0.1, 0.1, 0.1, 5.0):
        deadline.arrived(Drafted(0, 1, leg))
    assert deadline.limit_s(5) == pytest.approx(0.3)
    deadline.scored(0.02)
    assert deadline.limit_s(5) == pytest.approx(0.1)
    assert deadline.limit_s(1) == pytest.approx(0.05)
