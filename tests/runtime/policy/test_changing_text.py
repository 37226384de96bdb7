"""The adaptive policy while the text changes, on a simulated engine in which two requests hardly pay for a draft."""

from statistics import mean

from protos.messages import StepCosts
from runtime.policy.adaptive import AdaptivePolicy
from runtime.policy.choosers import ChainChooser
from runtime.policy.round_costs import RoundCostModel
from tests.support.policy_simulation import SIZES, Simulation, fixed_rate

LIMIT, SEEDS = 3, 8
PREDICTABLE, RANDOM = [0.65] * 2, [0.3] * 2
"""Acceptance of both requests. One draft token pays, or none: 16 % more tokens per second in the best case."""
ROUNDS = 430


def target(tokens: int) -> float:
    return 0.0017 + 0.00033 * tokens


def draft(rows: int) -> float:
    return 0.0003 + 0.00003 * rows


COSTS = StepCosts({size: target(size) for size in SIZES}, {size: draft(size) for size in SIZES[:7]})


def best(rates: list[float]) -> float:
    return max(fixed_rate(k, rates, target, draft) for k in range(LIMIT + 1))


def shares(seed: int) -> list[float]:
    """Return which part of the tokens per second of the best K a new policy has in each of three phases."""
    policy = AdaptivePolicy(
        LIMIT, ChainChooser(LIMIT), RoundCostModel(COSTS, 64 * (LIMIT + 1), 64, LIMIT), clock=lambda: 0.0
    )
    simulation = Simulation(policy, target, draft, seed=seed)
    simulation.run(PREDICTABLE, 200)
    return [simulation.run(rates, ROUNDS) / best(rates) for rates in (PREDICTABLE, RANDOM, PREDICTABLE)]


def test_it_comes_back_in_time_to_gain() -> None:
    """Trials of two draft tokens, which cost three times as much and so come later, have 0.88 in the last phase."""
    phases = [mean(phase) for phase in zip(*map(shares, range(SEEDS)), strict=True)]
    assert phases[0] >= 0.98
    assert phases[1] >= 0.96
    assert phases[2] >= 0.92
