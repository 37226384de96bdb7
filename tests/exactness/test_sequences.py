"""Sequence level: the joint distribution of whole texts, 256 outcomes, of an exactly solvable language.

Each token's distribution depends on all of the text before, and with penalties on the counts of tokens, so that a
wrong condition after a rejection, a wrong bonus token or a stale cache entry moves the joint distribution. First by
rounds alone, then through controller and scheduler with every fault of `tests.support.exactness.faults` at once. All
tests of this file together raise a false alarm with probability 1e-6 at most. Quick: 1,500 texts a cell, 700 with
faults, which detect a total variation of some 15 % between joint distributions; full: 20,000 and 8,000, which detect 4
and 7 %.
"""

import logging
from itertools import product

import pytest

from tests.support.exactness.engine import Shape
from tests.support.exactness.texts import DRAFTS, SAMPLINGS, Texts

RULES = ("coupled", "standard", "block")
CHAIN, TREE, WIDE = Shape(3), Shape(5, 2, 2), Shape(9, 3, 2)
NUM_TESTS = 300
"""A bound on the number of tests, quick and full together."""
QUICK, FULL = 1_500, 20_000
LIVES, MANY_LIVES = 700, 8_000

EVERY = [Texts(*cell) for cell in product(RULES, (CHAIN, TREE, WIDE), SAMPLINGS, DRAFTS)]
EVERY += [Texts(*cell) for cell in product(RULES, (Shape(1), Shape(2)), ("plain",), DRAFTS)]
EVERY_LIFE = [Texts(*cell) for cell in product(RULES, (CHAIN, TREE), SAMPLINGS, ("good", "bad"))]
SOME = [
    Texts("coupled", TREE, "penalties"),
    Texts("standard", CHAIN, "penalties"),
    Texts("block", TREE, "limits", "bad"),
]
SOME_LIVES = [Texts("coupled", CHAIN, "limits"), Texts("standard", TREE, "penalties"), Texts("block", CHAIN, "plain")]


def check(cell: Texts, count: int) -> None:
    finding, accepted = cell.check(count)
    assert not finding.is_wrong(NUM_TESTS), f"{cell}: {finding}"
    assert 0 < accepted < 1


def check_lives(cell: Texts, count: int) -> None:
    finding, lives = cell.check_lives(count)
    assert not finding.is_wrong(NUM_TESTS), f"{cell}: {finding}"
    lives.assert_eventful()


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Injected faults are logged with tracebacks."""
    caplog.set_level(logging.CRITICAL)


@pytest.mark.parametrize("cell", SOME, ids=str)
def test_whole_texts(cell: Texts) -> None:
    check(cell, QUICK)


@pytest.mark.full
@pytest.mark.parametrize("cell", EVERY, ids=str)
def test_whole_texts_in_full(cell: Texts) -> None:
    check(cell, FULL)


@pytest.mark.parametrize("cell", SOME_LIVES, ids=str)
def test_whole_texts_whatever_happens(cell: Texts) -> None:
    check_lives(cell, LIVES)


@pytest.mark.full
@pytest.mark.parametrize("cell", EVERY_LIFE, ids=str)
def test_whole_texts_whatever_happens_in_full(cell: Texts) -> None:
    check_lives(cell, MANY_LIVES)


def test_there_are_no_more_tests_than_were_allowed_for() -> None:
    assert len(SOME) + len(SOME_LIVES) + len(EVERY) + len(EVERY_LIFE) <= NUM_TESTS
