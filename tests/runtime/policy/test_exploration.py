"""What the adaptive policy learns while speculation is on, and in which rounds."""

from itertools import pairwise
from statistics import mean

import pytest

from protos.messages import StepCosts
from runtime.policy.adaptive import AdaptivePolicy
from runtime.policy.choosers import ChainChooser
from runtime.policy.exploration import DOUBT_EVERY, EXPLORE_EVERY, EXPLORED_PLAIN, LOST, Exploration, loss
from runtime.policy.round_costs import RoundCostModel
from runtime.policy.switching import LEAST_TRIAL_SHARE, TRIAL_SHARE, Trials
from tests.support.policy_simulation import Simulation, best_fixed, cheap, flat, warmed_up

FULL = pytest.mark.full


class SlowAfterAnother:
    """What drafts of so many levels take, as measured with the demo pair: more in a round after one with fewer levels.

    In warm-up, only the seconds of one forward were measured.
    """

    target_S, draft_K = (0.0, 0.00204, 0.00203, 0.00214, 0.00219), (0.0, 0.00064, 0.00098, 0.00118)
    costs = StepCosts({1: 0.0021, 2: 0.00186, 4: 0.00193}, {1: 0.00031})

    def __init__(self, seed: int) -> None:
        policy = AdaptivePolicy(3, ChainChooser(3), RoundCostModel(self.costs, 4, 1, 3), clock=lambda: 0.0)
        self.simulation = Simulation(policy, self._target, self._draft, seed=seed)
        self._last = 0

    def _target(self, tokens: int) -> float:
        self._last = tokens - 1
        return self.target_S[tokens]

    def _draft(self, rows: int) -> float:
        k = max(self.simulation.ks)
        return (self.draft_K[k] + 0.00012 * (k - (self._last or k))) / max(1, k)

    def best(self, rate: float) -> float:
        """Return the tokens per second with the best K, for one row."""
        return max(
            sum(rate**i for i in range(k + 1)) / (self.target_S[k + 1] + self.draft_K[k]) / 1.05 for k in range(4)
        )


@pytest.mark.parametrize("rate", [pytest.param(0.5, marks=FULL), 0.6, pytest.param(0.7, marks=FULL)])
def test_what_another_number_of_draft_tokens_costs_is_learnt_from_several_rounds_and_remembered(rate: float) -> None:
    """A single round of three draft tokens amid rounds of two takes 4 % longer than one amid rounds of three."""
    shares = []
    for seed in range(4):
        engine = SlowAfterAnother(seed)
        engine.simulation.run([rate], 300)
        shares.append(engine.simulation.run([rate], 4000) / engine.best(rate))
    assert mean(shares) >= 0.98


class Clock:
    """Each call of it takes 50 us: the policy calls it in rounds in which it does something."""

    calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return 0.00005 * self.calls


@pytest.mark.parametrize("rate", [0.8, 0.0])
def test_in_most_rounds_it_does_nothing_and_still_misses_none(rate: float) -> None:
    """What rounds in between brought corrects the prediction, so a change of the text is noticed as soon."""
    clock = Clock()
    simulation = _adaptive(clock)
    simulation.run([rate], 400)
    num_busy = 0
    for _ in range(1000):
        before = clock.calls
        simulation.run([rate], 1)
        num_busy += clock.calls > before
    assert num_busy < 400
    speeds = [_after_a_change(rate, num_rounds) for num_rounds in range(1000, 1800, 200)]
    assert mean(speeds) >= 0.93 * best_fixed([0.8 - rate], flat, cheap)


def _adaptive(clock: Clock) -> Simulation:
    policy = AdaptivePolicy(8, ChainChooser(8), RoundCostModel(warmed_up(flat), 9, 1, 8), clock=clock)
    return Simulation(policy, flat, cheap)


def _after_a_change(rate: float, num_rounds: int) -> float:
    """Return the tokens per second soon after so many rounds at *rate*: how soon depends on when trials are."""
    simulation = _adaptive(Clock())
    simulation.run([rate], num_rounds)
    simulation.run([0.8 - rate], 300)
    return simulation.run([0.8 - rate], 1000)


@pytest.mark.parametrize("resumes", [True, False])
def test_rounds_that_bring_draft_tokens_back_in_vain_become_rarer(resumes: bool) -> None:
    trials, pauses = Trials(3), []
    for _ in range(4):
        pauses.append(1)
        while not trials.pay(1.0, resumes=resumes):
            trials.end_round(0.99)
            pauses[-1] += 1
    least = 1 / LEAST_TRIAL_SHARE if resumes else 1 / TRIAL_SHARE
    assert pauses[0] == pytest.approx(1 / TRIAL_SHARE, rel=0.05)
    assert pauses[-1] == pytest.approx(least, rel=0.05)
    trials.restore_share()
    trials.end_round(102.0)
    assert trials.pay(1.0, resumes=resumes)


def test_other_numbers_are_tried_in_turn_and_less_often_while_the_same_one_pays() -> None:
    exploration, tried, rounds = Exploration(range(1, 9)), [], []
    for number in range(3000):
        exploration.count(1, is_on=True)
        if exploration.is_due and (k := exploration.choose(4, gain=2.0)):
            exploration.begin(k)
            tried.append(k)
            rounds.append(number)
    gaps = [second - first for first, second in pairwise(rounds)]
    assert {2, 6} <= set(tried) and 4 not in tried
    assert all(first != second for first, second in pairwise(tried))
    assert gaps[0] >= EXPLORE_EVERY and gaps[-1] >= 4 * gaps[0]
    exploration.choose(5, gain=2.0)
    exploration.begin(3)
    exploration.count(2 * EXPLORE_EVERY, is_on=True)
    assert exploration.is_due, "another one pays"


def test_what_costs_too_much_at_first_is_tried_later_and_not_something_cheaper() -> None:
    exploration = Exploration(range(1, 9))
    exploration.count(EXPLORE_EVERY, is_on=True)
    wanted = exploration.choose(4, gain=2.0)
    for _ in range(5):
        assert not exploration.is_due
        exploration.count(DOUBT_EVERY, is_on=True)
        assert exploration.is_due and exploration.choose(4, gain=2.0) == wanted


def test_what_the_draft_worker_drafts_for_rows_that_it_does_not_draft_for_is_lost() -> None:
    """Of rounds in which half of the rows have looked-up drafts, and the others none, another number is no small part.

    Most of what it takes is then drafts of the worker, which were left out since they do not pay.
    """
    costs = RoundCostModel(warmed_up(flat), 64 * 9, 64, 8).of(8)
    all_s, other_s, plain_s = costs.uniform(8, 8), costs.uniform(4, 8), costs.plain()
    lost_s = [loss(4, 8, 8, costs, gain=1.2, catch_up_s=0.0, usual_s=usual_s) for usual_s in (all_s, plain_s)]
    assert lost_s == pytest.approx([LOST * (all_s - other_s), other_s - plain_s])


def test_only_sizes_whose_acceptance_is_measured_are_tried() -> None:
    """What a tree of five nodes brings says little of one of eight, as which it would count."""
    exploration, tried = Exploration([1, 2, 4, 8]), set[int]()
    for usual in (1, 2, 4, 8) * 100:
        exploration.count(1000, is_on=True)
        k = exploration.choose(usual, 1.1)
        exploration.begin(k)
        tried.add(k)
    assert tried == {0, 1, 2, 4, 8}


def test_draft_tokens_come_back_at_once_after_rounds_that_tried_none() -> None:
    """What the draft missed in them was part of what they cost. Later, other rounds have made it miss more."""
    exploration = Exploration(range(1, 9))
    exploration.begin(0)
    paid = []
    for _ in range(EXPLORED_PLAIN + 2):
        exploration.count(1, is_on=len(paid) < 2)  # it may be switched off meanwhile
        paid.append(exploration.paid)
    assert paid == [True] * (EXPLORED_PLAIN + 1) + [False]
    exploration.begin(3)
    assert not exploration.paid
