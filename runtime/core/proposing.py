"""Proposers that run in the controller process, such as n-gram look-up."""

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from protos.draft import NO_DRAFT, Draft, DraftRow
from protos.interfaces import Proposer, SequenceListener
from runtime.core.sequence import ScheduledSequence, Sequence

if TYPE_CHECKING:
    from runtime.core.stats import EngineCounters

logger = logging.getLogger(__name__)


class ControllerProposers:
    """Fills in drafts, and reports sequences to proposers that listen. A proposer that fails never fails a request.

    Args:
        proposers: in order of priority: each row takes the draft of the first that has one for it.
        vocab_size: draft tokens must be below this.
        methods: the names of *proposers*, which requests may choose from; empty if they cannot choose.
        counters: where failures and proposing time are counted.
    """

    def __init__(
        self, proposers: Seq[Proposer], vocab_size: int, methods: Seq[str], counters: "EngineCounters"
    ) -> None:
        self._proposers = tuple(proposers)
        self._methods = tuple(methods) or (None,) * len(proposers)
        self._listeners = [proposer for proposer in proposers if isinstance(proposer, SequenceListener)]
        self._vocab_size = vocab_size
        self._counters = counters

    def fill(self, scheduled: Seq[ScheduledSequence]) -> None:
        """Set `draft` and `k` of the rows with `k > 0` for which a proposer has a draft."""
        for method, proposer in zip(self._methods, self._proposers, strict=False):
            rows = [
                one
                for one in scheduled
                if one.k and one.draft is None and one.sequence.request.method in (None, method)
            ]
            if rows:
                self._fill_with(proposer, rows)

    def _fill_with(self, proposer: Proposer, scheduled: list[ScheduledSequence]) -> None:
        began = time.monotonic()
        rows = [
            DraftRow(one.sequence.slot, one.k, one.sequence.token_ids, one.sequence.key, one.depth) for one in scheduled
        ]
        for one, draft in zip(scheduled, self._propose(proposer, rows), strict=True):
            if draft.tokens:
                one.draft, one.k = draft, len(draft)
        self._counters.propose_s += time.monotonic() - began

    def _propose(self, proposer: Proposer, rows: list[DraftRow]) -> list[Draft]:
        try:
            drafts = proposer.propose(rows)
            if len(drafts) == len(rows):
                return [
                    draft.valid_prefix(row.k, self._vocab_size).within(row.depth)
                    for draft, row in zip(drafts, rows, strict=True)
                ]
            logger.warning("%s returned %d drafts for %d rows", type(proposer).__name__, len(drafts), len(rows))
        except Exception:
            logger.exception("%s failed; these rows get no draft from it", type(proposer).__name__)
        self._counters.draft_failures += 1
        return [NO_DRAFT] * len(rows)

    def prepare(self) -> None:
        """Let listeners do a slice of their slow work, which is part of what their drafts cost."""
        began = time.monotonic()
        self._notify(lambda listener: listener.prepare())
        self._counters.propose_s += time.monotonic() - began

    def begin(self, sequence: Sequence) -> None:
        """Report a new sequence to the listeners."""
        self._notify(lambda listener: listener.begin(sequence.key, sequence.request))

    def grow(self, sequence: Sequence, token_ids: Seq[int], probed: Seq[int]) -> None:
        """Report the tokens that a step added to a sequence, and the target's tokens after the draft's probes."""
        self._notify(lambda listener: listener.grow(sequence.key, token_ids, probed))

    def end(self, sequence: Sequence) -> None:
        """Report the end of a sequence."""
        self._notify(lambda listener: listener.end(sequence.key, sequence.token_ids))

    def _notify(self, call: Callable[[SequenceListener], None]) -> None:
        for listener in self._listeners:
            try:
                call(listener)
            except Exception:
                logger.exception("%s failed to record a sequence", type(listener).__name__)
                self._counters.draft_failures += 1
