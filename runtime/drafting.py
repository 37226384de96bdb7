"""Guesses for the rows of a step: from a proposer beside the controller, or left to the draft worker."""

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from protos.interfaces import DraftRow, Proposer
from protos.messages import Draft
from runtime.sequence import Sequence

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Part:
    """One sequence's part of the step being planned; becomes a `Row`."""

    sequence: Sequence
    length: int
    k: int = 0
    draft: Draft | None = None

    @property
    def end(self) -> int:
        """Position behind the known tokens it feeds."""
        return self.sequence.num_computed + self.length

    @property
    def samples(self) -> bool:
        """Whether its newest known token is fed."""
        return self.length == self.sequence.num_unfed

    def shrink(self, k: int) -> None:
        """Keep the first *k* draft tokens."""
        self.k = k
        if self.draft is not None:
            self.draft = first_of(self.draft, k) if k else None


def first_of(draft: Draft, k: int) -> Draft:
    """Return the first *k* nodes of a draft; parents come before children, so they still hang together."""
    return draft if len(draft) <= k else Draft(draft.tokens[:k], draft.parents[:k], draft.probes[:k])


class Drafting:
    """Fills in the drafts of parts that want some. A proposer that fails costs guesses, never a request."""

    def __init__(self, proposer: Proposer | None, vocab_size: int) -> None:
        self._proposer = proposer
        self._vocab_size = vocab_size
        self.num_failures = 0

    def fill(self, parts: Seq[Part]) -> None:
        """Set `draft` and `k` of every part with `k > 0`; without a proposer here, the draft worker guesses."""
        if self._proposer is None:
            return
        wanting = [part for part in parts if part.k]
        if not wanting:
            return
        rows = [DraftRow(part.sequence.slot, part.k, part.sequence.token_ids) for part in wanting]
        for part, draft in zip(wanting, self._propose(self._proposer, rows), strict=True):
            part.draft = draft
            part.shrink(min(part.k, self._num_valid(draft)))

    def _propose(self, proposer: Proposer, rows: list[DraftRow]) -> list[Draft]:
        try:
            drafts = proposer.propose(rows)
            if len(drafts) == len(rows):
                return drafts
            logger.warning("%s returned %d drafts for %d rows", type(proposer).__name__, len(drafts), len(rows))
        except Exception:
            logger.exception("%s failed; these rows go on without guesses", type(proposer).__name__)
        self.num_failures += 1
        return [Draft(())] * len(rows)

    def _num_valid(self, draft: Draft) -> int:
        """Return how many tokens come before the first that is no token of the target."""
        for index, token_id in enumerate(draft.tokens):
            if not 0 <= token_id < self._vocab_size:
                return index
        return len(draft)
