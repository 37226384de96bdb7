"""Token level: every acceptance rule, sampling option and adversarial pair, through the engine's own rounds.

Chi-square of each token given what came before it, and the total-variation bound
(`tests.support.exactness.statistics`). All tests of this file together raise a false alarm with probability 1e-6 at
most; each cell has its own fixed seeds. The full form takes 1,000,000 tokens of every rule and pair in chains, 100,000
in trees and of every length, and 40,000 of every option: the rules themselves are proved by enumeration
(`tests/workers/verification/test_rejection_math.py`), so only their wiring is left to test, where mistakes are large.
The quick one takes each option, pair and length once, of the rules and shapes in turn, with 1,500 tokens, and detects
changes of 10 %; 1,000,000 detect 0.3 %. `tests/exactness/test_bugs.py` computes the power against typical mistakes.
"""

from itertools import cycle, product

import pytest

from tests.support.exactness.cells import CHAIN, OPTIONS, PAIRS, TREE, Cell
from tests.support.exactness.engine import Shape

RULES = ("coupled", "standard", "block")
FORMS = tuple(product(RULES, (CHAIN, TREE)))
LENGTHS = (1, 2, 4, 8, 16)
WIDE = Shape(14, 3, 3)
NUM_TESTS = 500
"""More than there are, quick and full together."""
QUICK, FULL_OPTIONS, FULL, DEEP = 1_500, 40_000, 100_000, 1_000_000


def _option(rule: str, shape: Shape, option: str) -> Cell:
    return Cell(rule, option, "near", shape)


def _pair(rule: str, shape: Shape, pair: str) -> Cell:
    return Cell(rule, "plain", pair, shape)


def _every() -> list[Cell]:
    """Return the matrix."""
    cells = [_option(*form, option) for form, option in product(FORMS, OPTIONS)]
    cells += [_pair(*form, pair) for form, pair in product(FORMS, PAIRS) if pair != "near"]
    cells += [_pair(rule, Shape(k), pair) for rule, k, pair in product(RULES, LENGTHS, ("near", "same", "unrelated"))]
    return cells + [_pair(rule, WIDE, pair) for rule, pair in product(RULES, ("near", "overlapping"))]


def _some() -> list[Cell]:
    """Return a part of the matrix in which everything is once."""
    forms = cycle(FORMS)
    cells = [_option(*form, option) for option, form in zip(OPTIONS, forms, strict=False)]
    cells += [_pair(*form, pair) for pair, form in zip(PAIRS, forms, strict=False)]
    return cells + [_pair(rule, Shape(k), "near") for k, rule in zip(LENGTHS, cycle(RULES), strict=False)]


def check(cell: Cell, tokens: int) -> None:
    finding, emitted = cell.check(tokens)
    assert not finding.is_wrong(NUM_TESTS), f"{cell}: {finding}"
    assert emitted.proposed >= emitted.accepted
    assert emitted.proposed > 0
    assert emitted.accepted > 0 or cell.pair == "disjoint"
    assert emitted.accepted < emitted.proposed or _always_agree(cell)


def _always_agree(cell: Cell) -> bool:
    """Whether every guess of a chain may be right; a tree has branches, of which one is."""
    return cell.shape.width == 1 and (cell.pair in {"same", "near ties"} or cell.option == "greedy")


@pytest.mark.parametrize("cell", _some(), ids=str)
def test_each_once(cell: Cell) -> None:
    check(cell, QUICK)


@pytest.mark.full
@pytest.mark.parametrize("cell", _every(), ids=str)
def test_the_whole_matrix(cell: Cell) -> None:
    of_pair = DEEP if cell.shape == CHAIN else FULL
    check(cell, of_pair if cell.option == "plain" else FULL_OPTIONS)


def test_there_are_no_more_tests_than_were_allowed_for() -> None:
    assert len(_some()) + len(_every()) <= NUM_TESTS
