"""The draft on a worker of its own: drafts at once for rows that are ready, and catches up when it is idle."""

import logging
import time

from protos.messages import RoundPlan
from protos.worker_messages import FormDraftChannel, Plan, Stop, ToWorker
from workers.draft.channel import DraftChannels
from workers.draft.engine import DraftEngine
from workers.draft.sender import DraftSender
from workers.draft.wire import encode

logger = logging.getLogger(__name__)

CHUNK = 128
"""Tokens that are caught up with at a time; the next round waits for one chunk at most."""
FEATURES_S = 1.0
"""The draft waits this long for the features of the previous round."""
MAX_FAILURES = 3
"""After this many failed rounds in a row the worker ends and is replaced."""


class DraftRank:
    """The draft's part of every round. It may be late: of several waiting plans, only the newest is drafted for.

    Args:
        engine: the draft.
        channels: the draft's end of the channel to target rank 0.
    """

    def __init__(self, engine: DraftEngine, channels: DraftChannels[DraftSender]) -> None:
        self._engine, self._worker, self._channels = engine, engine.worker, channels
        self._is_catching_up = False
        self._before: RoundPlan | None = None  # the newest plan but one
        self._end: DraftSender | None = None  # of the newest plan's draft channel
        self.round = -1

    @property
    def is_catching_up(self) -> bool:
        """Whether `catch_up` has something to do."""
        return self._is_catching_up

    def take(self, messages: list[ToWorker]) -> bool:
        """Handle the controller's messages, all that have arrived; return False after `Stop`."""
        newest: RoundPlan | None = None
        for message in messages:
            if isinstance(message, Plan):
                self._before, newest = newest or self._before, message.plan
                self._worker.slots.apply(newest)
            elif isinstance(message, FormDraftChannel):
                self._channels.form(message)
            elif isinstance(message, Stop):
                return False
        if newest is not None:
            self._run(newest)
        return True

    def catch_up(self) -> None:
        """Compute a chunk of what the cache lacks."""
        if self._end is not None:
            self._receive_features(self._end, -1)
        self._is_catching_up = self._engine.catch_up_some(CHUNK)

    def close(self) -> None:
        """Leave the draft channel."""
        self._channels.close()

    def _run(self, plan: RoundPlan) -> None:
        """Propose for a round, unless this draft does not take part in it."""
        end = self._end = self._channels.end(plan.epoch)
        self._is_catching_up = end is not None
        if end is not None:
            began = time.monotonic()
            owed = self._before.round if self._before is not None and self._before.epoch == plan.epoch else -1
            self._receive_features(end, owed)
            wanting = [row for row in plan.rows if row.k and row.draft is None]
            proposed = self._engine.propose_ready(plan, wanting)
            self._check_failures()
            if wanting:
                table = encode(self._worker.slots, wanting, proposed.drafts, proposed.probs)
                end.post(table, plan.round, time.monotonic() - began)
        self._before = plan
        self.round = plan.round

    def _receive_features(self, end: DraftSender, round_number: int) -> None:
        """Receive the target's features of rounds up to *round_number*; continue without those that are late."""
        if end.features is None:
            return
        arrived = end.features.take(round_number, FEATURES_S)
        for features in arrived:
            try:
                self._worker.receive(features)
            except Exception:
                logger.exception("the target's features could not be received; the draft continues without them")
        if arrived:
            end.acknowledge(len(arrived))

    def _check_failures(self) -> None:
        """Raise the last error after `MAX_FAILURES` failures in a row: it ends the worker, which is then replaced."""
        if self._engine.num_failures >= MAX_FAILURES and self._engine.last_failure is not None:
            raise self._engine.last_failure
