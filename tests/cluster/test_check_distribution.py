"""Tests of sampled distributions: against scipy, on exact samples, and on distributions that are off by a given amount.

All samples have fixed seeds; each sampling test states a bound on its false alarms.
"""

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from cluster.check import distribution, statistics
from cluster.check.answers import Answer, Place

Floats = npt.NDArray[np.float64]
LIMIT = 1e-6 / distribution.MAX_TESTS
QUICK = settings(max_examples=40, deadline=None, derandomize=True)


def zipf(size: int, power: float = 1.0) -> Floats:
    weights = 1.0 / np.arange(1, size + 1) ** power
    return weights / weights.sum()


def off_by(size: int, distance: float) -> tuple[Floats, Floats]:
    """Return a uniform distribution, and one at that total variation with the least chi-square distance: 4 D^2."""
    even = np.full(size, 1.0 / size)
    return even, even + np.where(np.arange(size) % 2, 1, -1) * 2 * distance / size


def group(
    counts: npt.NDArray[np.int64], prefix: tuple[int, ...] = (), place: Place = "guess"
) -> distribution.SampleGroup:
    return distribution.SampleGroup(0, prefix, place, {i: int(count) for i, count in enumerate(counts) if count})


def drawn(truth: Floats, draws: int, seed: int, prefix: tuple[int, ...] = ()) -> distribution.SampleGroup:
    return group(np.random.default_rng(seed).multinomial(draws, truth), prefix)


# Statistics.


@QUICK
@given(st.floats(0.0, 900.0), st.integers(1, 400))
def test_tails_are_those_of_scipy(statistic: float, freedom: int) -> None:
    assert statistics.chi_square_tail(statistic, freedom) == pytest.approx(stats.chi2.sf(statistic, freedom), rel=1e-6)


@QUICK
@given(st.floats(1e-14, 0.5), st.integers(1, 4000))
def test_quantiles_are_those_of_scipy(p_value: float, freedom: int) -> None:
    assert statistics.chi_square_quantile(p_value, freedom) == pytest.approx(stats.chi2.isf(p_value, freedom), rel=1e-6)


def test_deviances_are_those_of_scipy() -> None:
    expected = zipf(12) * 500
    seen = np.random.default_rng(0).multinomial(500, zipf(12)).astype(float)
    seen[3], seen[4] = 0.0, seen[3] + seen[4]
    pearson, likelihood = statistics.deviance(seen, expected)
    assert pearson == pytest.approx(stats.chisquare(seen, expected).statistic)
    assert likelihood == pytest.approx(stats.power_divergence(seen, expected, lambda_="log-likelihood").statistic)


@QUICK
@given(st.integers(0, 60), st.integers(60, 5000), st.floats(1e-9, 0.05))
def test_the_tail_of_the_rest_is_never_below_the_binomial_one(count: int, draws: int, mass: float) -> None:
    bound = statistics.rest_tail(count, draws, mass)
    assert bound * (1 + 1e-9) >= stats.binom.sf(count - 1, draws, mass)
    assert bound <= 1.0


def test_the_bound_of_total_variation_is_the_protocols() -> None:
    assert statistics.tv_bound(32, 200_000, 1e-9) == pytest.approx(0.0122, abs=5e-5)


# False alarms.


@pytest.mark.parametrize("truth", [zipf(300), np.random.default_rng(5).dirichlet(np.full(200, 0.1))])
def test_p_values_of_exact_samples_are_never_too_small(truth: Floats) -> None:
    """1,500 samples each: more than 41 p-values under 1 % (15 are expected) have a probability below 1e-7."""
    rng = np.random.default_rng(11)
    tests = [distribution.evaluate(group(counts), truth, LIMIT)[0] for counts in rng.multinomial(200, truth, size=1500)]
    assert all(test.passed for test in tests)
    assert sum(test.p_value < 0.01 for test in tests) <= 41


@QUICK
@given(st.integers(2, 300), st.floats(0.05, 3.0), st.integers(20, 5000), st.integers(0, 2**32))
def test_exact_samples_pass(size: int, spread: float, draws: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth = rng.dirichlet(np.full(size, spread))
    verdict = distribution.verdict_of([group(rng.multinomial(draws, truth))], [truth], 1e-6)
    assert verdict.passed
    (test,) = verdict.tests
    assert test.draws == draws
    assert (test.freedom == 0) == (test.cells == 1)


# Power.


@pytest.mark.parametrize(("size", "draws"), [(4, 400), (10, 1000), (40, 4000)])
def test_a_distribution_that_is_off_by_the_stated_amount_is_found(size: int, draws: int) -> None:
    """97 % is stated; fewer than 276 of 300 samples (92 %) are detected with a probability of about 1e-6."""
    distance = statistics.least_tv(size - 1, draws, LIMIT)
    assert distance < 0.5
    even, off = off_by(size, distance)
    found = sum(not distribution.evaluate(drawn(off, draws, seed), even, LIMIT)[0].passed for seed in range(300))
    assert found >= 276
    assert distribution.evaluate(drawn(even, draws, 1), even, LIMIT)[0].least_tv == distance


@QUICK
@given(st.integers(2, 60), st.integers(1, 30), st.integers(0, 2**32))
def test_a_distribution_that_is_far_off_is_found(size: int, times: int, seed: int) -> None:
    """A deviation of 1.5 times the one detected with 97 % is missed with a probability below 1e-9 per sample."""
    draws = 200 * size * times
    distance = 1.5 * statistics.least_tv(size - 1, draws, LIMIT)
    even, off = off_by(2 * (size // 2), distance)
    test, _ = distribution.evaluate(drawn(off, draws, seed), even, LIMIT)
    assert distance < 0.5
    assert not test.passed


def test_small_errors_are_found_together_where_none_is_alone() -> None:
    even, off = off_by(10, 0.06)
    groups = [drawn(off, 400, seed, (seed,)) for seed in range(120)]
    verdict = distribution.verdict_of(groups, [even] * len(groups), 1e-6)
    assert all(test.passed for test in verdict.tests)
    assert [(place.place, place.passed) for place in verdict.places] == [("guess", False)]
    assert not verdict.passed
    fair = distribution.verdict_of([drawn(even, 400, seed, (seed,)) for seed in range(120)], [even] * 120, 1e-6)
    assert fair.passed


def test_strays_of_a_nearly_certain_token_are_found() -> None:
    """If all ids but one are too unlikely for a cell there is no chi-square; the tail test of the rest detects it."""
    truth = np.append(0.999, np.full(50, 0.001 / 50))
    off = np.append(0.96, np.full(50, 0.04 / 50))
    test, _ = distribution.evaluate(drawn(off, 1000, 0), truth, LIMIT)
    assert (test.freedom, test.passed) == (0, False)
    assert test.rest_p_value < LIMIT
    assert distribution.evaluate(drawn(truth, 1000, 0), truth, LIMIT)[0].passed


def test_an_impossible_token_is_found_at_once() -> None:
    truth = np.array([0.5, 0.5, 0.0])
    assert not distribution.evaluate(group(np.array([500, 499, 1])), truth, LIMIT)[0].passed


def test_the_worst_id_is_named() -> None:
    truth = np.array([0.4, 0.3, 0.2, 0.1])
    test, _ = distribution.evaluate(group(np.array([400, 300, 60, 240])), truth, LIMIT)
    assert not test.passed
    assert (test.token, test.seen, test.expected) == (3, 240, pytest.approx(100))
    assert test.tv == pytest.approx(0.14)


def test_half_precision_is_given_its_tolerance_and_no_more() -> None:
    even, off = off_by(8, 0.015)  # each id is off by 3 %
    sample = drawn(off, 400_000, 3)
    assert not distribution.evaluate(sample, even, LIMIT)[0].passed
    assert distribution.evaluate(sample, even, LIMIT, tolerance=0.05)[0].passed
    assert not distribution.evaluate(drawn(off_by(8, 0.05)[1], 400_000, 3), even, LIMIT, tolerance=0.05)[0].passed


def test_what_half_precision_hides_is_not_claimed_to_be_found() -> None:
    """Samples off by the stated amount are detected with 97 %: fewer than 17 of 20 have a probability of 0.4 %."""
    for tolerance in (0.05, 0.3):
        distance = statistics.least_tv(7, 20_000, LIMIT, tolerance)
        assert distance > statistics.least_tv(7, 20_000, LIMIT) + tolerance / 2
        even, off = off_by(8, distance)
        tests = [distribution.evaluate(drawn(off, 20_000, seed), even, LIMIT, tolerance)[0] for seed in range(20)]
        assert all(test.least_tv == distance for test in tests)
        assert sum(not test.passed for test in tests) >= 17


# Groups.


def test_draws_of_lookahead_are_not_split_by_place() -> None:
    answers = [(0, Answer((5, 6), ("accepted", "bonus"), "length")), (0, Answer((5, 7), ("plain", "plain"), "length"))]
    groups = {(g.prefix, g.place): (g.draws, g.drafted) for g in distribution.group_samples(answers, by_place=False)}
    assert groups == {((), "any"): (2, 1), ((5,), "any"): (2, 1)}


def test_draws_are_grouped_by_prompt_prefix_and_place() -> None:
    round_of_three = Answer((5, 6, 7, 8), ("accepted", "accepted", "bonus", "plain"), "length")
    corrected = Answer((5, 9, 7), ("accepted", "correction", "correction"), "length")
    groups = {
        (g.prompt, g.prefix, g.place): dict(g.counts)
        for g in distribution.group_samples([(0, round_of_three), (0, corrected), (1, corrected)])
    }
    assert groups == {
        (0, (), "prompt"): {5: 2},
        (0, (5,), "guess"): {6: 1, 9: 1},
        (0, (5, 6), "draft"): {7: 1},
        (0, (5, 9), "correction"): {7: 1},
        (0, (5, 6, 7), "bonus"): {8: 1},
        (1, (), "prompt"): {5: 1},
        (1, (5,), "guess"): {9: 1},
        (1, (5, 9), "correction"): {7: 1},
    }


def test_draws_of_trees_are_not_split_by_place() -> None:
    """The shape of a tree, and so which tokens are accepted, may depend on the noise of later positions."""
    chain = Answer((5, 6), ("accepted", "correction"), "length")
    tree = Answer((5, 7), ("plain", "plain"), "length", has_tree=True)
    groups = distribution.group_samples([(0, chain), (0, tree)])
    assert [(g.prefix, g.place, dict(g.counts)) for g in groups] == [((), "any", {5: 2}), ((5,), "any", {6: 1, 7: 1})]


def test_the_shallowest_groups_of_enough_draws_are_tested() -> None:
    few, many = {1: distribution.LEAST_DRAWS - 1}, {1: distribution.LEAST_DRAWS}
    groups = [distribution.SampleGroup(0, (i,), "guess", many) for i in range(distribution.GROUPS_PER_PLACE + 5)]
    groups += [distribution.SampleGroup(0, (0, i), "bonus", few if i else many) for i in range(3)]
    kept = distribution.select_groups(groups)
    assert [g.prefix for g in kept] == [(i,) for i in range(distribution.GROUPS_PER_PLACE)] + [(0, 0)]
    most = 3 * 6 * distribution.GROUPS_PER_PLACE + 6  # six places: with "any" there is no other
    assert most <= distribution.MAX_TESTS


def test_places_without_a_test_are_reported() -> None:
    even = np.full(4, 0.25)
    verdict = distribution.verdict_of([drawn(even, 400, 0)], [even], 1e-6, tokens={"guess": 400, "bonus": 7})
    assert [(p.place, p.tokens, p.tested, p.groups, p.passed) for p in verdict.places] == [
        ("guess", 400, 400, 1, True),
        ("bonus", 7, 0, 0, True),
    ]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_probabilities_are_tempered_as_logits_are(temperature: float) -> None:
    logits = np.random.default_rng(2).normal(size=50)
    wanted = np.exp(logits / temperature)
    logprobs_V = logits - math.log(np.exp(logits).sum())
    assert distribution.probs_at(logprobs_V, temperature) == pytest.approx(wanted / wanted.sum())
