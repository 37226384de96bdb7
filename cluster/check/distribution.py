"""Tests whether sampled tokens follow the target's distribution: chi-square and total variation, prefix by prefix.

After a given prefix of the answer, the next tokens are independent draws from one distribution, the target's. This
still holds for the draws at one `Place`, because the place is determined before the token is drawn. (It does not hold
if a tree's shape, or what lookahead has learnt, depends on the noise of later positions; those draws are not split by
place.) Each such group of draws is a test, and so are all groups of one place together.

Each test is held to the false-alarm rate divided by `MAX_TESTS`, an upper bound on their number (Bonferroni).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import msgspec
import numpy as np

from cluster.check.answers import Answer, Place, places_of
from cluster.check.statistics import Floats, chi_square_tail, deviance, least_tv, rest_tail, tv_bound

MAX_TESTS = 3000
GROUPS_PER_PLACE = 150
"""Three tests each at six places, and one test of each place as a whole, stay under `MAX_TESTS`."""
LEAST_DRAWS = 20
"""Smaller groups are not tested. Groups of this size detect little alone, but more together."""
LEAST_EXPECTED = 5.0
"""Expected draws in a cell of a chi-square test; ids with fewer share one cell."""
ANY_PLACE: Place = "any"


@dataclass(frozen=True)
class SampleGroup:
    """Draws from one distribution: the tokens after *prefix* (output tokens) of prompt number *prompt*, at *place*.

    *counts* maps token id to count. *drafted* draws were made in rounds with a draft.
    """

    prompt: int
    prefix: tuple[int, ...]
    place: Place
    counts: Mapping[int, int]
    drafted: int = 0

    @property
    def draws(self) -> int:
        """Number of draws."""
        return sum(self.counts.values())


class DistributionTest(msgspec.Struct, frozen=True):
    """The test of one group of draws.

    Attributes:
        drafted: draws made in rounds with a draft.
        cells: ids with at least `LEAST_EXPECTED` expected draws, plus one for the rest.
        p_value: of chi-square.
        rest_p_value: bounds the probability of so many draws in a rest too small to be a cell.
        tv: total variation between frequencies and probabilities, over the cells.
        tv_bound: the most that `tv` may be.
        least_tv: the smallest total variation that this chi-square test detects with a probability of 97 %.
        token: the id that is farthest off (-1: the rest), with its `seen` and `expected` counts.
    """

    prompt: int
    prefix: tuple[int, ...]
    place: Place
    draws: int
    drafted: int
    cells: int
    chi_square: float
    freedom: int
    p_value: float
    rest_p_value: float
    tv: float
    tv_bound: float
    least_tv: float
    token: int
    seen: int
    expected: float
    passed: bool


class PlaceTest(msgspec.Struct, frozen=True):
    """All groups of one place together: the sum of their chi-squares, against the sum of their degrees of freedom."""

    place: Place
    tokens: int
    tested: int
    groups: int
    chi_square: float
    freedom: int
    p_value: float
    passed: bool


class DistributionVerdict(msgspec.Struct, frozen=True):
    """All tests of a report. *limit* is the p-value below which a test fails."""

    tests: tuple[DistributionTest, ...]
    places: tuple[PlaceTest, ...]
    false_alarm: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether every group and every place passed."""
        return all(test.passed for test in self.tests) and all(test.passed for test in self.places)


# Grouping.


def group_samples(answers: Iterable[tuple[int, Answer]], *, by_place: bool = True) -> list[SampleGroup]:
    """Group the tokens of *answers*, pairs of a prompt's number and an answer; shortest prefix, then largest, first.

    Without *by_place*, or if any draft was a tree, all draws are grouped under the place "any".
    """
    known = list(answers)
    by_place = by_place and not any(answer.has_tree for _, answer in known)
    drafted: Counter[tuple[int, tuple[int, ...], Place]] = Counter()
    counts: defaultdict[tuple[int, tuple[int, ...], Place], Counter[int]] = defaultdict(Counter)
    for prompt, answer in known:
        for at, place in enumerate(places_of(answer.origins)):
            key = (prompt, answer.token_ids[:at], place if by_place else ANY_PLACE)
            counts[key][answer.token_ids[at]] += 1
            drafted[key] += answer.origins[at] != "plain"
    groups = [SampleGroup(*key, counter, drafted[key]) for key, counter in counts.items()]
    return sorted(groups, key=lambda group: (len(group.prefix), -group.draws, group.prompt, group.prefix))


def select_groups(groups: Iterable[SampleGroup]) -> list[SampleGroup]:
    """Return the groups with enough draws, the first `GROUPS_PER_PLACE` of each place.

    In the order of `group_samples`, whether a group is tested depends only on draws at earlier positions.
    """
    taken: Counter[Place] = Counter()
    kept = []
    for group in groups:
        if group.draws >= LEAST_DRAWS and taken[group.place] < GROUPS_PER_PLACE:
            taken[group.place] += 1
            kept.append(group)
    return kept


def probs_at(logprobs_V: Floats, temperature: float) -> Floats:
    """Return the probabilities of sampling at *temperature* from log-probabilities: float64 `[V]`, which sum to 1."""
    weight_V: Floats = np.exp((logprobs_V - logprobs_V.max()) / temperature)
    probs_V: Floats = weight_V / weight_V.sum()
    return probs_V


# Tests.


def evaluate(
    group: SampleGroup, probs_V: Floats, limit: float, tolerance: float = 0.0
) -> tuple[DistributionTest, float]:
    """Test one group against its distribution; return the test and the likelihood-ratio statistic.

    Args:
        group: the draws.
        probs_V: float64, the probability of each id.
        limit: the p-value below which the test fails.
        tolerance: relative error of the probabilities (from half precision); counts within it are taken as expected.
    """
    cells = _cells(group, probs_V)
    expected_C = np.clip(cells.seen_C, cells.expected_C * (1 - tolerance), cells.expected_C * (1 + tolerance))
    pearson, likelihood = deviance(cells.seen_C, expected_C)
    freedom = len(expected_C) - 1
    p_value = chi_square_tail(max(0.0, min(pearson, likelihood)), freedom) if freedom else 1.0
    rest_p = rest_tail(cells.rest_seen, group.draws, min(1.0, cells.rest_mass * (1 + tolerance)))
    tv = float(np.abs(cells.seen_C - expected_C).sum()) / (2 * group.draws)
    bound = tv_bound(len(expected_C), group.draws, limit)
    token, seen, expected = cells.farthest
    test = DistributionTest(
        group.prompt,
        group.prefix,
        group.place,
        group.draws,
        group.drafted,
        len(expected_C),
        pearson,
        freedom,
        p_value,
        rest_p,
        tv,
        bound,
        least_tv(freedom, group.draws, limit, tolerance),
        token,
        seen,
        expected,
        passed=p_value >= limit and rest_p >= limit and tv <= bound,
    )
    return test, likelihood


@dataclass(frozen=True)
class _Cells:
    """Observed and expected counts by cell, and of the rest, which may be too small for a cell of its own."""

    ids: Seq[int]
    seen_C: Floats
    expected_C: Floats
    rest_seen: int
    rest_mass: float

    @property
    def farthest(self) -> tuple[int, int, float]:
        """Return the cell that is farthest off: id (-1: the rest), observed count, expected count."""
        far_C = (self.seen_C - self.expected_C) ** 2 / self.expected_C
        at = int(far_C.argmax())
        return self.ids[at], int(self.seen_C[at]), float(self.expected_C[at])


def _cells(group: SampleGroup, probs_V: Floats) -> _Cells:
    draws = group.draws
    large = np.flatnonzero(probs_V * draws >= LEAST_EXPECTED)
    ids = [int(token) for token in large[np.argsort(-probs_V[large], kind="stable")]]
    seen = [float(group.counts.get(token, 0)) for token in ids]
    expected = [float(probs_V[token]) * draws for token in ids]
    rest_seen = draws - int(sum(seen))
    rest_mass = float(np.delete(probs_V, large).sum())
    if rest_mass * draws >= LEAST_EXPECTED or not ids:
        ids, seen, expected = [*ids, -1], [*seen, float(rest_seen)], [*expected, rest_mass * draws]
    else:  # the rest joins the smallest cell
        seen[-1] += rest_seen
        expected[-1] += rest_mass * draws
    return _Cells(ids, np.array(seen), np.array(expected), rest_seen, rest_mass)


def verdict_of(
    groups: Seq[SampleGroup],
    probs: Iterable[Floats],
    false_alarm: float,
    tolerance: float = 0.0,
    tokens: Mapping[Place, int] | None = None,
) -> DistributionVerdict:
    """Test *groups*, each against its distribution, and all groups of one place together.

    Args:
        groups: from `select_groups`.
        probs: float64 `[V]` each, in the order of the groups; may be a generator.
        false_alarm: the probability that any test fails although nothing is wrong.
        tolerance: see `evaluate`.
        tokens: number of tokens sampled at each place, tested or not.
    """
    limit = false_alarm / MAX_TESTS
    tested = [evaluate(group, probs_V, limit, tolerance) for group, probs_V in zip(groups, probs, strict=True)]
    by_place: defaultdict[Place, list[tuple[DistributionTest, float]]] = defaultdict(list)
    for test, likelihood in tested:
        by_place[test.place].append((test, likelihood))
    sampled = dict(tokens or dict.fromkeys(by_place, 0))
    places = tuple(_whole(place, by_place[place], sampled[place], limit) for place in sampled)
    return DistributionVerdict(tuple(test for test, _ in tested), places, false_alarm, limit)


def _whole(place: Place, tested: Seq[tuple[DistributionTest, float]], tokens: int, limit: float) -> PlaceTest:
    chi_square = sum(test.chi_square for test, _ in tested)
    freedom = sum(test.freedom for test, _ in tested)
    smaller = min(chi_square, sum(likelihood for _, likelihood in tested))
    p_value = chi_square_tail(smaller, freedom) if freedom else 1.0
    draws = sum(test.draws for test, _ in tested)
    return PlaceTest(place, tokens, draws, len(tested), chi_square, freedom, p_value, p_value >= limit)
