"""A draft on another machine: what the policies make of the time that plans and tables are under way."""

from functools import partial
from itertools import count, pairwise

import pytest

from protos.config.engine import SpeculativeConfig
from protos.messages import RoundPlan, Row, StepCosts
from runtime.policy.adaptive import AdaptivePolicy
from runtime.policy.base import FinishedStep
from runtime.policy.batch_size import WAY_ROUNDS, BatchSizePolicy, with_threshold
from runtime.policy.choosers import ChainChooser
from runtime.policy.round_costs import RoundCostModel
from runtime.policy.switching import LEAST_TRIAL_SHARE, TRIAL_SHARE, Trials
from tests.support.policy_simulation import LIMIT, Seconds, Simulation, cheap, fixed_rate, flat, warmed_up
from tests.support.scheduling import decoding

WAYS_S = [0.002, 0.01, 0.04]
"""There and back, with 1, 5 and 20 ms between the machines."""


def large(tokens: int) -> float:
    """A step of a large target."""
    return 0.06 + 0.0002 * tokens


def adaptive(costs: StepCosts) -> AdaptivePolicy:
    model = RoundCostModel(costs, 64 * (LIMIT + 1), 64, LIMIT)
    return AdaptivePolicy(LIMIT, ChainChooser(LIMIT), model, clock=lambda: 0.0)


def best_with_way(rates: list[float], target: Seconds, way_s: float) -> float:
    """Return the highest tokens per second of any K that is the same in all rounds."""

    def draft_of(k: int) -> Seconds:
        return lambda rows: cheap(rows) + (way_s / k if k else 0.0)

    return max(fixed_rate(k, rates, target, draft_of(k)) for k in range(LIMIT + 1))


@pytest.mark.parametrize("way_s", WAYS_S)
@pytest.mark.parametrize("target", [flat, large])
@pytest.mark.parametrize("rate", [0.2, 0.9])
def test_the_adaptive_policy_is_never_slower_than_no_draft(way_s: float, target: Seconds, rate: float) -> None:
    """It knows only the costs without the way; those with it are learnt while serving."""
    rates = [rate] * 2
    simulation = Simulation(adaptive(warmed_up(target)), target, cheap, way=way_s)
    simulation.run(rates, 400)
    found = simulation.run(rates, 800)
    assert found >= 0.97 * fixed_rate(0, rates, target, cheap)
    assert found >= 0.85 * best_with_way(rates, target, way_s)


def small(tokens: int) -> float:
    """A step of a small target: 40 ms are worth thirty of them."""
    return 0.0012 + 0.00003 * tokens


@pytest.mark.parametrize("way_s", WAYS_S)
@pytest.mark.parametrize("target", [small, flat])
@pytest.mark.parametrize("rate", [0.2, pytest.param(0.6, marks=pytest.mark.full)])
def test_trials_of_a_far_draft_take_their_share_of_the_time_only(way_s: float, target: Seconds, rate: float) -> None:
    simulation = Simulation(adaptive(warmed_up(target)), target, cheap, way=way_s)
    simulation.run([rate], 400)
    assert simulation.run([rate], 4000) >= 0.985 * fixed_rate(0, [rate], target, cheap)


def test_trials_that_change_nothing_become_rarer() -> None:
    """Losses of trials are counted in full: six rounds of 42 ms are saved for in full, too."""
    trials = Trials(limit=64)
    began = [0]
    for number in range(200_000):
        if len(began) == 5:
            trials.restore_share()
        if not trials.is_running and trials.start_if_due(6 * 0.04):
            began.append(number)
        trials.end_round(0.042 if trials.is_running else 0.002, 0.04, 0.002)
    gaps = [second - first for first, second in pairwise(began)]
    shares = [6 * 0.04 / (gap * 0.002) for gap in gaps]
    expected = [TRIAL_SHARE, TRIAL_SHARE / 2, LEAST_TRIAL_SHARE, LEAST_TRIAL_SHARE, TRIAL_SHARE]
    assert shares[:5] == pytest.approx(expected, rel=0.1)


def test_what_a_trial_lost_counts_as_much_with_more_rows_and_less_with_fewer() -> None:
    """The draft's round takes about as long for one row as for thirty. Trials of thirty would never come."""
    rounds = {}
    for num_rows in (2, 4, 12):
        trials = Trials(limit=5)
        assert trials.start_if_due(0.0, num_rows=4)
        while trials.is_running:
            trials.end_round(0.006, 0.004, 0.002)
        starts = (trials.end_round(0.002) or trials.start_if_due(0.0, num_rows=num_rows) for _ in count())
        rounds[num_rows] = next(number for number, is_started in enumerate(starts) if is_started)
    assert rounds[2] < rounds[4] == rounds[12]


def test_trials_take_more_of_the_time_again_with_many_more_rows_or_fewer() -> None:
    shares = {}
    for num_rows in (8, 20, 32, 2):
        trials = Trials(limit=5)
        for _ in range(3):
            while not trials.start_if_due(0.0, num_rows=8):
                trials.end_round(0.002)
            while trials.is_running:
                trials.end_round(0.006, 0.004, 0.002)
        trials.start_if_due(1.0, num_rows=num_rows)
        before = trials._saved_s
        trials.end_round(0.002)
        shares[num_rows] = (trials._saved_s - before) / 0.002
    least, most = pytest.approx(LEAST_TRIAL_SHARE), pytest.approx(TRIAL_SHARE)
    assert shares == {8: least, 20: least, 32: most, 2: most}


def test_a_trial_ends_when_no_draft_could_make_up_for_what_it_loses() -> None:
    trials = Trials(limit=5)
    assert trials.start_if_due(0.0)
    assert [trials.end_round(0.042, 0.04, 0.002) for _ in range(3)] == [False, False, True]
    assert not trials.is_running


@pytest.mark.parametrize("lost_s", [[0.004] * 5 + [0.9], [0.9] + [0.004] * 5])
def test_one_disturbed_round_does_not_put_off_the_next_trial(lost_s: list[float]) -> None:
    trials = Trials(limit=5)
    assert trials.start_if_due(0.0)
    for one_s in lost_s:
        trials.end_round(0.002 + one_s, one_s, 0.002)
    assert not trials.is_running
    rounds = next(number for number in range(100_000) if trials.end_round(0.002) or trials.start_if_due(0.01))
    usual_s = 5 * 0.004 + 2 * 0.004  # the disturbed round counts as twice the others
    assert rounds * 0.002 * LEAST_TRIAL_SHARE < 1.1 * 2 * usual_s, "what the trial lost, and as much for the next one"


def test_the_first_rounds_end_early_where_drafts_lose_much() -> None:
    """All of them would lose 42 times 40 ms."""
    lost_s = {}
    for way_s in (0.0, *WAYS_S):
        simulation = Simulation(adaptive(warmed_up(flat)), flat, cheap, way=way_s)
        simulation.run([0.6], 48)
        lost_s[way_s] = simulation.seconds - simulation.num_tokens / fixed_rate(0, [0.6], flat, cheap)
    assert lost_s[0.0] < 0.0
    assert max(lost_s.values()) < 100 * flat(1)


@pytest.mark.parametrize("skipped", [0.5, 0.8])
@pytest.mark.parametrize("way_s", WAYS_S[1:])
@pytest.mark.parametrize("target", [small, flat])
def test_rounds_that_do_not_wait_for_late_drafts_do_not_make_them_cheap(
    target: Seconds, way_s: float, skipped: float
) -> None:
    simulation = Simulation(adaptive(warmed_up(target)), target, cheap, way=way_s, skipped=skipped)
    simulation.run([0.6], 400)
    assert simulation.run([0.6], 1500) >= 0.97 * fixed_rate(0, [0.6], target, cheap)


def test_a_long_way_pays_for_a_large_target_only() -> None:
    for target, pays in ((flat, False), (large, True)):
        simulation = Simulation(adaptive(warmed_up(target)), target, cheap, way=0.04)
        simulation.run([0.9] * 2, 800)
        assert (simulation.policy.predicted_speedup > 1.2) == pays  # type: ignore[operator]


COSTS = StepCosts(
    {size: 0.004 + 0.0002 * max(0, size - 32) for size in (1, 32, 64, 128, 256, 512)},
    dict.fromkeys((1, 8, 64), 0.0002),
)


def threshold() -> BatchSizePolicy:
    config = SpeculativeConfig(method="draft_model", num_speculative_tokens=5)
    derive = partial(with_threshold, config, max_rows=64)
    return BatchSizePolicy(derive(COSTS)[0], derive, COSTS)


def serve(policy: BatchSizePolicy, num_rows: int, way_s: float, *, num_skipped: int = 0) -> int:
    """Run twice as many rounds as the way is the median of, each before *num_skipped* that do not wait; return K."""
    rows = [decoding(key) for key in range(num_rows)]
    for _ in range(2 * WAY_ROUNDS):
        policy.begin_step(rows)
        k = policy.current
        draft_s = k * 0.0002 + (way_s if k else 0.0)
        plan = RoundPlan(0, [Row(key, 1, 1, 2, k) for key in range(num_rows)])
        policy.end_step(FinishedStep(plan, [], num_rows, draft_s, 0.01 + draft_s))
        for _ in range(num_skipped):
            policy.end_step(FinishedStep(plan, [], num_rows, 0.0, 0.01))
    policy.begin_step(rows)
    return policy.current


def test_the_threshold_follows_the_measured_way() -> None:
    assert serve(threshold(), 8, 0.0) == 5
    ks = [[serve(threshold(), rows, way_s) for rows in (1, 2, 8)] for way_s in (0.001, *WAYS_S)]
    assert ks[0] == [5, 5, 5]
    assert ks[-1] == [5, 0, 0], "a single request always has drafts"
    assert sorted(ks, reverse=True) == ks


def test_the_threshold_does_not_follow_rounds_that_did_not_wait() -> None:
    assert serve(threshold(), 8, 0.04, num_skipped=3) == 0


def test_the_threshold_comes_back_when_the_way_is_short_again() -> None:
    policy = threshold()
    assert serve(policy, 8, 0.04) == 0
    assert serve(policy, 1, 0.0) == 5
    assert serve(policy, 8, 0.0) == 5


def test_a_threshold_of_the_user_stays() -> None:
    config = SpeculativeConfig(method="draft_model", num_speculative_tokens=5, disable_by_batch_size=20)
    policy = BatchSizePolicy(config, partial(with_threshold, config, max_rows=64), COSTS)
    assert serve(policy, 12, 0.04) == 5


@pytest.mark.parametrize(("num_rows", "share"), [(64, 1.0), (20, 20 / 64)])
def test_what_a_trial_lost_is_expected_for_each_row(num_rows: int, share: float) -> None:
    trials = Trials(limit=5)
    assert trials.start_if_due(0.0, num_rows=64)
    while trials.is_running:
        trials.end_round(0.012, 0.01, 0.002)
    num_rounds = next(n for n in range(100_000) if trials.end_round(0.002) or trials.start_if_due(0.0, 0.0, num_rows))
    needed_s = 6 * 0.01 * (1 + share)  # what it lost, and as much for those rows
    assert num_rounds * 0.002 * LEAST_TRIAL_SHARE <= needed_s <= 1.01 * num_rounds * 0.002 * TRIAL_SHARE / 2
    assert not trials.has_gained
