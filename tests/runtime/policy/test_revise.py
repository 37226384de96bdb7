"""New costs of steps while serving: policies go by them, and keep what they learnt."""

import itertools
from collections.abc import Sequence

import pytest

from protos.config.engine import EngineConfig, ModelConfig, SpeculativeConfig
from protos.messages import StepCosts
from runtime.policy.acceptance import DecodingRow
from runtime.policy.adaptive import AdaptivePolicy
from runtime.policy.allocation import Allocation
from runtime.policy.bandit import BanditPolicy
from runtime.policy.base import Policy
from runtime.policy.batch_size import BatchSizePolicy, derive_threshold
from runtime.policy.choosers import ChainChooser
from runtime.policy.cost_model import RoundCosts
from runtime.policy.factory import make_policy
from runtime.policy.round_costs import RoundCostModel
from tests.support.policy_simulation import LIMIT, Simulation, best_fixed, cheap, flat, steep, warmed_up
from tests.support.scheduling import decoding

FLAT, STEEP = warmed_up(flat), warmed_up(steep)


def adaptive() -> Simulation:
    model = RoundCostModel(None, 64 * (LIMIT + 1), 64, LIMIT)
    return Simulation(AdaptivePolicy(LIMIT, ChainChooser(LIMIT), model, clock=lambda: 0.0), steep, cheap)


def made(name: str) -> Policy:
    speculative = SpeculativeConfig("any", num_speculative_tokens=4, policy=name)
    return make_policy(EngineConfig(ModelConfig("m"), speculative=speculative), STEEP)[0]


def test_the_adaptive_policy_keeps_acceptance_and_its_state() -> None:
    simulation = adaptive()
    simulation.run([0.0], 1500)
    assert simulation.policy.changes == {"does_not_pay": 1}
    simulation.target = flat
    simulation.policy.revise(FLAT)
    simulation.run([0.0], 1)
    assert simulation.ks == [0], "a draft that was never right would be assumed to be"
    assert simulation.policy.changes == {"does_not_pay": 1}


def test_the_adaptive_policy_goes_by_the_new_costs() -> None:
    simulation = adaptive()
    simulation.run([0.6], 500)
    assert simulation.policy.predicted_speedup == pytest.approx(1.0)
    simulation.target = flat
    simulation.policy.revise(FLAT)
    simulation.run([0.6], 20)
    assert simulation.policy.predicted_speedup > 1.2
    simulation.run([0.6], 100)
    assert simulation.run([0.6], 1000) > 0.95 * best_fixed([0.6], flat, cheap)


class CountingChooser(ChainChooser):
    """Counts decisions."""

    count = 0

    def choose(self, rows: Sequence[DecodingRow], costs: RoundCosts) -> Allocation:
        self.count += 1
        return super().choose(rows, costs)


def test_the_next_round_is_decided_anew_also_where_nothing_was_to_do() -> None:
    """A decision takes 0.1 ms, which most rounds do without while speculation is off."""
    chooser, calls = CountingChooser(LIMIT), itertools.count()
    model = RoundCostModel(STEEP, 64 * (LIMIT + 1), 64, LIMIT)
    policy = AdaptivePolicy(LIMIT, chooser, model, clock=lambda: 0.0001 * next(calls))
    simulation = Simulation(policy, steep, cheap)
    simulation.run([0.0], 1500)
    for _ in range(5):
        before = chooser.count
        while chooser.count == before or simulation.ks[0]:  # a trial ends with a decision
            simulation.run([0.0], 1)
        before = chooser.count
        simulation.run([0.0], 8)
        assert chooser.count == before
        policy.revise(STEEP)
        simulation.run([0.0], 1)
        assert chooser.count == before + 1


def test_a_derived_threshold_is_derived_again() -> None:
    policy, limit = made("threshold"), derive_threshold(FLAT, 4, 64)
    assert limit is not None
    assert limit > 4
    run(policy, rows=4, steps=1)
    assert (policy.current, policy.changes) == (0, {"batch_size_rose": 1})
    policy.revise(FLAT)
    run(policy, rows=4, steps=16)
    assert (policy.current, policy.changes) == (4, {"batch_size_rose": 1, "batch_size_fell": 1})
    run(policy, rows=limit + 1, steps=1)
    assert policy.current == 0


def run(policy: Policy, rows: int, steps: int) -> None:
    for _ in range(steps):
        policy.begin_step([decoding(key) for key in range(rows)])


@pytest.mark.parametrize("options", [{"disable_by_batch_size": 3}, {"policy": "fixed"}])
def test_what_the_user_set_stands(options: dict[str, object]) -> None:
    speculative = SpeculativeConfig("any", num_speculative_tokens=4, **options)  # type: ignore[arg-type]
    policy, _ = make_policy(EngineConfig(ModelConfig("m"), speculative=speculative), None)
    assert isinstance(policy, BatchSizePolicy)
    policy.revise(STEEP)
    run(policy, rows=3, steps=1)
    assert policy.current == 4


def test_the_bandit_plays_again_at_another_speed() -> None:
    simulation = Simulation(BanditPolicy(LIMIT), lambda tokens: 10 * steep(tokens), cheap)
    simulation.run([0.6], 2000)
    changes = sum(simulation.policy.changes.values())
    simulation.target = flat
    simulation.policy.revise(FLAT)
    simulation.run([0.6], 300)
    assert simulation.run([0.6], 500) > 0.9 * best_fixed([0.6], flat, cheap)
    assert sum(simulation.policy.changes.values()) > changes


def test_the_least_survival_is_that_of_the_new_speed() -> None:
    speculative = SpeculativeConfig(
        "draft_model",
        model="m",
        num_speculative_tokens=LIMIT,
        assistant_confidence_threshold="auto",
        policy="fixed",
    )
    policy, _ = make_policy(EngineConfig(ModelConfig("m"), speculative=speculative), None)
    simulation = Simulation(policy, lambda tokens: 0.010, cheap)
    simulation.run([0.6], 200)
    slow = policy.least_survival
    simulation.target = lambda tokens: 0.001
    policy.revise(StepCosts({1: 0.001, 64: 0.001}, {1: cheap(1)}))
    simulation.run([0.6], 5)
    assert policy.least_survival > 2 * slow
