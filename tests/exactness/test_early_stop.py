"""Early stop under every rule: the joint distribution of whole texts is the target's.

Drafts end by their tokens' own probabilities, as with `assistant_confidence_threshold`. All tests of this file together
raise a false alarm with probability 1e-6 at most. Quick: 1,500 texts a cell, as in `test_sequences`; full: 20,000.
"""

from itertools import product

import pytest

from protos.draft import Draft, DraftRow
from tests.support.exactness.engine import Shape, run_rows
from tests.support.exactness.texts import LENGTH, PROMPT, SAMPLINGS, Texts
from workers.draft.worker import DraftWorker

RULES = ("coupled", "standard", "block")
CHAIN = Shape(4)
THRESHOLD = 0.5
NUM_TESTS = 60
"""A bound on the number of tests, quick and full together."""
QUICK, FULL = 1_500, 20_000

Stop = tuple[float | str, float]
FIXED, LEARNT = (THRESHOLD, 0.0), ("auto", 0.4)
"""A threshold, and the least survival of a draft token with which it pays."""
EVERY = [
    (Texts(*cell), stop) for stop in (FIXED, LEARNT) for cell in product(RULES, (CHAIN,), SAMPLINGS, ("good", "bad"))
]
SOME = [
    (Texts("coupled", CHAIN, "limits"), FIXED),
    (Texts("standard", CHAIN, "plain", "bad"), FIXED),
    (Texts("block", CHAIN, "penalties", "bad"), FIXED),
    (Texts("standard", CHAIN, "penalties"), LEARNT),
    (Texts("block", CHAIN, "limits", "bad"), LEARNT),
]


def check(cell: Texts, stop: Stop, count: int) -> None:
    finding, accepted = cell.check(count, cell.world.stopping(*stop))
    assert not finding.is_wrong(NUM_TESTS), f"{cell}: {finding}"
    assert 0 < accepted < 1


@pytest.mark.parametrize(("cell", "stop"), SOME, ids=str)
def test_whole_texts(cell: Texts, stop: Stop) -> None:
    check(cell, stop, QUICK)


@pytest.mark.full
@pytest.mark.parametrize(("cell", "stop"), EVERY, ids=str)
def test_whole_texts_in_full(cell: Texts, stop: Stop) -> None:
    check(cell, stop, FULL)


@pytest.mark.parametrize("stop", [FIXED, LEARNT], ids=str)
def test_chains_do_end_early(stop: Stop) -> None:
    cell = Texts("standard", CHAIN, "plain", "bad")
    whole, stopped = (
        run_rows(world, cell.samplings(0, 300), PROMPT, LENGTH) for world in (cell.world, cell.world.stopping(*stop))
    )
    assert stopped.proposed / stopped.rounds < 0.8 * whole.proposed / whole.rounds


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
