"""Starts the target ranks, and replaces those that are lost. A draft may be started with the first group.

On CPUs the other ranks keep their processes and weights, and form the next group with the replacements. Otherwise, and
if that fails, all ranks are started again.
"""

import logging
from collections.abc import Sequence as Seq

import msgspec

from protos.errors import EngineDeadError, NoRoomError, SlipstreamError, TargetLostError
from protos.progress import ProgressCallback
from protos.worker_messages import FromWorker, Setup, WorkerGroup, WorkerId
from runtime.supervision.kv_sizing import KVSizing
from runtime.supervision.startup import RANK_0, Devices, GroupStartup, StartError
from runtime.supervision.watchdog import Clock, Watchdog

logger = logging.getLogger(__name__)

MAX_REBUILDS = 3
STEADY_ROUNDS, STEADY_S = 50, 60.0
"""After so many rounds or seconds a rebuilt group counts as healthy, and earlier rebuilds no longer count."""
FOUND_S = 3.0
"""After a rank reported that its group failed, the rank that is gone is found within this time, or all are replaced."""
NO_ROOM_RETRY_S = 10.0
"""Delay after which clients may retry while there is no room: nobody knows when a machine comes back."""
STARTING_S = 5.0
"""A rank whose process does not run after this long has no room in the cluster."""
REJOIN_S = 30.0
"""A rank that still runs forms the next group within this time."""


class TargetSupervisor:
    """The target ranks as the controller sees them. Used by the executor's thread alone.

    Args:
        group: starts workers and carries their messages.
        watchdog: watches the targets while they run.
        setup: the fields of `Setup` that all workers have in common.
        devices: where the devices of all workers are recorded.
        sizing: the number of KV blocks of all workers.
        rebuild_timeout_s: how long a group that is rebuilt may wait for its place before requests are refused.
        report: called with a line about each start.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        group: WorkerGroup,
        watchdog: Watchdog,
        setup: Setup,
        devices: Devices,
        sizing: KVSizing,
        *,
        rebuild_timeout_s: float,
        report: ProgressCallback,
        clock: Clock,
    ) -> None:
        self._group, self._watchdog, self._setup = group, watchdog, setup
        self._devices, self._sizing = devices, sizing
        self._rebuild_timeout_s, self._report, self._clock = rebuild_timeout_s, report, clock
        self.workers = tuple(WorkerId("target", rank) for rank in range(setup.world))
        self.startup: GroupStartup | None = None
        self.failure: SlipstreamError | None = None  # why the startup failed
        self._lacking: list[WorkerId] = []  # ranks of the startup whose processes do not run
        self._lacks_since: float | None = None
        self._loss: str | None = None  # why the serving targets are lost
        self._lost: set[WorkerId] = set()  # which of them, as far as that is known
        self._lost_at = 0.0
        self._serving: GroupStartup | None = None  # the startup of the group that serves, or served last
        self._rejoin_by = 0.0
        self._num_rebuilds = 0
        self._num_rounds = 0
        self._served_since = 0.0

    @property
    def rank_0(self) -> WorkerId:
        """Target rank 0."""
        return self.workers[RANK_0]

    def start(self, drafts: Seq[WorkerId]) -> GroupStartup:
        """Start the first group, together with *drafts*."""
        return self._start(
            GroupStartup(self._group, (*self.workers, *drafts), self._setup, self._devices, self._sizing.decide)
        )

    def _start(self, startup: GroupStartup) -> GroupStartup:
        self.failure = None
        self.startup = startup
        self._rejoin_by = self._clock() + REJOIN_S
        startup.start()
        return startup

    def is_starting(self, worker: WorkerId) -> bool:
        """Whether the worker belongs to the group that is being started."""
        return self.startup is not None and worker in self.startup.workers

    def take(self, worker: WorkerId, message: FromWorker) -> None:
        """Record a message of a worker that is being started; a failure ends up in `failure`."""
        if self.startup is None:
            return
        try:
            self.startup.take(worker, message)
        except StartError as failure:
            self.failure = self.failure or failure.error
        except SlipstreamError as error:
            self.failure = self.failure or error

    def begin_serving(self) -> None:
        """Record that the group is ready and serves from now on."""
        self._serving, self.startup = self.startup, None
        self._lacks_since = None
        self._num_rounds = 0
        self._served_since = self._watchdog.now
        for worker in self.workers:
            self._watchdog.mark_serving(worker)

    def count_round(self) -> None:
        """Count a finished round."""
        self._num_rounds += 1

    def lose(self, reason: str, *workers: WorkerId) -> None:
        """Record that the serving targets are lost, and which *workers* must be replaced if that is known."""
        if self._loss is None:
            self._loss, self._lost_at = reason, self._clock()
        self._lost.update(workers)

    @property
    def may_restart(self) -> bool:
        """Whether it is known which ranks are gone, or it is too late to wait for that."""
        return bool(self._lost) or self._loss is None or self._clock() - self._lost_at > FOUND_S

    def check(self) -> None:
        """Raise `TargetLostError` if the serving targets are lost."""
        if self._loss is not None:
            self._watchdog.end_round()
            raise TargetLostError(self._loss)

    def restart(self) -> GroupStartup:
        """Replace the ranks that are gone; end and replace the others too, if they cannot form the next group.

        Raises:
            EngineDeadError: the group was lost too often.
        """
        self._count_rebuild()
        before, gone = self._serving, self._gone()
        for worker in self.workers:
            self._watchdog.remove(worker)
            if worker not in gone:
                self._watchdog.add(worker)
        self._devices.release(gone)
        self._group.kill(gone)
        self._loss, self._lost, self._serving = None, set(), None
        self.workers = tuple(
            msgspec.structs.replace(worker, incarnation=worker.incarnation + (worker in gone))
            for worker in self.workers
        )
        self._setup = msgspec.structs.replace(self._setup, group=self._setup.group + 1)
        names = ", ".join(map(str, gone)) if len(gone) < len(self.workers) else "the target group"
        self._report(f"starting {names} again, attempt {self._num_rebuilds} of {MAX_REBUILDS}")
        return self._start(
            GroupStartup(self._group, self.workers, self._setup, self._devices, self._sizing.reuse, before=before)
        )

    def _gone(self) -> list[WorkerId]:
        """Return the ranks to replace: those that are lost, or all."""
        serving = self._serving
        is_reusable = serving is not None and all(serving.devices[worker] == "cpu" for worker in self.workers)
        return sorted(self._lost) if is_reusable and self._lost else list(self.workers)

    def _count_rebuild(self) -> None:
        """Count a rebuild, and fail if the group was lost too often: its requests may be what kills it."""
        if self._loss is not None:
            served_s = self._watchdog.now - self._served_since
            if self._num_rounds >= STEADY_ROUNDS or served_s >= STEADY_S:
                self._num_rebuilds = 0
            if self._num_rebuilds >= MAX_REBUILDS:
                raise EngineDeadError(
                    f"the target group was lost {MAX_REBUILDS + 1} times in a row, each time within "
                    f"{STEADY_ROUNDS} rounds; the last time: {self._loss}"
                )
        self._num_rebuilds += 1

    def drop_startup(self, failure: SlipstreamError) -> None:
        """Drop a startup that failed. Raises `EngineDeadError` if it was the last attempt."""
        if self._num_rebuilds >= MAX_REBUILDS:
            raise EngineDeadError(f"the target group could not be rebuilt in {MAX_REBUILDS} attempts: {failure}")
        logger.warning("the target group could not be started: %s", failure)
        self.startup = None

    def check_progress(self, startup: GroupStartup) -> None:
        """Fail a startup in which a rank that still runs does not form the next group.

        Raises:
            NoRoomError: the group that is rebuilt has waited too long for its place. It goes on waiting.
        """
        now = self._clock()
        self._note_lacking(startup, now)
        if startup.is_placed:
            if startup.late_survivors and now > self._rejoin_by:
                late = ", ".join(map(str, startup.late_survivors))
                self.failure = EngineDeadError(f"{late} did not form the next group within {REJOIN_S:.0f} s")
            return
        self._rejoin_by = now + REJOIN_S
        self._watchdog.mark_active("target")  # those that were placed wait for the others
        if self._lacks_since is not None and now - self._lacks_since > self._rebuild_timeout_s:
            raise NoRoomError(
                f"no room was found for {self.lacks} within {self._rebuild_timeout_s:.0f} s (rebuild_timeout_s): is a "
                "node gone?",
                NO_ROOM_RETRY_S,
            )

    def _note_lacking(self, startup: GroupStartup, now: float) -> None:
        """Record which ranks have no process, and since when there are any: another attempt does not reset that."""
        self._lacking = [worker for worker in startup.lacking if not self._watchdog.watches(worker)]
        if not self._lacking:
            self._lacks_since = None
        elif self._lacks_since is None:
            self._lacks_since = now

    @property
    def lacks(self) -> str:
        """The ranks for which there has been no room for a while; a process takes a moment to start."""
        since = self._lacks_since
        if since is None or self._clock() - since < min(STARTING_S, self._rebuild_timeout_s):
            return ""
        return ", ".join(map(str, self._lacking))
