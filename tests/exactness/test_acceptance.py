"""The formulas and claims of `benchmarks.acceptance`, against explicit sums and rules proved by enumeration."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.acceptance import AcceptanceRow, Sample
from benchmarks.shared import workload
from benchmarks.shared.measure import Floats
from benchmarks.shared.recorded import TRIALS, match_probability, mean_accepted
from demo import pair
from workers.verification import rejection_math as rules


def distributions(seed: int, size: int = 40) -> Floats:
    return np.random.default_rng(seed).dirichlet(np.full(size, 0.2), 6) + 1e-12


def test_the_workload_of_all_benchmarks_can_be_loaded() -> None:
    found = workload.load(pair()[0], 2)
    assert [len(items) for items in (found.single, found.concurrent, found.editing)] == [2, 2, 2]


def written_out(p_V: Floats, q_V: Floats) -> float:
    return sum(1 / sum(max(p_V[j] / p_V[i], q_V[j] / q_V[i]) for j in range(len(p_V))) for i in range(len(p_V)))


def test_the_match_probability_is_the_double_sum() -> None:
    p_TV, q_TV = distributions(1), distributions(2)
    assert match_probability(p_TV, q_TV) == pytest.approx([written_out(*pair) for pair in zip(p_TV, q_TV, strict=True)])
    assert match_probability(p_TV, p_TV) == pytest.approx(np.ones(6))


def test_shared_noise_keeps_less_than_the_optimum_and_more_than_its_bound() -> None:
    p_TV, q_TV = distributions(3), distributions(4)
    optimal_T = np.minimum(p_TV, q_TV).sum(1)
    found_T = match_probability(p_TV, q_TV)
    assert (found_T < optimal_T).all()
    assert (found_T > optimal_T / (2 - optimal_T)).all()  # (1 - D) / (1 + D)


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_chains_are_accepted_as_often_as_their_probabilities_state(rule: str) -> None:
    p_L, q_L = np.array([0.2, 0.5]), np.array([0.8, 0.2])
    chains = rules.ChainBatch(
        np.full(2000, 1), np.tile(p_L, (2000, 1, 1)), np.tile(q_L, (2000, 1, 1)), np.zeros((2000, 1), np.int64)
    )
    spread = 5 * np.sqrt(0.25 * 0.75 / (2000 * TRIALS))
    assert mean_accepted(chains, rule, 3) == pytest.approx(0.25, abs=spread)


GOOD = Sample(0.6, 0.6, 0.75, 0.4, 0.62, 0.65, 1.5, 1.6)


def line(**changed: float) -> AcceptanceRow:
    return AcceptanceRow.of(1.0, [replace(GOOD, **changed)] * 3)


def test_claims_that_hold_are_not_complained_of() -> None:
    assert line().failures() == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"coupled": 0.61}, "formula"),
        ({"coupled": 0.59}, "formula"),
        ({"greedy": 0.61}, "greedy"),
        ({"standard": 0.72}, "less than standard"),
        ({"optimal": 0.72}, "sum min"),
        ({"block_chain": 1.4}, "block"),
        ({"two_coupled": 0.61}, "two coupled"),
    ],
)
def test_a_claim_that_fails_is_named(changed: dict[str, float], said: str) -> None:
    failures = line(**changed).failures()
    assert len(failures) == 1
    assert said in failures[0]


def test_cold_drafts_may_be_greedy() -> None:
    assert AcceptanceRow.of(0.3, [replace(GOOD, greedy=0.61)] * 3).failures() == []
