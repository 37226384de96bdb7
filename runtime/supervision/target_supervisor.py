"""Starts the target ranks, and replaces those that are lost. A draft may be started with the first group.

On CPUs the other ranks keep their processes and weights, and form the next group with the replacements. Otherwise, and
if that fails, all ranks are started again.
"""

import logging
import math
from collections.abc import Sequence as Seq

import msgspec

from protos.config.engine import ParallelConfig
from protos.errors import EngineDeadError, SlipstreamError, TargetLostError, TargetOutOfMemoryError
from protos.progress import ProgressCallback
from protos.worker_messages import Died, FromWorker, GroupLost, Setup, WorkerGroup, WorkerId
from runtime.supervision.kv_sizing import KVSizing
from runtime.supervision.rebuilds import Loss, RebuildCount
from runtime.supervision.room import Room
from runtime.supervision.startup import RANK_0, Devices, GroupStartup, StartError
from runtime.supervision.watchdog import Clock, Watchdog

logger = logging.getLogger(__name__)

FOUND_S = 3.0
"""After a rank reported that its group failed, the rank that is gone is found within this time, or all are replaced."""
EXPLAINED_S = 0.5
"""A rank that has left its group for want of memory says so at most this much later than others notice."""
AWAY_S = 30.0
"""Ranks on a machine from which nothing comes are waited for so long: their processes and weights outlive a cut of the
network, and another process takes longer to start. Ray takes longer to declare a machine dead, too."""
FEWER_AFTER_S = 10.0
"""After so long without room for all ranks, the group is started over fewer, if that is allowed."""
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
        parallel: over how many ranks, and how long a lost group may wait for room.
        machine: the name of this machine, as workers report theirs; empty if all workers are here.
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
        parallel: ParallelConfig,
        machine: str,
        report: ProgressCallback,
        clock: Clock,
    ) -> None:
        self._group, self._watchdog, self._setup = group, watchdog, setup
        self._devices, self._sizing = devices, sizing
        self._report, self._clock = report, clock
        self._machine, self._least_ranks = machine, parallel.min_tensor_parallel_size
        self._room = Room(parallel.rebuild_timeout_s, clock)
        self._all_ranks = setup.world
        self.workers = tuple(WorkerId("target", rank) for rank in range(setup.world))
        self._incarnations = dict.fromkeys(range(setup.world), 0)
        self.startup: GroupStartup | None = None
        self.failure: SlipstreamError | None = None  # why the startup failed
        self._is_elsewhere = False  # whether a worker died that may be on another machine
        self._ready_ranks = setup.world  # of the group that serves, or served last
        self._loss: Loss | None = None  # of the serving targets
        self._lost_at = 0.0
        self._serving: GroupStartup | None = None  # the startup of the group that serves, or served last
        self._rejoin_by = 0.0
        self._fewer_since = -math.inf  # when a group of fewer ranks was started last
        self._rebuilds = RebuildCount(clock)
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
        self.failure, self._is_elsewhere = None, False
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
            if failure.is_death and worker in self.startup.late_survivors:  # most likely it died with the others
                if not self.startup.is_placed:
                    self._replace_survivor(worker, self.startup)
                    return
                self._rebuilds.forgive()
            self.failure = self.failure or failure.error
            self._is_elsewhere |= failure.is_death and self.startup.may_be_elsewhere(worker, self._machine)
        except SlipstreamError as error:
            self.failure = self.failure or error

    def _replace_survivor(self, worker: WorkerId, startup: GroupStartup) -> None:
        """Replace a rank that died before it was told to form the next group; the others keep their processes."""
        self._report(f"starting {worker} again, too")
        self._watchdog.remove(worker)
        self._incarnations[worker.rank] += 1
        startup.replace(worker, WorkerId("target", worker.rank, self._incarnations[worker.rank]))
        self.workers = startup.workers

    def begin_serving(self) -> None:
        """Record that the group is ready and serves from now on."""
        self._serving, self.startup = self.startup, None
        self._room.note([])
        self._ready_ranks = len(self.workers)
        self._num_rounds = 0
        self._served_since = self._watchdog.now
        for worker in self.workers:
            self._watchdog.mark_serving(worker)

    def count_round(self) -> None:
        """Count a finished round."""
        self._num_rounds += 1

    def lose(self, reason: str, *workers: WorkerId) -> Loss:
        """Record that the serving targets are lost, and which *workers* must be replaced if that is known."""
        if self._loss is None:
            self._loss, self._lost_at = Loss(reason), self._clock()
        elif workers and not self._loss.gone:
            self._loss.reason = reason  # what was told before came from ranks that noticed it
        self._loss.gone.update(workers)
        return self._loss

    def lose_group(self, worker: WorkerId, lost: GroupLost) -> None:
        """Record that an operation of a rank's group failed, or that the rank has left the group for want of memory."""
        loss = self.lose(f"{worker} lost its group: {lost.reason}")
        if lost.out_of_memory:
            loss.shortage, loss.has_returned = lost.reason, True  # it runs

    def miss(self, worker: WorkerId, why: str) -> None:
        """Record that a serving rank is silent. With all workers of another machine, it is waited for: see `AWAY_S`."""
        if self._loss is not None and worker in self._loss.away:
            return
        reason = f"{worker} hangs: {why}"
        if self._is_cut_off(worker):
            loss = self.lose(reason)
            loss.away.add(worker)
            self._room.note(sorted(loss.away))
        else:
            self.lose(reason, worker)

    def _is_cut_off(self, worker: WorkerId) -> bool:
        """Whether nothing comes from its machine, which is not this one, and its process can form another group."""
        serving = self._serving
        if serving is None or not self._machine or not self._is_reusable():
            return False
        machine = serving.placed[worker].node
        beside = [other for other in self.workers if serving.placed[other].node == machine]
        return machine != self._machine and all(self._watchdog.is_silent(other) for other in beside)

    def hear(self, worker: WorkerId, message: FromWorker) -> None:
        """Record that a message has come from a rank; one that was away has returned."""
        if self._loss is not None and worker in self._loss.away and not isinstance(message, Died):
            self._loss.away.remove(worker)
            self._loss.has_returned = True
            self._report(f"{worker} is heard again after {self._clock() - self._lost_at:.0f} s")

    def may_restart(self) -> bool:
        """Whether it is known which ranks are gone, or it is too late to wait for that."""
        loss, waited_s = self._loss, self._clock() - self._lost_at
        if loss is None or not self._rebuilds.is_due:
            return self._rebuilds.is_due
        if waited_s > AWAY_S:
            loss.gone |= loss.away
        if loss.gone:
            return True
        return not loss.away and (loss.has_returned or waited_s > FOUND_S)

    def check_room(self) -> None:
        """Raise `NoRoomError` if lost ranks have had no process, or were not heard, for too long."""
        self._room.check()

    def check_in_round(self) -> None:
        """As `check`, once it is known whether the round took too much memory, which does not count as a loss."""
        loss = self._loss
        if loss is not None and (loss.gone or loss.shortage or self._clock() - self._lost_at >= EXPLAINED_S):
            loss.is_counted = not loss.shortage
            self.check()

    def check(self) -> None:
        """Raise `TargetLostError` if the serving targets are lost, `TargetOutOfMemoryError` for want of memory."""
        if (loss := self._loss) is not None:
            self._watchdog.end_round()
            raise TargetOutOfMemoryError(loss.shortage) if loss.shortage else TargetLostError(loss.reason)

    def restart(self) -> GroupStartup:
        """Replace the ranks that are gone; end and replace the others too, if they cannot form the next group.

        Raises:
            EngineDeadError: the group was lost too often.
        """
        served_s = self._watchdog.now - self._served_since
        attempt = self._rebuilds.begin(self._loss, rounds=self._num_rounds, served_s=served_s)
        before, gone = self._serving, self._gone()
        names = ", ".join(map(str, gone)) if 0 < len(gone) < len(self.workers) else "the target group"
        self._report(f"starting {names} again, {attempt}")
        return self._replace(gone, self._all_ranks, before)

    def _replace(self, gone: Seq[WorkerId], ranks: int, before: GroupStartup | None) -> GroupStartup:
        """End the workers *gone*, and start a group of *ranks* ranks, to which those of *before* that remain belong."""
        for worker in self.workers:
            self._watchdog.remove(worker)
            if worker not in gone:
                self._watchdog.add(worker)
        self._devices.release(gone)
        self._group.kill(gone)
        for worker in gone:
            self._incarnations[worker.rank] = worker.incarnation + 1
        self._loss = self._serving = None
        self.workers = tuple(WorkerId("target", rank, self._incarnations[rank]) for rank in range(ranks))
        is_resized = ranks != self._ready_ranks
        self._setup = msgspec.structs.replace(self._setup, group=self._setup.group + 1, world=ranks)
        decide = self._sizing.refit if is_resized else self._sizing.reuse
        return self._start(GroupStartup(self._group, self.workers, self._setup, self._devices, decide, before=before))

    def _gone(self) -> list[WorkerId]:
        """Return the ranks to replace: those that are lost, or all."""
        if len(self.workers) < self._all_ranks:  # room may have returned
            return list(self.workers)
        loss = self._loss
        return sorted(loss.gone) if loss is not None and loss.is_located and self._is_reusable() else [*self.workers]

    def _is_reusable(self) -> bool:
        """Whether ranks of the serving group can keep their processes when others are replaced."""
        serving = self._serving
        return serving is not None and all(serving.devices[worker] == "cpu" for worker in self.workers)

    def drop_startup(self, failure: SlipstreamError) -> None:
        """Drop a startup that failed. Raises `EngineDeadError` if it was the last attempt."""
        self._rebuilds.fail(failure, lost_s=self._clock() - self._lost_at, is_elsewhere=self._is_elsewhere)
        logger.warning("the target group could not be started: %s", failure)
        self.startup = None

    def check_progress(self, startup: GroupStartup) -> None:
        """Fail a startup in which a rank that still runs does not form the next group.

        Raises:
            NoRoomError: the group that is rebuilt has waited too long for its place. It goes on waiting.
        """
        now = self._clock()
        self._room.note([worker for worker in startup.lacking if not self._watchdog.watches(worker)])
        if startup.is_placed:
            if startup.late_survivors and now > self._rejoin_by:
                late = ", ".join(map(str, startup.late_survivors))
                self.failure = EngineDeadError(f"{late} did not form the next group within {REJOIN_S:.0f} s")
            return
        self._rejoin_by = now + REJOIN_S
        self._watchdog.mark_active("target")  # those that were placed wait for the others
        if min(self._room.lacking_s, now - self._fewer_since) > FEWER_AFTER_S:
            self._take_fewer(startup)
        self._room.check()

    def _take_fewer(self, startup: GroupStartup) -> None:
        """Start the group over fewer ranks, if that is allowed and there is room for them."""
        most = min(len(self.workers) - self._room.num_lacking, len(self.workers) - 1)
        ranks = None if self._least_ranks is None else self._sizing.fewer_ranks(most, self._least_ranks)
        if ranks is None:
            return
        self._fewer_since = self._clock()
        self._report(f"no room for {self.lacks}: starting the target group over {ranks} of {self._all_ranks} ranks")
        self._replace(startup.workers, ranks, None)

    @property
    def lacks(self) -> str:
        """The ranks of a lost group for which there is no room, or whose machine is not reached."""
        return self._room.lacks
