"""Guesses for the rows of a step: from proposers beside the controller, the rest left to the draft worker."""

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from protos.draft import NO_DRAFT, Draft, DraftRow
from protos.interfaces import Proposer, SequenceListener
from runtime.core.sequence import Sequence

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ScheduledSequence:
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

    def takes(self, method: str | None) -> bool:
        """Whether its request wants guesses of *method*, as it does of all if it chose none."""
        return self.sequence.request.method in (None, method)

    def shrink(self, k: int) -> None:
        """Keep the first *k* nodes of the draft."""
        self.k = k
        if self.draft is not None:
            self.draft = self.draft.first(k) if k else None


class ControllerProposers:
    """Fills in the drafts of parts that want some. A proposer that fails costs guesses, never a request.

    Args:
        proposers: beside the controller, in the order in which they are asked; the first that has a guess for a row
            supplies it, decided per row and round.
        vocab_size: ids from here on are no tokens of the target.
        has_worker: whether rows without a guess may be left to a draft worker.
        methods: names of the *proposers*, and behind them that of the draft worker's: what requests may choose from.
            Nobody chooses where there are none.
    """

    def __init__(self, proposers: Seq[Proposer], vocab_size: int, *, has_worker: bool, methods: Seq[str] = ()) -> None:
        self._proposers = tuple(proposers)
        self._methods = tuple(methods) or (None,) * len(proposers)
        self._worker_method = methods[-1] if methods and has_worker else None
        self._followers = [proposer for proposer in proposers if isinstance(proposer, SequenceListener)]
        self._vocab_size = vocab_size
        self._has_worker = has_worker
        self.num_failures = 0
        self.propose_s = 0.0  # spent here on guesses, by the clock on the wall

    @property
    def is_here(self) -> bool:
        """Whether somebody beside the controller proposes."""
        return bool(self._proposers)

    def fill(self, parts: Seq[ScheduledSequence], *, can_ask_worker: bool) -> None:
        """Set `draft` and `k` of every part with `k > 0`; what is left without a draft but with a `k`, a worker drafts.

        Where there is none, or nobody *can ask* it now, rows without a guess go on without.
        """
        wanting = [part for part in parts if part.k]
        for method, proposer in zip(self._methods, self._proposers, strict=False):
            left = [part for part in wanting if part.draft is None and part.takes(method)]
            if left:
                self._fill_by(proposer, left)
        can_ask_worker = can_ask_worker and self._has_worker
        for part in wanting:
            if part.draft is None and not (can_ask_worker and part.takes(self._worker_method)):
                part.shrink(0)

    def _fill_by(self, proposer: Proposer, parts: list[ScheduledSequence]) -> None:
        began = time.monotonic()
        rows = [DraftRow(part.sequence.slot, part.k, part.sequence.token_ids, part.sequence.key) for part in parts]
        for part, draft in zip(parts, self._propose(proposer, rows), strict=True):
            if draft.tokens:
                part.draft, part.k = draft, len(draft)
        self.propose_s += time.monotonic() - began

    def _propose(self, proposer: Proposer, rows: list[DraftRow]) -> list[Draft]:
        try:
            drafts = proposer.propose(rows)
            if len(drafts) == len(rows):
                return [draft.valid_prefix(row.k, self._vocab_size) for draft, row in zip(drafts, rows, strict=True)]
            logger.warning("%s returned %d drafts for %d rows", type(proposer).__name__, len(drafts), len(rows))
        except Exception:
            logger.exception("%s failed; these rows go on without its guesses", type(proposer).__name__)
        self.num_failures += 1
        return [NO_DRAFT] * len(rows)

    def prepare(self) -> None:
        """Let those who follow sequences do a slice of what takes long."""
        for follower in self._followers:
            self._tell(follower, lambda to: to.prepare())

    def begin(self, sequence: Sequence) -> None:
        """Tell those who follow sequences of a new one."""
        for follower in self._followers:
            self._tell(follower, lambda to: to.begin(sequence.key, sequence.request))

    def grow(self, sequence: Sequence, token_ids: Seq[int], probed: Seq[int]) -> None:
        """Tell them what a round brought."""
        for follower in self._followers:
            self._tell(follower, lambda to: to.grow(sequence.key, token_ids, probed))

    def end(self, sequence: Sequence) -> None:
        """Tell them that a sequence ended."""
        for follower in self._followers:
            self._tell(follower, lambda to: to.end(sequence.key, sequence.token_ids))

    def _tell(self, follower: SequenceListener, say: Callable[[SequenceListener], None]) -> None:
        try:
            say(follower)
        except Exception:
            logger.exception("%s failed to take note of a sequence", type(follower).__name__)
            self.num_failures += 1
