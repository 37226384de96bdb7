"""Each of seven mistakes patched into the engine is detected.

Power, from the mistakes' distributions; `power` computes how many tokens N after draft tokens are needed:

- A rule that accepts 2 % of the tokens to reject emits .98 p + .02 q, so lambda = N x 4e-4 x sum (q - p)^2 / p.
- One that resamples from p emits min(p, q) + TV p, with TV the total variation of p and q.
- A bonus from q has distribution q after fully accepted drafts.
- Shared noise, late penalties, a position key used twice and children that are not renormalized have no such formula;
  their effect is measured, and printed by the full form.

`test_the_power_of_the_suite` computes how many tokens detect the first three with probability 0.99 at the false-alarm
rate of the suite, 1e-6 over 500 tests: 2 % too lenient, 15,000 if a draft is certain of tokens that the target samples
rarely, 75,000 if both are unrelated, 3,000,000 if they nearly agree; resampling from p, 2,000 and 5,500; a bonus
from q, 300 and 1,200. The full matrix has 100,000 to 1,000,000 in each of these cells; the quick form takes 2,000 to
12,000 in the cell that shows a mistake best, with fixed seeds.
"""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.exactness.bugs import BUGS, LENIENCE, Bug
from tests.support.exactness.cells import CHAIN, OPTIONS, PAIRS, TREE, VOCAB, Cell
from tests.support.exactness.distribution import distribution
from tests.support.exactness.statistics import Probs, power

NUM_TESTS = 500
FULL, FULL_TEXTS = 100_000, 20_000


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_it_is_caught(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch, bug.cell)
    finding, _ = bug.cell.check(bug.quick)
    assert finding.is_wrong(NUM_TESTS), f"{bug.name} in {bug.cell}: {finding}"


@pytest.mark.full
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_it_is_caught_by_a_cell_of_the_matrix(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = bug.cell
    if isinstance(cell, Cell):
        cell = replace(cell, shape=CHAIN if cell.shape.width == 1 else TREE)
    bug.plant(monkeypatch, cell)
    finding, _ = cell.check(FULL if isinstance(cell, Cell) else FULL_TEXTS)
    print(f"{bug.name} in {cell}: {finding}")
    assert finding.is_wrong(NUM_TESTS)


@pytest.mark.full
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_it_is_the_mistake_that_is_caught(bug: Bug) -> None:
    finding, _ = bug.cell.check(bug.quick)
    assert not finding.is_wrong(NUM_TESTS), f"{bug.cell}: {finding}"


def pairs_of(name: str) -> list[tuple[Probs, Probs]]:
    """Return the distributions of target and draft after each token."""
    return [
        (distribution(OPTIONS["plain"], target_V, (), (0,)), distribution(OPTIONS["plain"], draft_V, (), (0,)))
        for target_V, draft_V in zip(*PAIRS[name], strict=True)
    ]


def wrong_distribution(mistake: str, p_V: Probs, q_V: Probs) -> Probs:
    """Return the distribution that is emitted instead of p."""
    if mistake == "accepts 2 % too often":
        return (1 - LENIENCE) * p_V + LENIENCE * q_V
    if mistake == "resamples from p":
        both_V = np.minimum(p_V, q_V)
        return both_V + (1 - both_V.sum()) * p_V
    return q_V


@pytest.mark.parametrize(
    ("mistake", "pair", "samples"),
    [
        ("accepts 2 % too often", "one-hot draft", 15_000),
        ("accepts 2 % too often", "opposite", 15_000),
        ("accepts 2 % too often", "unrelated", 75_000),
        ("accepts 2 % too often", "near", 3_000_000),
        ("resamples from p", "unrelated", 2_000),
        ("resamples from p", "near", 5_500),
        ("bonus from q", "unrelated", 300),
        ("bonus from q", "near", 1_200),
    ],
)
def test_the_power_of_the_suite(mistake: str, pair: str, samples: int) -> None:
    joint = np.concatenate([p_V for p_V, _ in pairs_of(pair)]) / VOCAB
    wrong = np.concatenate([wrong_distribution(mistake, p_V, q_V) for p_V, q_V in pairs_of(pair)]) / VOCAB
    found = power(joint, wrong, samples, NUM_TESTS)
    assert found > 0.99
