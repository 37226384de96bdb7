"""Work that is spread over rounds."""

from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import count, pairwise
from statistics import mean
from unittest import mock

import pytest

from protos.messages import RoundPlan, Row, Verdict
from runtime.core.sequence import Sequence
from runtime.policy.adaptive import AdaptivePolicy
from runtime.policy.bandit import BanditPolicy
from runtime.policy.base import FinishedStep
from runtime.policy.choosers import ChainChooser
from runtime.policy.pacing import RENEWED_ROUNDS, SETTLING_ROUNDS, IdleRounds, Pace, RunningLoad, Share, Starting
from runtime.policy.round_costs import RoundCostModel
from tests.support.policy_simulation import LIMIT, Simulation, best_fixed, cheap, flat, warmed_up
from tests.support.scheduling import decoding


@pytest.mark.parametrize(("seconds", "every"), [(0.0005, 5), (0.00001, 1), (1.0, 32)])
def test_work_takes_its_share_of_the_time_or_less_unless_it_would_be_too_rare(seconds: float, every: int) -> None:
    """A round takes 10 ms. In any rounds the first of which has the work, it takes a hundredth at most."""
    pace, rounds = Pace(), []
    for number in range(320):
        if pace.is_due:
            rounds.append(number)
            pace.done(seconds, 0.01, Share(0.01, 32))
        else:
            pace.skip()
    gaps = {second - first for first, second in pairwise(rounds)}
    assert len(gaps) == 1
    gap = gaps.pop()
    assert every <= gap <= every + 1
    assert gap == 32 or seconds <= gap * 0.01 * 0.01


def test_it_can_be_due_earlier_by_another_share_of_the_time() -> None:
    """A round takes 10 ms, and the work 1 ms: a hundredth of the time after 10 rounds, a tenth after one."""
    pace = Pace()
    pace.done(0.001, 0.01, Share(0.01, 32))
    pace.skip(4)
    pace.hasten(0.01, Share(0.02, 32))
    assert (pace.num_left, pace.is_due) == (1, False)
    pace.hasten(0.01, Share(0.001, 32))
    assert pace.num_left == 1, "it is not put off"
    pace.hasten(0.01, Share(0.1, 32))
    assert pace.is_due


def test_it_can_be_asked_for_at_once() -> None:
    pace = Pace()
    pace.done(1.0, 0.01, Share(0.01, 32))
    assert not pace.is_due
    pace.advance()
    assert pace.is_due


def test_it_is_due_earlier_where_that_is_asked_for() -> None:
    pace = Pace()
    for most, num_left in ((0, 32), (5, 5), (64, 32)):
        pace.done(0.32, 1.0, Share(0.01, 64), most=most)
        assert pace.num_left == num_left


def test_while_nothing_is_known_of_rounds_it_is_done_in_each() -> None:
    pace = Pace()
    pace.done(1.0, 0.0, Share(0.01, 32))
    assert pace.is_due


def test_rounds_are_idle_until_work_is_due_or_the_requests_change() -> None:
    often, rarely = Pace(), Pace()
    idle, two = IdleRounds(often, rarely), [decoding(0), decoding(1)]
    step = FinishedStep(RoundPlan(0, [Row(0, 1, 1, 2)]), [], 2, 0.0, 0.01)

    def num_idle(running: list[Sequence]) -> int:
        """Return how many of the next ten rounds are idle."""
        count = 0
        for _ in range(10):
            if not idle.goes_on(running):
                break
            idle.add(step)
            count += 1
        return count

    for pace, rounds in ((often, 4), (rarely, 32)):
        pace.done(0.01 * rounds, 1.0, Share(0.01, 64))
    idle.end(two)
    assert num_idle(two) == 0  # before it starts
    idle.end(two)
    idle.start(learns=True)
    assert num_idle(two) == often.num_left
    assert (idle.num_rounds, len(idle.learnt)) == (4, 4)
    assert idle.seconds == pytest.approx(0.04)
    idle.end(two)
    assert often.is_due
    assert rarely.num_left == 28
    often.done(0.04, 1.0, Share(0.01, 64))
    for others in ([decoding(0), decoding(2)], two[:1]):  # one left, and one came; one left
        idle.start(learns=False)
        assert num_idle(others) == 0
        idle.end(others)
        assert num_idle(others) == 0  # until it starts again
        idle.end(two)


def test_without_draft_tokens_requests_come_and_leave_in_idle_rounds() -> None:
    pace, step = Pace(), FinishedStep(RoundPlan(0, [Row(0, 0, 7, 7), Row(1, 4, 1, 5)]), [], 2, 0.0, 0.01)
    idle, rows = IdleRounds(pace, predicts=True), [decoding(key) for key in range(6)]
    pace.done(0.32, 1.0, Share(0.01, 64))
    idle.end(rows[:4])
    idle.start(learns=False, decided=RunningLoad.of(rows[:4]))
    for running in (rows[:4], rows[1:4], rows[1:6]):
        assert idle.goes_on(running)
        idle.add(step)
    assert all(idle.goes_on(rows[:6]) for _ in range(SETTLING_ROUNDS))
    assert idle.goes_on(rows[:4])
    assert all(idle.goes_on(rows[:6]) for _ in range(SETTLING_ROUNDS))
    assert not idle.goes_on(rows[:6])  # it stays another load than it was decided for
    idle.end(rows[:4])
    idle.start(learns=False, decided=RunningLoad.of(rows[:4]))
    assert not idle.is_predicted
    predicted = [*rows[1:4], decoding(9, prediction_token_ids=(1,))]
    assert not idle.goes_on(predicted)  # a prediction may pay
    idle.end(predicted)
    assert idle.is_predicted
    worker_alone = IdleRounds(pace)  # follows no predictions
    worker_alone.end(rows[:4])
    worker_alone.start(learns=False, decided=RunningLoad.of(rows[:4]))
    assert worker_alone.goes_on(predicted)


def test_without_draft_tokens_idle_rounds_end_when_half_of_the_requests_are_others() -> None:
    pace, step = Pace(), FinishedStep(RoundPlan(0, [Row(0, 4, 1, 5)]), [], 1, 0.0, 0.01)
    idle, rows = IdleRounds(pace), [decoding(key) for key in range(6)]
    pace.done(2.56, 1.0, Share(0.01, 256))
    idle.end(rows[:4])
    idle.start(learns=False, decided=RunningLoad.of(rows[:4]))
    for _ in range(RENEWED_ROUNDS):  # it was decided before these
        assert idle.goes_on(rows[2:])
        idle.add(step)
    assert idle.goes_on(rows[1:5])
    assert not idle.is_renewed
    assert not idle.goes_on(rows[2:])
    assert idle.is_renewed
    idle.end(rows[2:])
    assert not idle.is_renewed


def test_sequences_that_start_make_another_load() -> None:
    starting, new = Starting(), [replace(decoding(key), num_sent_tokens=0) for key in range(8)]
    starting.begin([decoding(8), decoding(9), decoding(10), decoding(11)])
    assert [starting.makes_other_load(one, 4) for one in new[:3]] == [False, True, True]
    assert not starting.makes_other_load(decoding(8), 4)  # it runs already
    starting.begin([])
    assert not any(starting.makes_other_load(one, 0) for one in new)  # nothing was decided yet


def test_acceptance_is_learnt_of_rounds_in_which_nothing_is_done() -> None:
    """With a policy that takes 50 us at a time, these are most rounds. Without them, it would be 0.80."""

    def of_best(seed: int) -> float:
        """Return the speed in 300 rounds of text that is harder to predict than that before."""
        ticks, model = count(), RoundCostModel(warmed_up(flat), LIMIT + 1, 1, LIMIT)
        policy = AdaptivePolicy(LIMIT, ChainChooser(LIMIT), model, clock=lambda: 0.00005 * next(ticks))
        simulation = Simulation(policy, flat, cheap, seed=seed)
        simulation.run([0.9], 2000)
        return simulation.run([0.45], 300) / best_fixed([0.45], flat, cheap)

    assert mean(of_best(seed) for seed in range(4)) > 0.87


def test_prompts_make_the_share_of_the_time_for_work_no_larger() -> None:
    """Rounds with prompts are long: what they allowed would mostly be spent in the rounds after them."""

    def num_readings(prompt_s: float) -> int:
        """Return how often the clock is read in 100 requests, the prompt of each of which takes *prompt_s*."""
        ticks, model = count(), RoundCostModel(warmed_up(flat), LIMIT + 1, 1, LIMIT)
        policy = AdaptivePolicy(LIMIT, ChainChooser(LIMIT), model, clock=lambda: 0.00005 * next(ticks))
        simulation, prompt = Simulation(policy, flat, cheap), RoundPlan(0, [Row(0, 0, 64, 64)])
        for _ in range(100):
            policy.begin_step([decoding(0)])
            policy.end_step(FinishedStep(prompt, [Verdict(0, (1,), 0, ())], 1, 0.0, prompt_s))
            simulation.run([0.9], 24)
        return next(ticks)

    assert num_readings(1.0) < 1.1 * num_readings(0.004)


@pytest.mark.parametrize(("seconds", "typical"), [([3, 9, 1, 2, 4, 8, 5], 4), ([5, 6], None)])
def test_the_last_idle_rounds_show_what_one_costs_by_their_median(seconds: list[int], typical: int | None) -> None:
    idle, running = IdleRounds(Pace()), [decoding(0)]
    idle.end(running)
    idle.start(learns=False)
    for one in seconds:
        idle.add(FinishedStep(RoundPlan(0, [Row(0, 1, 1, 2, 0)]), [], 1, 0.0, float(one)))
    idle.add(FinishedStep(RoundPlan(0, [Row(0, 64, 0, 2, 0)]), [], 1, 0.0, 100.0))  # reads a prompt
    assert (idle.typical and idle.typical.seconds) == typical


@pytest.mark.parametrize(
    ("name", "rate"), [("adaptive", 0.0), ("adaptive", 0.5), ("bandit", 0.0)], ids=["off", "on", "bandit"]
)
def test_plain_rounds_are_foreseen(name: str, rate: float) -> None:
    """Most of those that follow another one, also the few while speculation is on. One round in a hundred is not."""
    policy: AdaptivePolicy | BanditPolicy = BanditPolicy(LIMIT)
    if name == "adaptive":
        ticks, model = count(), RoundCostModel(warmed_up(flat), 8 * (LIMIT + 1), 8, LIMIT)
        policy = AdaptivePolicy(LIMIT, ChainChooser(LIMIT), model, clock=lambda: 0.00005 * next(ticks))
    simulation, begin, seen = Simulation(policy, flat, cheap), policy.begin_step, list[tuple[bool, bool]]()

    def begin_step(running: Seq[Sequence]) -> None:
        begin(running)
        seen.append((policy.stays_plain, policy.current == 0))

    with mock.patch.object(policy, "begin_step", begin_step):
        simulation.run([rate] * 8, 4000)
    pairs = list(pairwise(seen))
    following = [foreseen for (foreseen, is_plain), (_, is_next) in pairs if is_plain and is_next]
    assert len(following) > 8
    assert mean(following) > 0.8
    wrong = [not is_next for (foreseen, _), (_, is_next) in pairs if foreseen]
    assert mean(wrong) <= 0.01
