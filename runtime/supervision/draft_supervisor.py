"""Keeps a draft worker in service: starts it, connects it to the targets, notices its loss, and starts the next one.

All of it happens while rounds go on, when the executor reads messages. Without a draft in service rows get no draft
tokens from it; nothing here can fail a request.
"""

import logging
from collections import Counter
from collections.abc import Callable
from enum import Enum, auto

from proposers import registry
from protos.config.engine import EngineConfig
from protos.errors import SlipstreamError
from protos.interfaces import DraftService
from protos.messages import RoundPlan
from protos.stats import DraftChange
from protos.worker_messages import (
    Died,
    DraftChannelFailed,
    DraftChannelReady,
    Drafted,
    FormDraftChannel,
    FromWorker,
    Heartbeat,
    Plan,
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
MAX_COUNTED_FAILURES = 16
"""More than it takes for the delay to reach `MAX_RETRY_S`."""
STEADY_S = 15.0
"""A draft that served for this long is replaced at once; otherwise the delay doubles with each failure."""
FORM_S = 60.0
"""Both ends of a draft channel must be ready after this long."""
STUCK_S = 10.0
"""A draft that has plans but finishes no round for this long hangs, even if it sends heartbeats."""
MAX_HELD_PLANS = 6
"""Most plans without draft tokens that wait for the next message to the draft. Fewer than the rounds whose features may
be unacknowledged, and so few that the draft feeds what it lacks while it drafts."""
MAX_FAILED_CHANNELS = 3
"""After more draft channels in a row that failed, the draft is replaced."""

MakeStartup = Callable[[WorkerId], GroupStartup]


def has_draft_worker(config: EngineConfig) -> bool:
    """Whether *config* has a draft on a dedicated worker."""
    speculative = config.speculative
    if speculative is None or speculative.placement != "dedicated":
        return False
    return registry.worker_method(speculative) is not None


class DraftPhase(Enum):
    """How far the draft has come on its way into service."""

    STARTING = auto()
    """It is being started, or will be."""
    READY = auto()
    """It waits for plans, and has no draft channel: target rank 0 does not serve, or the last channel failed."""
    FORMING = auto()
    """A draft channel is being formed."""
    SERVING = auto()
    """Plans are sent to it."""


class DraftSupervisor:
    """The draft worker as the controller sees it. Used by the executor's thread alone.

    Args:
        group: starts workers and carries their messages.
        watchdog: watches the draft while it runs.
        make_startup: returns the startup of a draft.
    """

    def __init__(self, group: WorkerGroup, watchdog: Watchdog, make_startup: MakeStartup) -> None:
        self._group, self._watchdog, self._make_startup = group, watchdog, make_startup
        self.worker = WorkerId("draft")
        self._drafted: Drafted | None = None  # the newest
        self._phase = DraftPhase.STARTING
        self._startup: GroupStartup | None = None  # that of the first draft is the target group's
        self._target: WorkerId | None = None
        self._store: StoreAddress | None = None
        self._epoch = 0  # of the newest draft channel, formed or not
        self._ready_ends: set[WorkerId] = set()
        self._form_by = self._served_since = 0.0
        self._retry_at: float | None = None
        self._num_failures = self._num_failed_channels = 0  # in a row
        self._changes: Counter[str] = Counter()
        self._is_late = False
        self._held: list[Plan] = []  # plans that it needs later, in order
        self._sent_round: int | None = None  # the newest round that was sent to it and is not finished
        self._finished_round, self._progress_at = -1, 0.0

    @property
    def service(self) -> DraftService:
        """See `Executor.drafting`."""
        return DraftService(self.is_serving, self._epoch if self.is_serving else 0, dict(self._changes))

    @property
    def is_serving(self) -> bool:
        """Whether plans are sent to the draft."""
        return self._phase is DraftPhase.SERVING

    @property
    def is_forming(self) -> bool:
        """Whether a draft channel is being formed, which may keep target rank 0 busy."""
        return self._phase is DraftPhase.FORMING

    @property
    def waits_for(self) -> str:
        """What is missing until the draft serves."""
        if self._startup is not None:
            return self._startup.waits_for
        return "the draft to be connected to target rank 0" if self.is_forming else "the draft to be started again"

    def mark_ready(self) -> None:
        """Record that the draft was started and waits for plans."""
        self._phase = DraftPhase.READY
        self._watchdog.mark_serving(self.worker)

    def targets_up(self, target: WorkerId, store: StoreAddress) -> None:
        """Record that target rank 0 serves; draft channels are formed over its store."""
        self._target, self._store = target, store
        if self._phase is DraftPhase.READY:
            self._form_channel()

    def targets_down(self) -> None:
        """Record that the targets are gone, and the draft channel with them."""
        self._target = self._store = None
        self._leave_service("targets_lost")

    def take(self, worker: WorkerId, message: FromWorker) -> None:
        """Handle a message of the draft, or of target rank 0 about the draft channel."""
        if worker.role == "draft" and worker != self.worker:
            return
        if isinstance(message, Died | WorkerFailed):
            self.lose(f"died: {message.reason}" if isinstance(message, Died) else f"failed: {message.reason}")
        elif isinstance(message, DraftChannelReady):
            self._end_ready(worker, message.epoch)
        elif isinstance(message, DraftChannelFailed):
            self._channel_failed(worker, message)
        elif isinstance(message, Drafted):
            self._drafted = message
        elif isinstance(message, Heartbeat):
            if worker == self.worker:
                self._record_progress(message.round)
        elif self._startup is not None:
            self._take_startup(self._startup, worker, message)

    def propose_s(self, round_number: int) -> float:
        """Return how many seconds the drafts of this round took, 0 if none were sent."""
        drafted = self._drafted
        return 0.0 if drafted is None or drafted.round != round_number else drafted.propose_s

    def take_result(self, done: RoundDone) -> None:
        """Record whether the draft was late in a round; report it once when that changes."""
        if not self.is_serving:
            return
        if done.draft_missed and not self._is_late:
            self._is_late = True
            self._change("late", "the draft missed its deadline; rounds no longer wait for it until it keeps up")
        elif self._is_late and any(verdict.proposed for verdict in done.verdicts):
            self._is_late = False
            self._change("in_time", "the draft keeps up again")

    def send(self, message: Plan) -> None:
        """Send a plan if the draft serves. While no row wants draft tokens, several are sent at once.

        A draft that computes after every round takes the time of cores that it shares with the target.
        """
        if not self.is_serving:
            return
        self._held.append(message)
        if _may_wait(message.plan) and len(self._held) < MAX_HELD_PLANS:
            return
        for held in self._held:
            self._group.send(self.worker, held)
        self._held.clear()
        if self._sent_round is None:
            self._progress_at = self._watchdog.now
        self._sent_round = message.plan.round

    def tick(self) -> None:
        """Do what is due: replace a stuck draft, abandon a draft channel that does not form, start the next draft."""
        now = self._watchdog.now
        if self._sent_round is not None and now - self._progress_at > STUCK_S:
            self.lose(f"hangs: no round finished for {STUCK_S:.0f} s")
        elif self.is_forming and now > self._form_by:
            self._abandon_channel(f"not formed within {FORM_S:.0f} s")
        elif self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            self._retry()

    def lose(self, reason: str) -> None:
        """End a draft that is dead or hangs, and start the next one after a delay."""
        self._leave_service("lost", f"{self.worker} {reason}; decoding continues without it")
        self._phase, self._startup = DraftPhase.STARTING, None
        self._watchdog.remove(self.worker)
        self._group.kill([self.worker], waits=False)
        delay = min(MAX_RETRY_S, RETRY_S * (2**self._num_failures - 1))
        self._num_failures = min(self._num_failures + 1, MAX_COUNTED_FAILURES)
        logger.warning("%s %s; starting another in %.0f s", self.worker, reason, delay)
        self._retry_at = self._watchdog.now + delay
        self.worker = WorkerId("draft", 0, self.worker.incarnation + 1)
        self._finished_round = -1

    def _retry(self) -> None:
        if self._phase is DraftPhase.READY:
            self._form_channel()
            return
        self._startup = self._make_startup(self.worker)
        self._startup.start()

    def _take_startup(self, startup: GroupStartup, worker: WorkerId, message: FromWorker) -> None:
        try:
            startup.take(worker, message)
        except (StartError, SlipstreamError) as error:
            self.lose(str(error))
            return
        if startup.is_ready:
            self._startup = None
            self.mark_ready()
            self._form_channel()

    def _form_channel(self) -> None:
        """Let both ends form the next draft channel in the background; it serves when both are ready."""
        if self._target is None or self._store is None:
            return
        self._phase, self._form_by = DraftPhase.FORMING, self._watchdog.now + FORM_S
        self._epoch, self._ready_ends = self._epoch + 1, set()
        self._retry_at = None
        for worker in (self._target, self.worker):
            self._group.send(worker, FormDraftChannel(self._epoch, self._store))

    def _end_ready(self, worker: WorkerId, epoch: int) -> None:
        if epoch != self._epoch or not self.is_forming:
            return
        self._ready_ends.add(worker)
        if self._ready_ends >= {self._target, self.worker}:
            self._phase, self._served_since, self._num_failed_channels = DraftPhase.SERVING, self._watchdog.now, 0
            why: DraftChange = "started" if self._epoch == 1 else "revived"
            self._change(why, f"{self.worker} serves, over draft channel {self._epoch}")

    def _channel_failed(self, worker: WorkerId, message: DraftChannelFailed) -> None:
        if message.epoch == self._epoch and (self.is_serving or self.is_forming):
            self._abandon_channel(f"{worker}: {message.reason}")

    def _abandon_channel(self, reason: str) -> None:
        """Form another draft channel with the same draft, which may be alive; replace it after several failures."""
        self._leave_service(
            "pair_lost", f"draft channel {self._epoch} failed ({reason}); decoding continues without it"
        )
        self._num_failed_channels += 1
        if self._num_failed_channels > MAX_FAILED_CHANNELS:
            self._num_failed_channels = 0
            self.lose(f"could not be connected {MAX_FAILED_CHANNELS} times")
        else:
            self._retry_at = self._watchdog.now + RETRY_S

    def _leave_service(self, why: DraftChange, text: str = "the draft waits for its targets") -> None:
        """Take the draft out of service; count and report it if it served."""
        served = self.is_serving
        if self._phase is not DraftPhase.STARTING:
            self._phase = DraftPhase.READY
        self._held.clear()
        self._sent_round = None
        if served:
            if self._watchdog.now - self._served_since >= STEADY_S:
                self._num_failures = 0
            self._is_late = False
            self._change(why, text)

    def _record_progress(self, round_number: int) -> None:
        """Record the newest round that the draft finished, from its heartbeat."""
        if round_number > self._finished_round:
            self._finished_round, self._progress_at = round_number, self._watchdog.now
        if self._sent_round is not None and round_number >= self._sent_round:
            self._sent_round = None

    def _change(self, why: DraftChange, text: str) -> None:
        self._changes[why] += 1
        logger.info("%s", text)


def _may_wait(plan: RoundPlan) -> bool:
    """Whether the draft need not see *plan* yet: it drafts nothing, and has little to feed."""
    wanted = plan.speculates and any(row.k and row.draft is None for row in plan.rows)
    return plan.decodes and not wanted and not plan.new
