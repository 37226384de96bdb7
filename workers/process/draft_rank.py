"""The draft on a worker of its own: guesses at once for whom it can, and catches up when nobody waits."""

import logging
import time
from collections.abc import Callable

from protos.draft import NO_DRAFT, Draft, DraftRow
from protos.messages import RoundPlan, Row
from protos.worker_messages import FormPair, FromWorker, Plan, Stop, ToWorker
from workers.draft.channel import DraftSender, Pairing
from workers.draft.wire import encode
from workers.draft.worker import DraftWorker, Proposes

logger = logging.getLogger(__name__)

CHUNK = 128
"""Tokens of a piece of catching up; the next round waits for one piece at most."""
FEATURES_S = 1.0
"""Features of the round before are waited for at most this long."""
MAX_FAILURES = 3
"""Rounds in a row that the proposer may fail in, before the worker gives up and is replaced."""


class DraftRank:
    """The draft's loop. It may be late: of the plans that piled up, only the newest is drafted for.

    Args:
        send: tells the controller.
        worker: the draft model.
        proposer: guesses with it.
        pairing: the draft's end of the pair with target 0.
    """

    def __init__(
        self, send: Callable[[FromWorker], None], worker: DraftWorker, proposer: Proposes, pairing: Pairing[DraftSender]
    ) -> None:
        self._send, self._worker, self._proposer, self._pairing = send, worker, proposer, pairing
        self._num_failures = 0
        self._is_behind = False
        self._before: RoundPlan | None = None  # the plan before the newest
        self._end: DraftSender | None = None  # of the newest plan's pair
        self.round = -1

    @property
    def is_behind(self) -> bool:
        """Whether `catch_up` has something to do."""
        return self._is_behind

    def take(self, messages: list[ToWorker]) -> bool:
        """Do what the controller says, all of what has come in at once; False when it is time to leave."""
        newest: RoundPlan | None = None
        for message in messages:
            if isinstance(message, Plan):
                self._before, newest = newest or self._before, message.plan
                self._worker.slots.apply(newest)
            elif isinstance(message, FormPair):
                self._pairing.form(message)
            elif isinstance(message, Stop):
                return False
        if newest is not None:
            self._run(newest)
        return True

    def catch_up(self) -> None:
        """Compute a piece of what the cache lacks."""
        if self._end is not None:
            self._learn(self._end, -1)
        self._is_behind = self._worker.catch_up_some(CHUNK)

    def close(self) -> None:
        """Leave the pair."""
        self._pairing.close()

    def _run(self, plan: RoundPlan) -> None:
        """Propose for a round; nothing at all where it goes without drafts."""
        end = self._end = self._pairing.end(plan.epoch)
        self._is_behind = end is not None
        if end is not None:
            began = time.monotonic()
            owed = self._before.round if self._before is not None and self._before.epoch == plan.epoch else -1
            self._learn(end, owed)
            wanting = [row for row in plan.rows if row.k and row.draft is None]
            drafts = self._propose(plan, wanting)
            if wanting:
                laws = self._worker.laws([row.slot for row in wanting], drafts)
                end.post(encode(self._worker.slots, wanting, drafts, laws), plan.round, time.monotonic() - began)
        self._before = plan
        self.round = plan.round

    def _learn(self, end: DraftSender, round_number: int) -> None:
        """Take the target's features of rounds up to this one; go on without them where they are late."""
        if end.features is None:
            return
        arrived = end.features.take(round_number, FEATURES_S)
        for features in arrived:
            try:
                self._worker.receive(features)
            except Exception:
                logger.exception("features could not be taken in; the draft goes on without them")
        if arrived:
            end.acknowledge(len(arrived))

    def _propose(self, plan: RoundPlan, wanting: list[Row]) -> list[Draft]:
        """Return the drafts of *wanting*. A proposer that fails costs guesses; one that always fails, its worker."""
        rows = [DraftRow(row.slot, row.k) for row in wanting]
        try:
            found = self._worker.propose_at_once(self._proposer, [row.slot for row in plan.rows], rows)
            vocab_size = self._worker.sampler.vocab_size
            drafts = [draft.valid_prefix(row.k, vocab_size) for draft, row in zip(found, rows, strict=True)]
        except Exception:
            self._num_failures += 1
            if self._num_failures >= MAX_FAILURES:
                raise
            logger.exception("the draft failed; these rows go on without guesses")
            return [NO_DRAFT] * len(rows)
        self._num_failures = 0
        return drafts
