"""The cost curve: what one size shows of another, alone and in simulated worlds whose costs are noisy or change."""

import math
import random
from statistics import mean

import pytest

from protos.messages import StepCosts
from runtime.policy.adaptive import AdaptivePolicy
from runtime.policy.choosers import ChainChooser
from runtime.policy.cost_model import CostCurve
from runtime.policy.round_costs import RoundCostModel
from tests.support.policy_simulation import LIMIT, SIZES, Seconds, Simulation, best_fixed, fixed_rate


def run(curve: CostCurve, size: int, seconds: float, rounds: int) -> None:
    for _ in range(rounds):
        curve.observe(size, seconds)


def test_a_size_is_in_doubt_when_others_have_changed_and_few_rounds_settle_it() -> None:
    curve = CostCurve({1: 0.004, 2: 0.005}, 8)
    run(curve, 1, 0.004, 100)
    run(curve, 2, 0.005, 100)
    assert not curve.is_in_doubt(1)
    run(curve, 2, 0.0065, 50)
    assert curve.is_in_doubt(1)
    assert curve.at(1) > 1.08 * 0.004, "the machine may have become slower for all sizes"
    run(curve, 1, 0.004, 3)
    assert not curve.is_in_doubt(1)
    assert 0.98 < curve.at(1) / 0.004 < 1.04
    assert 0.97 < curve.at(2) / 0.0065 < 1.03


def test_a_size_that_is_run_all_the_time_is_never_in_doubt() -> None:
    curve = CostCurve({1: 0.004}, 8)
    for seconds in (0.004, 0.006, 0.003):
        for _ in range(100):
            curve.observe(1, seconds)
            assert not curve.is_in_doubt(1)


def test_that_a_size_is_slow_is_forgotten_and_that_it_is_fast_is_not() -> None:
    left = []
    for seconds in (0.0025, 0.0016):
        curve = CostCurve({1: 0.002, 8: 0.002}, 8)
        run(curve, 8, 0.002, 100)
        run(curve, 1, seconds, 20)
        curve.age(0.8)  # what was run since the last time stays
        before = math.log(curve.at(1) / curve.at(8))
        for _ in range(5):
            curve.age(0.8)
        left.append(math.log(curve.at(1) / curve.at(8)) / before)
    slow, fast = left
    assert 0.5 < slow < 0.6 and fast == 1


def test_a_machine_that_became_slower_is_slower_at_sizes_that_are_not_run() -> None:
    """While speculation is off, plain rounds alone show it. Draft tokens must not seem to pay for that."""
    curve = CostCurve({64: 0.006, 128: 0.0065}, 256)
    run(curve, 64, 0.006, 100)
    run(curve, 128, 0.0065, 8)
    for _ in range(30):
        curve.observe(64, 1.5 * 0.006, num_rounds=5)
    assert curve.at(64) == pytest.approx(1.5 * 0.006, rel=0.03)
    assert curve.at(128) == pytest.approx(1.5 * 0.0065, rel=0.06)


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_what_few_noisy_rounds_show_of_a_size_is_right_on_average(noise: float) -> None:
    found = []
    for seed in range(200):
        rng, curve = random.Random(seed), CostCurve({1: 0.004, 2: 0.005}, 8)
        run(curve, 1, 0.004, 32)
        for _ in range(8):
            curve.observe(2, 0.005 * math.exp(rng.gauss(0, noise)))
        found.append(math.log(curve.at(2) / 0.005))
    assert abs(mean(found)) < 0.3 * noise


def test_rounds_that_are_shown_together_count_beside_single_ones() -> None:
    curve = CostCurve({1: 0.011, 4: 0.011}, 8)
    run(curve, 1, 0.011, 100)
    curve.observe(4, 0.02)
    curve.observe(4, 0.02, num_rounds=5)
    run(curve, 4, 0.011, 1)
    run(curve, 4, 0.02, 1)
    assert curve.at(4) > 0.016, "most rounds took 0.02"


def test_disturbed_rounds_of_one_size_do_not_make_others_ever_slower() -> None:
    """The seconds of other sizes follow those of the size that is run, and no more."""
    rng, curve = random.Random(0), CostCurve({1: 0.004, 8: 0.006}, 8)
    run(curve, 1, 0.004, 32)
    ratios = []
    for _ in range(4000):
        disturbed = 10 if rng.random() < 0.01 else 1
        curve.observe(8, 0.006 * math.exp(rng.gauss(0, 0.3)) * disturbed)
        ratios.append(curve.at(1) / curve.at(8) / (0.004 / 0.006))
    assert 0.8 < min(ratios[-1000:]) <= max(ratios[-1000:]) < 1.25


def world(target: Seconds, draft: Seconds, seed: int = 0) -> tuple[Simulation, Seconds, Seconds]:
    """Return an engine whose steps vary by a tenth, and what they take without the noise."""
    rng = random.Random(seed)
    costs = StepCosts({size: target(size) for size in SIZES}, {size: draft(size) for size in SIZES[:7]})
    model = RoundCostModel(costs, 64 * (LIMIT + 1), 64, LIMIT)
    policy = AdaptivePolicy(LIMIT, ChainChooser(LIMIT), model, clock=lambda: 0.0)

    def noisy(seconds: Seconds) -> Seconds:
        return lambda size: seconds(size) * math.exp(rng.gauss(0, 0.1))

    return Simulation(policy, noisy(target), noisy(draft), noise=0.0, seed=seed), target, draft


def small_linear(tokens: int) -> float:
    return 0.0019 + 0.0001 * tokens


def small_draft(rows: int) -> float:
    return 0.00035 + 0.00002 * rows


def gpu(tokens: int) -> float:
    """A step that reads weights, and computes from 192 tokens on."""
    return max(0.0055 + 0.000008 * tokens, 0.007 * tokens / 192)


def gpu_draft(rows: int) -> float:
    return 0.0007 + 0.000002 * rows


def test_noise_does_not_lead_away_from_the_best_k() -> None:
    """Three draft tokens pay best. What six and more cost seemed ever less beside sizes that were not run."""
    shares = []
    for seed in range(3):
        simulation, *costs = world(small_linear, small_draft, seed)
        simulation.run([0.9] * 8, 100)
        shares.append(simulation.run([0.9] * 8, 500) / best_fixed([0.9] * 8, *costs) / 1.05)
    assert mean(shares) >= 0.97


def test_a_machine_that_becomes_slower_does_not_switch_it_on() -> None:
    simulation, target, draft = world(gpu, gpu_draft)
    rates = [0.2] * 64
    simulation.run(rates, 300)
    before, fast = sum(simulation.policy.changes.values()), simulation.target
    simulation.target = lambda tokens: 1.5 * fast(tokens)
    plain = 1.05 / 1.5 * fixed_rate(0, rates, target, draft)
    assert simulation.run(rates, 400) >= 0.98 * plain
    assert sum(simulation.policy.changes.values()) - before <= 1
