"""Keeps a draft worker in service: starts it, pairs it with the targets, notices its loss, and starts the next one.

All of it happens beside the rounds, in whatever mail and time the executor hands over. Without a draft in service rows
get no guesses; nothing here can fail a request.
"""

import logging
from collections import Counter
from collections.abc import Callable

from protos.errors import SlipstreamError
from protos.interfaces import DraftService
from protos.worker_messages import (
    Died,
    Drafted,
    FormPair,
    FromWorker,
    Heartbeat,
    PairFailed,
    PairReady,
    RoundDone,
    StoreAddress,
    WorkerFailed,
    WorkerGroup,
    WorkerId,
)
from runtime.supervision.startup import GroupStartup, StartError
from runtime.supervision.watchdog import Watchdog

logger = logging.getLogger(__name__)

RETRY_S = 1.0
MAX_RETRY_S = 60.0
MANY = 16
"""Failures that are told apart: more than it takes to get to `MAX_RETRY_S`."""
STEADY_S = 15.0
"""A draft that served for so long is replaced at once; one that did not, ever more slowly."""
FORM_S = 60.0
"""Both ends of a pair must be ready after this long."""
STUCK_S = 10.0
"""A draft that was given work and got through none of it for this long hangs, heartbeats or not."""
PAIRS_PER_DRAFT = 3
"""After so many pairs in a row that failed, the draft is replaced."""

MakeStartup = Callable[[WorkerId], GroupStartup]


class DraftSupervisor:
    """The draft's life as the controller sees it. Used by the executor's thread alone.

    Args:
        gang: what starts workers and carries their mail.
        watch: where the draft is watched while it lives.
        make_squad: makes the squad that starts a draft.
    """

    def __init__(self, gang: WorkerGroup, watch: Watchdog, make_squad: MakeStartup) -> None:
        self._gang, self._watch, self._make_squad = gang, watch, make_squad
        self.worker = WorkerId("draft")
        self.num_drafted = 0
        self._drafted: Drafted | None = None  # the newest
        self._squad: GroupStartup | None = None
        self._is_ready = False
        self._target: WorkerId | None = None
        self._store: StoreAddress | None = None
        self._epoch = 0  # the newest pair, formed or not
        self._ends: set[WorkerId] = set()
        self._form_by: float | None = None
        self._serving = 0
        self._served_since = 0.0
        self._retry_at: float | None = None
        self._num_failures = 0
        self._num_bad_pairs = 0
        self._changes: Counter[str] = Counter()
        self._is_late = False
        self._asked: int | None = None  # the newest round it was sent and is not through with
        self._reached = -1
        self._moved_at = 0.0

    @property
    def service(self) -> DraftService:
        """See `Executor.drafting`."""
        return DraftService(self._serving > 0, self._serving, dict(self._changes))

    @property
    def is_serving(self) -> bool:
        """Whether the draft is to be sent plans."""
        return self._serving > 0

    @property
    def is_forming(self) -> bool:
        """Whether a pair is being formed, which may keep target 0 busy."""
        return self._form_by is not None

    @property
    def waits_for(self) -> str:
        """Say what is still missing until the draft serves."""
        if self._squad is not None:
            return self._squad.waits_for
        return "the draft to be paired with target rank 0" if self.is_forming else "the draft to be started again"

    def arrived(self) -> None:
        """The draft was started together with the targets, and is ready."""
        self._is_ready = True
        self._watch.serves(self.worker)

    def targets_up(self, target: WorkerId, store: StoreAddress) -> None:
        """Target rank 0 serves; its store is where to pair."""
        self._target, self._store = target, store
        if self._is_ready:
            self._form_pair()

    def targets_down(self) -> None:
        """The targets are gone, and with them the pair."""
        self._target = self._store = None
        self._leave_service("targets_lost")

    def take(self, worker: WorkerId, message: FromWorker) -> None:
        """Note what the draft says, or what target rank 0 says of the pair."""
        if worker.role == "draft" and worker != self.worker:
            return
        if isinstance(message, Died | WorkerFailed):
            self.lost(f"died: {message.reason}" if isinstance(message, Died) else f"failed: {message.reason}")
        elif isinstance(message, PairReady):
            self._end_ready(worker, message.epoch)
        elif isinstance(message, PairFailed):
            self._pair_failed(worker, message)
        elif isinstance(message, Drafted):
            self.num_drafted += 1
            self._drafted = message
        elif isinstance(message, Heartbeat):
            if worker == self.worker:
                self._moved(message.round)
        elif self._squad is not None:
            self._start_on(self._squad, worker, message)

    def propose_s(self, round_number: int) -> float:
        """Return how many seconds the guesses of this round took; 0 where none were announced."""
        drafted = self._drafted
        return 0.0 if drafted is None or drafted.round != round_number else drafted.propose_s

    def take_result(self, done: RoundDone) -> None:
        """Note how the draft did in a round: being late, and being back, are said once."""
        if not self.is_serving:
            return
        if done.draft_missed and not self._is_late:
            self._is_late = True
            self._change("late", "the draft missed its deadline; rounds no longer wait for it until it keeps up")
        elif self._is_late and any(verdict.proposed for verdict in done.verdicts):
            self._is_late = False
            self._change("in_time", "the draft keeps up again")

    def asked(self, round_number: int) -> None:
        """The draft was sent the plan of this round."""
        if self._asked is None:
            self._moved_at = self._watch.now
        self._asked = round_number

    def tend(self) -> None:
        """Do what is due: notice a draft that is stuck, give up a pair that does not form, start the next draft."""
        now = self._watch.now
        if self._asked is not None and now - self._moved_at > STUCK_S:
            self.lost(f"hangs: no round finished for {STUCK_S:.0f} s")
        elif self._form_by is not None and now > self._form_by:
            self._abandon_pair(f"not formed within {FORM_S:.0f} s")
        elif self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            self._again()

    def lost(self, reason: str) -> None:
        """The draft is dead or hangs: end what is left of it, and start the next one."""
        self._is_ready = False
        self._squad = None
        self._leave_service("lost", f"{self.worker} {reason}; decoding goes on without guesses")
        self._watch.remove(self.worker)
        self._gang.kill([self.worker], waits=False)
        delay = min(MAX_RETRY_S, RETRY_S * (2**self._num_failures - 1))
        self._num_failures = min(self._num_failures + 1, MANY)
        logger.warning("%s %s; starting another in %.0f s", self.worker, reason, delay)
        self._retry_at = self._watch.now + delay
        self.worker = WorkerId("draft", 0, self.worker.incarnation + 1)
        self._reached = -1

    def _again(self) -> None:
        if self._is_ready:
            self._form_pair()
            return
        self._squad = self._make_squad(self.worker)
        self._squad.start()

    def _start_on(self, squad: GroupStartup, worker: WorkerId, message: FromWorker) -> None:
        try:
            squad.take(worker, message)
        except (StartError, SlipstreamError) as error:
            self.lost(str(error))
            return
        if squad.is_ready:
            self._squad = None
            self.arrived()
            self._form_pair()

    def _form_pair(self) -> None:
        """Let both ends form the next pair, in the background; it enters service when both are ready."""
        if self._target is None or self._store is None:
            return
        self._epoch += 1
        self._ends = set()
        self._form_by = self._watch.now + FORM_S
        self._retry_at = None
        for worker in (self._target, self.worker):
            self._gang.send(worker, FormPair(self._epoch, self._store))

    def _end_ready(self, worker: WorkerId, epoch: int) -> None:
        if epoch != self._epoch or not self.is_forming:
            return
        self._ends.add(worker)
        if self._ends >= {self._target, self.worker}:
            self._form_by = None
            self._num_bad_pairs = 0
            self._serving = self._epoch
            self._served_since = self._watch.now
            self._change("started" if self._epoch == 1 else "revived", f"{self.worker} serves, as pair {self._epoch}")

    def _pair_failed(self, worker: WorkerId, message: PairFailed) -> None:
        if message.epoch == self._epoch and (self.is_serving or self.is_forming):
            self._abandon_pair(f"{worker}: {message.reason}")

    def _abandon_pair(self, reason: str) -> None:
        """The draft may well be alive: try another pair, and only then another draft."""
        self._leave_service("pair_lost", f"pair {self._epoch} failed ({reason}); decoding goes on without guesses")
        self._num_bad_pairs += 1
        if self._num_bad_pairs > PAIRS_PER_DRAFT:
            self._num_bad_pairs = 0
            self.lost(f"could not be paired {PAIRS_PER_DRAFT} times")
        elif self._is_ready:
            self._retry_at = self._watch.now + RETRY_S

    def _leave_service(self, why: str, text: str = "the draft waits for its targets") -> None:
        """Take the draft out of service; say so and count it once."""
        self._form_by = None
        self._asked = None
        if self._serving:
            if self._watch.now - self._served_since >= STEADY_S:
                self._num_failures = 0
            self._serving = 0
            self._is_late = False
            self._change(why, text)

    def _moved(self, round_number: int) -> None:
        """A heartbeat said how far the draft is."""
        if round_number > self._reached:
            self._reached, self._moved_at = round_number, self._watch.now
        if self._asked is not None and round_number >= self._asked:
            self._asked = None

    def _change(self, why: str, text: str) -> None:
        self._changes[why] += 1
        logger.info("%s", text)
