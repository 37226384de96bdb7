"""Proposers that run in the controller process, such as n-gram look-up."""

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from proposers.shared.prediction import Prediction
from protos.draft import NO_DRAFT, PREDICTION, Draft, DraftRow
from protos.interfaces import Proposer, SequenceListener
from protos.messages import Request
from runtime.core.sequence import ScheduledSequence, Sequence

if TYPE_CHECKING:
    from runtime.core.stats import EngineCounters
    from runtime.policy.base import Policy

logger = logging.getLogger(__name__)


SLICE = 2048
"""Tokens of predictions indexed per round: about a millisecond."""


class PredictionProposer(SequenceListener):
    """Proposes what users predict. What it searches is indexed when it is asked, and not before."""

    def __init__(self) -> None:
        self._predictions: dict[int, tuple[Prediction, int]] = {}  # with the prompt's length, by the sequence's key

    def begin(self, key: int, request: Request) -> None:
        """See `SequenceListener`."""
        if request.prediction_token_ids:
            self._predictions[key] = Prediction(request.prediction_token_ids), len(request.prompt_token_ids)

    def end(self, key: int, token_ids: Seq[int]) -> None:
        """See `SequenceListener`."""
        self._predictions.pop(key, None)

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Return the next tokens of each row's prediction; an empty draft where the answer does not match it."""
        budget = SLICE
        drafts = []
        for row in rows:
            prediction, prompt_len = self._predictions[row.key]
            budget -= prediction.prepare(budget)
            drafts.append(Draft(tuple(prediction.follow(row.token_ids[prompt_len:], row.max_chain))))
        return drafts


class ControllerProposers:
    """Fills in drafts, and reports sequences to proposers that listen. A proposer that fails never fails a request.

    What the user predicts of an answer is proposed first.

    Args:
        proposers: in order of priority: each row takes the draft of the first that has one for it.
        vocab_size: draft tokens must be below this.
        methods: the names of *proposers*, which requests may choose from; empty if they cannot choose.
        counters: where failures and proposing time are counted.
    """

    def __init__(
        self, proposers: Seq[Proposer], vocab_size: int, methods: Seq[str], counters: "EngineCounters"
    ) -> None:
        self._proposers: tuple[Proposer | PredictionProposer, ...] = (PredictionProposer(), *proposers)
        self._methods = (None, *methods) if methods else (None,) * len(self._proposers)
        self._listeners = [proposer for proposer in self._proposers if isinstance(proposer, SequenceListener)]
        self._growing = [one for one in self._listeners if type(one).grow is not SequenceListener.grow]
        self._vocab_size = vocab_size
        self._counters = counters

    @property
    def num_sources(self) -> int:
        """How many of the policy's sources are these proposers: the first ones."""
        return len(self._proposers)

    def fill(self, scheduled: Seq[ScheduledSequence], policy: "Policy") -> None:
        """Set `draft`, `k` and `source` of the rows with `k > 0` for which a proposer has a draft."""
        self._fill(scheduled, policy.num_draft_tokens, policy.limit)

    def look_up(self, sequences: Seq[Sequence], limit: int) -> list[tuple[int, Draft] | None]:
        """Return drafts of at most *limit* tokens for *sequences*, and their sources. See `LookUp`.

        What users predict is not looked up: that is followed in any case. Listeners do a slice of their slow work.
        """
        rows = [ScheduledSequence(one, one.num_uncomputed, limit, source=self.num_sources) for one in sequences]
        self._fill(rows, lambda _, source: limit if source != PREDICTION else 0, limit)
        are_prepared = [all(listener.is_prepared(one.key) for listener in self._listeners) for one in sequences]
        self.prepare()
        return [
            (one.source, one.draft or NO_DRAFT) if is_prepared else None
            for one, is_prepared in zip(rows, are_prepared, strict=True)
        ]

    def _fill(self, scheduled: Seq[ScheduledSequence], most: Callable[[Sequence, int], int], limit: int) -> None:
        for source in range(self.num_sources):
            rows = [one for one in scheduled if one.k and one.draft is None and self._may_draft(source, one)]
            most_R = [min(one.k, most(one.sequence, source)) for one in rows]
            asked = [(one, k) for one, k in zip(rows, most_R, strict=True) if k]
            if asked:
                self._fill_with(source, asked, limit)

    def _may_draft(self, source: int, one: ScheduledSequence) -> bool:
        request = one.sequence.request
        if source == PREDICTION:
            return bool(request.prediction_token_ids)
        return request.method in (None, self._methods[source])

    def _fill_with(self, source: int, asked: list[tuple[ScheduledSequence, int]], limit: int) -> None:
        """Take the drafts of one proposer, each cut to the number of tokens *asked* for.

        Those before the last are asked for *limit* tokens: they leave a row to the next if they expect too few to be
        accepted, however many of them are worth verifying.
        """
        began = time.monotonic()
        is_last = source == self.num_sources - 1 and len(self._methods) == self.num_sources
        rows = [
            DraftRow(one.sequence.slot, k if is_last else limit, one.sequence.token_ids, one.sequence.key, one.depth)
            for one, k in asked
        ]
        for (one, k), draft in zip(asked, self._propose(self._proposers[source], rows), strict=True):
            if draft.tokens:
                one.draft, one.k, one.source = draft.first(k), min(k, len(draft)), source
        self._counters.propose_s += time.monotonic() - began

    def _propose(self, proposer: Proposer | PredictionProposer, rows: list[DraftRow]) -> list[Draft]:
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
        self._notify(self._listeners, lambda listener: listener.prepare())
        self._counters.propose_s += time.monotonic() - began

    def begin(self, sequence: Sequence) -> None:
        """Report a new sequence to the listeners."""
        self._notify(self._listeners, lambda listener: listener.begin(sequence.key, sequence.request))

    def grow(self, sequence: Sequence, token_ids: Seq[int], probed: Seq[int]) -> None:
        """Report the tokens that a step added to a sequence, and the target's tokens after the draft's probes."""
        self._notify(self._growing, lambda listener: listener.grow(sequence.key, token_ids, probed))

    def end(self, sequence: Sequence) -> None:
        """Report the end of a sequence."""
        self._notify(self._listeners, lambda listener: listener.end(sequence.key, sequence.token_ids))

    def _notify(self, listeners: Seq[SequenceListener], call: Callable[[SequenceListener], None]) -> None:
        for listener in listeners:
            try:
                call(listener)
            except Exception:
                logger.exception("%s failed to record a sequence", type(listener).__name__)
                self._counters.draft_failures += 1
