"""Decoding rows as the adaptive policy sees them."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from runtime.core.sequence import Sequence
from runtime.policy.acceptance import RequestAcceptance, Sources


@dataclass(frozen=True)
class DecodingRow:
    """A decoding row: its most draft tokens from each source, and what drafts of each showed for its request so far."""

    limits: tuple[int, ...]
    acceptances: tuple[RequestAcceptance, ...]

    def only(self, source: int) -> "DecodingRow":
        """Return the row without draft tokens from other sources."""
        limits = [limit * (source == each) for each, limit in enumerate(self.limits)]
        return DecodingRow(tuple(limits), self.acceptances)


class DecodingRows:
    """The rows of all requests, which keep what was shown of each.

    Args:
        limit: most draft tokens of a row.
        sources: of drafts.
        may_branch: whether drafts may be trees.
    """

    def __init__(self, limit: int, sources: Sources, *, may_branch: bool) -> None:
        self._limit, self._sources, self._may_branch = limit, sources, may_branch
        self._rows: dict[int, tuple[int, DecodingRow]] = {}  # as they were last, by the sequence's key

    def of(self, running: Seq[Sequence]) -> dict[int, DecodingRow]:
        """Return those of *running* that decode, by the sequence's key."""
        if len(self._rows) > 2 * len(running) + 64:
            self._rows = {one.key: self._rows[one.key] for one in running if one.key in self._rows}
        return {sequence.key: self._row(sequence) for sequence in running if sequence.is_decoding}

    def _row(self, sequence: Sequence) -> DecodingRow:
        limit = sequence.most_drafts(self._limit, may_branch=self._may_branch)
        before, row = self._rows.get(sequence.key, (None, None))
        if row is None or before != limit:
            may_draft = [self._sources.may_draft(source, sequence.request) for source in range(len(self._sources))]
            acceptances = tuple([RequestAcceptance() for _ in may_draft]) if row is None else row.acceptances
            row = DecodingRow(tuple([limit * may for may in may_draft]), acceptances)
            self._rows[sequence.key] = limit, row
        return row
