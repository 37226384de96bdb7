"""Whether sampled tokens have the law they should have: chi-square and total variation, prefix by prefix.

Answers to one prompt are a tree of counts. Behind a prefix of the answer the next tokens are independent draws of one
law, the target's, and that stays so for those of them that came there in one way, since how a position was reached is
settled before its token is drawn. (Not where a tree's shape, or what lookahead has learnt, depends on noise of
positions ahead; there the ways are not told apart.) So each such group of draws is a test, and so are all groups of one
way together.

Every verdict keeps to a false-alarm rate divided by `MAX_TESTS`, more than are ever made of one report (Bonferroni).
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
GROUPS_A_PLACE = 150  # three tests each; of six places, with a test of each place as a whole, under `MAX_TESTS`
LEAST_DRAWS = 20  # of a group that is worth a test: many small ones together find what none finds alone
LEAST_EXPECTED = 5.0  # draws in a cell of a chi-square test; ids with fewer are one cell
ANY_PLACE: Place = "any"


@dataclass(frozen=True)
class SampleGroup:
    """Draws of one law: what came behind *prefix* (output tokens) of prompt number *prompt*, reached by *place*.

    *drafted* of them were said in rounds with guesses.
    """

    prompt: int
    prefix: tuple[int, ...]
    place: Place
    counts: Mapping[int, int]
    drafted: int = 0

    @property
    def draws(self) -> int:
        """How many there are."""
        return sum(self.counts.values())


class DistributionTest(msgspec.Struct, frozen=True):
    """What one group of draws says of its law.

    `drafted` of its draws were said in rounds with guesses. `cells` counts ids with at least `LEAST_EXPECTED` expected
    draws, and the rest as one. `p_value` is that of chi-square; `rest_p_value` bounds the chance of so many draws in a
    rest too small to be a cell. `tv` is the distance of frequencies from the law over the cells, `tv_bound` what it may
    be; `least_tv` is the smallest error of the law, in total variation over the cells, that this chi-square test finds
    with 97 %. `token` is the id that is farthest off (-1: the rest), with how often it came and should have come.
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
    """All groups reached in one way together: the sum of their chi-squares, against the sum of their freedoms."""

    place: Place
    tokens: int
    tested: int
    groups: int
    chi_square: float
    freedom: int
    p_value: float
    passed: bool


class DistributionVerdict(msgspec.Struct, frozen=True):
    """Whether the law holds: it does if every group and every place passed. *limit* is what p-values are held to."""

    tests: tuple[DistributionTest, ...]
    places: tuple[PlaceTest, ...]
    false_alarm: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return all(test.passed for test in self.tests) and all(test.passed for test in self.places)


# Grouping.


def grouped(answers: Iterable[tuple[int, Answer]], *, by_place: bool = True) -> list[SampleGroup]:
    """Return the groups of *answers*, each with the number of its prompt, the shallowest and then the largest first.

    Without *by_place*, and where a draft was a tree, the ways in which a position was reached are not told apart.
    """
    known = list(answers)
    by_place = by_place and not any(answer.branched for _, answer in known)
    drafted: Counter[tuple[int, tuple[int, ...], Place]] = Counter()
    counts: defaultdict[tuple[int, tuple[int, ...], Place], Counter[int]] = defaultdict(Counter)
    for prompt, answer in known:
        for at, place in enumerate(places_of(answer.origins)):
            key = (prompt, answer.token_ids[:at], place if by_place else ANY_PLACE)
            counts[key][answer.token_ids[at]] += 1
            drafted[key] += answer.origins[at] != "plain"
    groups = [SampleGroup(*key, counter, drafted[key]) for key, counter in counts.items()]
    return sorted(groups, key=lambda group: (len(group.prefix), -group.draws, group.prompt, group.prefix))


def worth_testing(groups: Iterable[SampleGroup]) -> list[SampleGroup]:
    """Return the groups of enough draws, of each place the first `GROUPS_A_PLACE`.

    In the order of `grouped`: whether a group is tested then depends on what was drawn before it alone.
    """
    taken: Counter[Place] = Counter()
    kept = []
    for group in groups:
        if group.draws >= LEAST_DRAWS and taken[group.place] < GROUPS_A_PLACE:
            taken[group.place] += 1
            kept.append(group)
    return kept


def tempered(logprobs_V: Floats, temperature: float) -> Floats:
    """Return the law of what is sampled at *temperature* from log-probabilities: float64 `[V]`, which sum to 1."""
    weight_V: Floats = np.exp((logprobs_V - logprobs_V.max()) / temperature)
    law_V: Floats = weight_V / weight_V.sum()
    return law_V


# Tests.


def judged(group: SampleGroup, law_V: Floats, limit: float, tolerance: float = 0.0) -> tuple[DistributionTest, float]:
    """Test one group against its law; return the test and the statistic of the likelihood ratio.

    Args:
        group: the draws.
        law_V: float64, the probability of each id.
        limit: what each p-value is held to.
        tolerance: how far, relatively, the law's own probabilities may be off, because they were computed in half
            precision: counts within that are taken as expected.
    """
    cells = _cells(group, law_V)
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
    """Counts and expectations by cell; of the rest, which may be too small for a cell of its own, apart."""

    ids: Seq[int]
    seen_C: Floats
    expected_C: Floats
    rest_seen: int
    rest_mass: float

    @property
    def farthest(self) -> tuple[int, int, float]:
        """Return the cell that is farthest off: id (-1: the rest), how often it came, how often it should have."""
        far_C = (self.seen_C - self.expected_C) ** 2 / self.expected_C
        at = int(far_C.argmax())
        return self.ids[at], int(self.seen_C[at]), float(self.expected_C[at])


def _cells(group: SampleGroup, law_V: Floats) -> _Cells:
    draws = group.draws
    large = np.flatnonzero(law_V * draws >= LEAST_EXPECTED)
    ids = [int(token) for token in large[np.argsort(-law_V[large], kind="stable")]]
    seen = [float(group.counts.get(token, 0)) for token in ids]
    expected = [float(law_V[token]) * draws for token in ids]
    rest_seen = draws - int(sum(seen))
    rest_mass = float(np.delete(law_V, large).sum())
    if rest_mass * draws >= LEAST_EXPECTED or not ids:
        ids, seen, expected = [*ids, -1], [*seen, float(rest_seen)], [*expected, rest_mass * draws]
    else:  # the smallest cell takes it in
        seen[-1] += rest_seen
        expected[-1] += rest_mass * draws
    return _Cells(ids, np.array(seen), np.array(expected), rest_seen, rest_mass)


def judge(
    groups: Seq[SampleGroup],
    laws: Iterable[Floats],
    false_alarm: float,
    tolerance: float = 0.0,
    tokens: Mapping[Place, int] | None = None,
) -> DistributionVerdict:
    """Test *groups*, each against its law, and all of one place together.

    Args:
        groups: as `worth_testing` gives them.
        laws: float64 `[V]` each, in the order of the groups; may be made as they are asked for.
        false_alarm: the chance that anything is found where nothing is wrong.
        tolerance: see `judged`.
        tokens: how many tokens were sampled at each place, tested or not.
    """
    limit = false_alarm / MAX_TESTS
    tested = [judged(group, law_V, limit, tolerance) for group, law_V in zip(groups, laws, strict=True)]
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
