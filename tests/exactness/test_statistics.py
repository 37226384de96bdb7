"""The statistical tests themselves: exact samples pass, and deviations are detected with the stated power."""

import numpy as np
import pytest
from scipy import stats

from cluster.check.statistics import tv_bound
from tests.support.exactness.statistics import FALSE_ALARM, TV_FALSE_ALARM, Probs, chi_square, compare, joint, power

NUM_TESTS = 500
DICE = np.random.default_rng(5)
DISTRIBUTIONS = {
    "even": np.full(16, 1 / 16),
    "uneven": DICE.dirichlet(np.full(16, 0.3)),
    "with rare tokens": np.array([0.5, 0.3, 0.1999, *[1e-5] * 10]),
    "with impossible ones": np.array([0.25, 0.0, 0.75, 0.0]),
}


def draw(p_V: Probs, samples: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).multinomial(samples, p_V / p_V.sum())


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_exact_samples_pass_and_p_values_are_spread_evenly(name: str) -> None:
    found = [compare(draw(DISTRIBUTIONS[name], 5_000, seed)[None], DISTRIBUTIONS[name][None]) for seed in range(400)]
    assert not any(finding.is_wrong(NUM_TESTS) for finding in found)
    below = sum(finding.p_value < 0.1 for finding in found)
    assert stats.binomtest(below, len(found), 0.1).pvalue > 1e-6


def test_contexts_are_compared_each_with_its_own_distribution() -> None:
    p_CV = np.stack([DISTRIBUTIONS["even"], DISTRIBUTIONS["uneven"]])
    right = np.stack([draw(p_V, 5_000, 1) for p_V in p_CV])
    assert not compare(right, p_CV).is_wrong(NUM_TESTS)
    assert compare(right[::-1], p_CV).is_wrong(NUM_TESTS)
    assert compare(np.stack([right[0], 0 * right[1]]), p_CV).p_value == compare(right[:1], p_CV[:1]).p_value


def test_what_has_no_probability_is_never_forgiven() -> None:
    counts = np.array([[250_000, 0, 750_000, 0]])
    assert not compare(counts, DISTRIBUTIONS["with impossible ones"][None]).is_wrong(NUM_TESTS)
    counts[0, 1] += 1
    assert compare(counts, DISTRIBUTIONS["with impossible ones"][None]).p_value == 0.0


def test_chi_square_is_scipys_where_nothing_is_pooled() -> None:
    counts = draw(DISTRIBUTIONS["even"], 1_000, 3)
    expected = DISTRIBUTIONS["even"] * 1_000
    assert chi_square(counts[None], expected[None]) == pytest.approx(stats.chisquare(counts, expected).pvalue)


def test_the_bound_on_total_variation_is_the_published_one() -> None:
    assert tv_bound(32, 200_000, TV_FALSE_ALARM) == pytest.approx(0.0122, abs=5e-5)


def tilted(p_V: Probs, share: float) -> Probs:
    """Move *share* of the mass to the first token."""
    return (1 - share) * p_V + share * np.eye(len(p_V))[0]


@pytest.mark.parametrize(("share", "samples"), [(0.05, 20_000), (0.02, 100_000), (0.005, 1_000_000)])
def test_the_power_is_what_it_is_said_to_be(share: float, samples: int) -> None:
    p_V = DISTRIBUTIONS["even"]
    wrong = tilted(p_V, share)
    claimed = power(p_V, wrong, samples, NUM_TESTS)
    caught = [
        compare(draw(wrong, samples, seed)[None], p_V[None]).p_value <= FALSE_ALARM / NUM_TESTS for seed in range(200)
    ]
    assert stats.binomtest(sum(caught), len(caught), min(claimed, 1 - 1e-12)).pvalue > 1e-6


def test_power_grows_with_samples_and_is_the_false_alarm_rate_where_nothing_is_wrong() -> None:
    p_V = DISTRIBUTIONS["even"]
    found = [power(p_V, tilted(p_V, 0.01), samples, NUM_TESTS) for samples in (10_000, 100_000, 1_000_000)]
    assert found == sorted(found)
    assert found[0] < 0.01
    assert found[-1] > 0.99
    assert power(p_V, p_V, 10_000, NUM_TESTS) == pytest.approx(FALSE_ALARM / NUM_TESTS, rel=1e-3)


def test_total_variation_alone_misses_small_errors() -> None:
    """The reason for the second test."""
    p_V = DISTRIBUTIONS["even"]
    finding = compare(draw(tilted(p_V, 0.008), 200_000, 1)[None], p_V[None])
    assert finding.tv < finding.tv_bound
    assert finding.is_wrong(NUM_TESTS)


def test_the_distribution_of_whole_texts_is_the_product_along_each() -> None:
    first, second = np.array([[0.25, 0.75]]), np.array([[0.5, 0.5], [0.1, 0.9]])
    assert joint([first, second]).tolist() == pytest.approx([0.125, 0.125, 0.075, 0.675])
