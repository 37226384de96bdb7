"""Early stop under every rule: the joint distribution of whole texts is the target's.

Drafts end by their tokens' own probabilities, as with `assistant_confidence_threshold`. All tests of this file together
raise a false alarm with probability 1e-6 at most. Quick: 1,500 texts a cell, as in `test_sequences`; full: 20,000.
"""

from itertools import product

import pytest

from protos.draft import Draft, DraftRow
from tests.support.exactness.engine import Shape
from tests.support.exactness.texts import SAMPLINGS, Texts
from workers.draft.worker import DraftWorker

RULES = ("coupled", "standard", "block")
CHAIN = Shape(4)
THRESHOLD = 0.5
NUM_TESTS = 30
"""A bound on the number of tests, quick and full together."""
QUICK, FULL = 1_500, 20_000

EVERY = [Texts(*cell) for cell in product(RULES, (CHAIN,), SAMPLINGS, ("good", "bad"))]
SOME = [
    Texts("coupled", CHAIN, "limits"),
    Texts("standard", CHAIN, "plain", "bad"),
    Texts("block", CHAIN, "penalties", "bad"),
]


def check(cell: Texts, count: int) -> None:
    world = cell.world.stopping(THRESHOLD)
    finding, accepted = cell.check(count, world)
    assert not finding.is_wrong(NUM_TESTS), f"{cell}: {finding}"
    assert 0 < accepted < 1


@pytest.mark.parametrize("cell", SOME, ids=str)
def test_whole_texts(cell: Texts) -> None:
    check(cell, QUICK)


@pytest.mark.full
@pytest.mark.parametrize("cell", EVERY, ids=str)
def test_whole_texts_in_full(cell: Texts) -> None:
    check(cell, FULL)


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_leaving_out_the_token_that_ended_the_chain_would_be_noticed(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    propose = DraftWorker.propose

    def leaving_out(self: DraftWorker, proposer: object, rows: list[DraftRow]) -> list[Draft]:
        pairs = zip(propose(self, proposer, rows), rows, strict=True)  # type: ignore[arg-type]
        return [draft if len(draft) == row.k else draft.first(len(draft) - 1) for draft, row in pairs]

    cell = Texts(rule, CHAIN, "plain", "bad")
    monkeypatch.setattr(DraftWorker, "propose", leaving_out)
    finding, _ = cell.check(QUICK, cell.world.stopping(THRESHOLD))
    assert finding.is_wrong(NUM_TESTS), str(finding)


def test_there_are_no_more_tests_than_were_allowed_for() -> None:
    assert len(SOME) + len(EVERY) <= NUM_TESTS
