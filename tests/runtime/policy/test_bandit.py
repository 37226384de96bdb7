"""The bandit policy against a simulated engine: it finds the K that pays without knowing costs or acceptance."""

import pytest

from runtime.policy.bandit import PLAY_ROUNDS, BanditPolicy
from tests.support.policy_simulation import LIMIT, Seconds, Simulation, best_fixed, cheap, flat, steep


def bandit(target: Seconds) -> Simulation:
    return Simulation(BanditPolicy(LIMIT), target, cheap)


@pytest.mark.parametrize("target", [flat, steep])
@pytest.mark.parametrize("rate", [0.0, 0.6, 0.95])
@pytest.mark.parametrize("num_rows", [1, 8])
def test_it_finds_a_k_that_pays(rate: float, num_rows: int, target: Seconds) -> None:
    simulation = bandit(target)
    rates = [rate] * num_rows
    simulation.run(rates, 1000)
    assert simulation.run(rates, 2000) >= 0.9 * best_fixed(rates, target, cheap)


def test_every_k_of_the_ladder_is_played_and_bad_ones_are_played_less() -> None:
    simulation = bandit(steep)
    played = []
    for _ in range(200):
        simulation.run([0.0], PLAY_ROUNDS)
        played.append(simulation.policy.current)
    assert set(played) == {0, 1, 2, 4, 8}
    assert played[100:].count(0) > 70
    assert simulation.policy.predicted_speedup is not None


def test_each_batch_size_learns_for_itself() -> None:
    simulation = bandit(steep)
    cheap_rows, dear_rows = [0.95], [0.1] * 16
    for _ in range(6):
        simulation.run(cheap_rows, 400)
        simulation.run(dear_rows, 400)
    assert simulation.run(cheap_rows, 400) >= 0.85 * best_fixed(cheap_rows, steep, cheap)
    assert simulation.run(dear_rows, 400) >= 0.85 * best_fixed(dear_rows, steep, cheap)
