"""`DistributedExecutor`: rounds run by a gang of worker processes, which may die, hang and come back. DESIGN section 4.

The controller's thread is the only one here. Whatever happens to a worker arrives as mail of the `WorkerGroup`. A draft
that is lost is replaced beside the rounds (`runtime.supervision.draft_supervisor`); a target rank that is lost ends the
whole target group: `run` raises `TargetLostError`, and `rebuild` starts the next group.
"""

import logging
import time
from collections.abc import Callable, Mapping

import msgspec

from proposers import registry
from protos.config.engine import EngineConfig, to_json
from protos.errors import EngineDeadError, PlacementError, SlipstreamError, TargetLostError
from protos.interfaces import ALWAYS_UP, DraftService
from protos.messages import RoundPlan, StepCosts, Verdict, WorkerInfo
from protos.progress import ProgressCallback
from protos.stats import PhaseTimes
from protos.worker_messages import (
    Allocate,
    Died,
    FromWorker,
    Loaded,
    Placed,
    Plan,
    Progress,
    RoundDone,
    Setup,
    Stop,
    WorkerFailed,
    WorkerGroup,
    WorkerId,
)
from runtime.supervision.draft_supervisor import DraftSupervisor
from runtime.supervision.kv_sizing import KVSizing
from runtime.supervision.round_times import PhaseTotals, RoundTimePredictor
from runtime.supervision.startup import RANK_0, Devices, GroupStartup, StartError
from runtime.supervision.watchdog import Clock, Watchdog

logger = logging.getLogger(__name__)


POLL_S = 0.25
"""While nothing comes in, hangs are looked for this often."""
SAY_EVERY_S = 30.0
MAX_REBUILDS = 3
STEADY_ROUNDS, STEADY_S = 50, 60.0
"""After so many rounds, or so long, a rebuilt group counts as sound, and the rebuilds before it are forgotten."""
DRAFT_AT_START_S = 60.0
"""The start waits this long for the first pair, then goes on without."""


def has_draft_worker(config: EngineConfig) -> bool:
    """Whether *config* asks for a draft on a worker of its own."""
    speculative = config.speculative
    if speculative is None or speculative.placement != "dedicated":
        return False
    return registry.worker_method(speculative) is not None


class DistributedExecutor:
    """An `Executor` over T target ranks and at most one draft.

    Args:
        gang: starts, watches and ends the processes; owned by this executor.
        config: a parsed configuration.
        say: told, in a line each, what is being done and waited for.
        clock: seconds, monotonic.
        backend: of torch.distributed; "nccl" on devices and "gloo" on CPUs where empty.
        may_share_devices: whether one device may serve several workers where there are too few.
    """

    def __init__(
        self,
        gang: WorkerGroup,
        config: EngineConfig,
        say: ProgressCallback = logger.info,
        clock: Clock = time.monotonic,
        *,
        backend: str = "",
        may_share_devices: bool = False,
    ) -> None:
        self._gang, self._config, self._say, self._clock = gang, config, say, clock
        self._rebuild_timeout_s = config.parallel.rebuild_timeout_s
        self._world = config.parallel.tensor_parallel_size
        self._setup = Setup(to_json(config), WorkerId("target"), self._world, "cpu", backend)
        self._devices = Devices(config.model.device, may_share=may_share_devices)
        self._watch = Watchdog(clock)
        has_draft = has_draft_worker(config)
        self._keeper = DraftSupervisor(gang, self._watch, self._draft_squad) if has_draft else None
        self._targets = tuple(WorkerId("target", rank) for rank in range(self._world))
        self._squad: GroupStartup | None = None
        self._squad_since = 0.0
        self._sizing = KVSizing()
        self._pace = RoundTimePredictor({})
        self._phases = PhaseTotals()
        self._failure: SlipstreamError | None = None  # why the squad that is being started cannot be
        self._loss: str | None = None  # why the serving targets are lost
        self._done: RoundDone | None = None
        self._num_rebuilds = 0
        self._num_rounds = 0
        self._served_since = 0.0
        self._said_at = clock()
        self._is_closed = False

    @property
    def drafting(self) -> DraftService:
        """See `Executor`. Proposers beside the controller, and drafts in target 0's process, are always up."""
        return ALWAYS_UP if self._keeper is None else self._keeper.service

    @property
    def times(self) -> PhaseTimes:
        """See `Executor`."""
        return self._phases.times

    def start(self) -> WorkerInfo:
        """See `Executor`. Returns when every worker is ready, and the first pair is formed if it comes in time."""
        try:
            return self._start()
        except Exception:
            self.shutdown()
            raise

    def _start(self) -> WorkerInfo:
        drafts = () if self._keeper is None else (self._keeper.worker,)
        plural = "" if self._world == 1 else "s"
        self._say(f"placing {self._world} target rank{plural}" + (" and a draft" if drafts else ""))
        squad = self._begin((*self._targets, *drafts), self._sizing.settle)
        while not squad.is_ready:
            self._pump(POLL_S, squad.waits_for)
            if self._failure is not None:
                raise self._failure
        info = self._describe(squad)
        self._enter_service(squad)
        self._await_draft()
        return info

    def run(self, plan: RoundPlan) -> list[Verdict]:
        """See `Executor`."""
        num_tokens = sum(row.length + row.k for row in plan.rows)
        message = Plan(plan)
        for worker in self._targets:
            self._gang.send(worker, message)
        if self._keeper is not None and self._keeper.is_serving:
            self._gang.send(self._keeper.worker, message)
            self._keeper.asked(plan.round)
        began = self._watch.now
        self._watch.begin_round(self._pace.predict(num_tokens))
        done = self._await(plan.round)
        self._watch.end_round()
        self._pace.update(num_tokens, self._watch.now - began)
        self._count_round(done)
        return list(done.verdicts)

    def poll(self) -> None:
        """See `Executor`."""
        self._pump(0.0)
        self._check()

    def rebuild(self, for_s: float) -> bool:
        """See `Executor`."""
        if self._squad is None:
            self._restart_targets()
        squad = self._squad
        if squad is not None:
            self._pump(for_s, squad.waits_for)
        if self._failure is not None:
            self._retry(self._failure)
        elif squad is not None and squad.is_ready:
            self._enter_service(squad)
            self._say("the target group serves again")
            return True
        elif squad is not None and not squad.is_placed:
            self._check_placement(squad)
        return False

    def shutdown(self) -> None:
        """See `Executor`."""
        if self._is_closed:
            return
        self._is_closed = True
        for worker in (*self._targets, *(() if self._keeper is None else (self._keeper.worker,))):
            self._gang.send(worker, Stop())
        self._gang.close()

    # Starting.

    def _begin(
        self, workers: tuple[WorkerId, ...], size: Callable[[Mapping[WorkerId, Loaded]], Allocate]
    ) -> GroupStartup:
        self._failure = None
        self._squad = squad = GroupStartup(self._gang, workers, self._setup, self._devices, size)
        self._squad_since = self._said_at = self._clock()
        squad.start()
        return squad

    def _draft_squad(self, worker: WorkerId) -> GroupStartup:
        """Return what starts a draft after the first one."""
        self._devices.release([WorkerId("draft", 0, worker.incarnation - 1)])
        return GroupStartup(self._gang, (worker,), self._setup, self._devices, self._sizing.as_before)

    def _describe(self, squad: GroupStartup) -> WorkerInfo:
        for worker in squad.workers:
            loaded = squad.loaded[worker]
            self._say(f"{worker} on {squad.devices[worker]}: {loaded.weight_bytes / 2**20:.0f} MiB of weights")
        self._say(self._sizing.summary)
        speculates = self._config.speculative is not None
        return msgspec.structs.replace(self._sizing.info, speculates=speculates, costs=self._costs(squad))

    def _costs(self, squad: GroupStartup) -> StepCosts | None:
        """Return what was measured of compiled models; eager ones were only timed to know a hang when we see one."""
        if self._config.model.enforce_eager:
            return None
        rank_0 = squad.measured(self._targets[RANK_0])
        draft_s = rank_0.draft_s if self._keeper is None else squad.measured(self._keeper.worker).step_s
        return StepCosts(rank_0.step_s, draft_s)

    def _enter_service(self, squad: GroupStartup) -> None:
        """The targets are ready for plans; so is a draft that was started with them."""
        self._squad = None
        self._pace = RoundTimePredictor(squad.measured(self._targets[RANK_0]).step_s)
        self._num_rounds = 0
        self._served_since = self._watch.now
        for worker in self._targets:
            self._watch.serves(worker)
        if self._keeper is not None:
            if self._keeper.worker in squad.workers:
                self._keeper.arrived()
            if squad.store is not None:
                self._keeper.targets_up(self._targets[RANK_0], squad.store)

    def _await_draft(self) -> None:
        until = self._clock() + DRAFT_AT_START_S
        while self._keeper is not None and not self._keeper.is_serving:
            if self._clock() > until:
                self._say(f"going on without the draft: still waiting for {self._keeper.waits_for}")
                return
            self._pump(POLL_S, self._keeper.waits_for)
            self._check()

    # Running.

    def _await(self, round_number: int) -> RoundDone:
        """Wait for the round's result, and notice what happens meanwhile."""
        while self._done is None or self._done.round != round_number:
            self._pump(POLL_S)
            self._check()
        done, self._done = self._done, None
        return done

    def _count_round(self, done: RoundDone) -> None:
        self._num_rounds += 1
        self._phases.add(done, None if self._keeper is None else self._keeper.propose_s(done.round))
        if self._keeper is not None:
            self._keeper.take_result(done)

    def _pump(self, timeout_s: float, waits_for: str = "") -> None:
        """Take all mail that is there, or that comes within *timeout_s*; then look for hangs."""
        mail = self._gang.receive(timeout_s)
        while mail:
            for worker, message in mail:
                self._take(worker, message)
            if self._done is not None:
                break  # the round's result goes first
            mail = self._gang.receive(0.0)
        self._look()
        if waits_for and self._clock() - self._said_at >= SAY_EVERY_S:
            self._said_at = self._clock()
            self._say(f"waiting for {waits_for}")

    def _take(self, worker: WorkerId, message: FromWorker) -> None:
        """Hand one message to whom it concerns."""
        self._watch.heard(worker)
        if isinstance(message, Placed):
            self._watch.add(worker)
        if isinstance(message, Progress):
            self._said_at = self._clock()
            self._say(f"{worker}: {message.text}")
        elif self._squad is not None and worker in self._squad.workers:
            self._start_on(self._squad, worker, message)
        elif worker.role == "draft":
            self._tell_keeper(worker, message)
        elif worker not in self._targets:
            return
        elif isinstance(message, RoundDone):
            self._done = message
        elif isinstance(message, Died | WorkerFailed):
            self._lose(f"{worker} {'died' if isinstance(message, Died) else 'failed'}: {message.reason}")
        else:
            self._tell_keeper(worker, message)

    def _start_on(self, squad: GroupStartup, worker: WorkerId, message: FromWorker) -> None:
        try:
            squad.take(worker, message)
        except StartError as failure:
            self._failure = self._failure or failure.error
        except SlipstreamError as error:
            self._failure = self._failure or error

    def _tell_keeper(self, worker: WorkerId, message: FromWorker) -> None:
        if self._keeper is not None:
            self._keeper.take(worker, message)

    def _look(self) -> None:
        """Let watched time pass, and act on who hangs."""
        before = self._watch.now
        self._watch.look()
        if self._keeper is not None and self._keeper.is_forming:
            self._watch.extend_round(self._watch.now - before)
        for worker, why in self._watch.silent():
            self._hangs(worker, why)
        overdue = None if self._done is not None else self._watch.overdue()
        if overdue is not None:
            self._lose(f"the target group hangs: {overdue}")
        if self._keeper is not None:
            self._keeper.tend()

    def _hangs(self, worker: WorkerId, why: str) -> None:
        if self._squad is not None and worker in self._squad.workers:
            self._start_on(self._squad, worker, Died(f"hangs: {why}"))
        elif worker.role == "target":
            self._lose(f"{worker} hangs: {why}")
        elif self._keeper is not None:
            self._keeper.lost(f"hangs: {why}")

    # Losing and rebuilding.

    def _lose(self, reason: str) -> None:
        self._loss = self._loss or reason

    def _check(self) -> None:
        """Raise `TargetLostError` where the serving targets are lost."""
        if self._loss is not None:
            self._watch.end_round()
            raise TargetLostError(self._loss)

    def _restart_targets(self) -> None:
        """End what is left of the group, and ask for the next one."""
        self._count_rebuild()
        self._done = None
        if self._keeper is not None:
            self._keeper.targets_down()
        for worker in self._targets:
            self._watch.remove(worker)
        self._devices.release(self._targets)
        self._gang.kill(self._targets)
        self._loss = None
        self._targets = tuple(
            msgspec.structs.replace(worker, incarnation=worker.incarnation + 1) for worker in self._targets
        )
        self._say(f"starting the target group again, attempt {self._num_rebuilds} of {MAX_REBUILDS}")
        self._begin(self._targets, self._sizing.as_before)

    def _count_rebuild(self) -> None:
        """Count, and give up a group that is lost again and again: what it dies of comes back with its requests."""
        if self._loss is not None:
            served_s = self._watch.now - self._served_since
            if self._num_rounds >= STEADY_ROUNDS or served_s >= STEADY_S:
                self._num_rebuilds = 0
            if self._num_rebuilds >= MAX_REBUILDS:
                raise EngineDeadError(
                    f"the target group was lost {MAX_REBUILDS + 1} times in a row, each time within "
                    f"{STEADY_ROUNDS} rounds; the last time: {self._loss}"
                )
        self._num_rebuilds += 1

    def _retry(self, failure: SlipstreamError) -> None:
        """An attempt failed: try the next, or give up."""
        if self._num_rebuilds >= MAX_REBUILDS:
            raise EngineDeadError(f"the target group could not be rebuilt in {MAX_REBUILDS} attempts: {failure}")
        logger.warning("the target group could not be started: %s", failure)
        self._squad = None

    def _check_placement(self, squad: GroupStartup) -> None:
        waited = self._clock() - self._squad_since
        if waited > self._rebuild_timeout_s:
            raise PlacementError(
                f"no place was found for {squad.waits_for.removesuffix(' to be placed')} within "
                f"{self._rebuild_timeout_s:.0f} s (rebuild_timeout_s): is a node gone?"
            )
