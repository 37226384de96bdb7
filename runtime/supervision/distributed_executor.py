"""`DistributedExecutor`: runs rounds on worker processes, which may die or hang and are then replaced.

It has no threads of its own: the controller's thread reads the workers' messages from the `WorkerGroup`, deaths too. A
lost draft is replaced while rounds go on (`runtime.supervision.draft_supervisor`). If a target rank is lost, `run`
raises `TargetLostError`, and `rebuild` starts the next group (`runtime.supervision.target_supervisor`).
"""

import logging
import time

import msgspec

from protos.config.engine import EngineConfig, to_json
from protos.errors import StepOutOfMemoryError
from protos.interfaces import ALWAYS_UP, DraftService
from protos.messages import RoundPlan, Verdict, WorkerInfo
from protos.progress import ProgressCallback
from protos.stats import PhaseTimes
from protos.worker_messages import (
    Died,
    FromWorker,
    GroupLost,
    Plan,
    Progress,
    RoundDone,
    RoundOutOfMemory,
    Setup,
    Stop,
    WorkerFailed,
    WorkerGroup,
    WorkerId,
)
from runtime.supervision.draft_supervisor import DraftSupervisor, has_draft_worker
from runtime.supervision.kv_sizing import KVSizing
from runtime.supervision.round_times import PhaseTotals, RoundTimePredictor
from runtime.supervision.startup import Devices, GroupStartup, step_costs
from runtime.supervision.target_supervisor import TargetSupervisor
from runtime.supervision.watchdog import Clock, Watchdog

logger = logging.getLogger(__name__)

POLL_S = 0.25
"""Longest wait for messages before hangs are looked for."""
REPORT_EVERY_S = 30.0
DRAFT_AT_START_S = 60.0
"""`start` waits this long for the draft to be connected, then returns without it."""


class DistributedExecutor:
    """An `Executor` over T target ranks and at most one draft worker.

    Args:
        group: starts, watches and ends the processes; owned by this executor.
        config: a parsed configuration.
        report: called with a line about each thing that is done or waited for.
        clock: seconds, monotonic.
        backend: of torch.distributed; if empty, "nccl" on devices and "gloo" on CPUs.
        machine: the name of this machine, as its workers report it; empty if all workers are here.
        may_share_devices: whether one device may serve several workers if there are too few.
    """

    def __init__(
        self,
        group: WorkerGroup,
        config: EngineConfig,
        report: ProgressCallback = logger.info,
        clock: Clock = time.monotonic,
        *,
        backend: str = "",
        machine: str = "",
        may_share_devices: bool = False,
    ) -> None:
        self._group, self._config, self._report_line, self._clock = group, config, report, clock
        self._setup = Setup(to_json(config), WorkerId("target"), config.parallel.tensor_parallel_size, "cpu", backend)
        self._devices = Devices(config.model.device, may_share=may_share_devices)
        self._sizing = KVSizing()
        self._watchdog = Watchdog(clock)
        self._targets = TargetSupervisor(
            group,
            self._watchdog,
            self._setup,
            self._devices,
            self._sizing,
            parallel=config.parallel,
            machine=machine,
            report=self._report,
            clock=clock,
        )
        has_draft = has_draft_worker(config)
        self._draft = DraftSupervisor(group, self._watchdog, self._make_draft_startup) if has_draft else None
        self._predictor = RoundTimePredictor({})
        self._phases = PhaseTotals()
        self._done: RoundDone | RoundOutOfMemory | None = None
        self._reported_at = clock()
        self._is_closed = False

    @property
    def drafting(self) -> DraftService:
        """See `Executor`. Proposers in the controller's process and drafts in target 0's process are always up."""
        return ALWAYS_UP if self._draft is None else self._draft.service

    @property
    def times(self) -> PhaseTimes:
        """See `Executor`."""
        return self._phases.times

    def start(self) -> WorkerInfo:
        """See `Executor`. Returns when every worker is ready and the draft is connected, or is late."""
        try:
            return self._start()
        except Exception:
            self.shutdown()
            raise

    def run(self, plan: RoundPlan) -> list[Verdict]:
        """See `Executor`."""
        num_tokens = sum(row.length + row.k for row in plan.rows)
        message = Plan(plan)
        for worker in self._targets.workers:
            self._group.send(worker, message)
        if self._draft is not None:
            self._draft.send(message)
        began = self._watchdog.now
        self._watchdog.begin_round(self._predictor.predict(num_tokens))
        done = self._await_result(plan.round)
        self._watchdog.end_round()
        if isinstance(done, RoundOutOfMemory):
            raise StepOutOfMemoryError(done.reason, keeps_state=done.keeps_state)
        self._predictor.update(num_tokens, self._watchdog.now - began)
        self._count_round(done)
        return list(done.verdicts)

    def poll(self) -> None:
        """See `Executor`."""
        self._read_messages(0.0)
        self._targets.check()

    def rebuild(self, for_s: float) -> WorkerInfo | None:
        """See `Executor`."""
        if not self._targets.may_restart():
            self._read_messages(for_s)
            self._targets.check_room()
            return None
        startup = self._targets.startup or self._restart_targets()
        self._read_messages(for_s, startup.waits_for)
        if self._targets.failure is not None:
            self._targets.drop_startup(self._targets.failure)
        elif startup.is_ready:
            self._begin_serving(startup)
            self._report("the target group serves again")
            return self._sizing.info
        else:
            self._targets.check_progress(startup)
        return None

    @property
    def lacks(self) -> str:
        """See `Executor`."""
        return self._targets.lacks

    def shutdown(self) -> None:
        """See `Executor`."""
        if self._is_closed:
            return
        self._is_closed = True
        for worker in (*self._targets.workers, *self._drafts()):
            self._group.send(worker, Stop())
        self._group.close()

    def _start(self) -> WorkerInfo:
        drafts = self._drafts()
        self._report(f"placing {', '.join(map(str, (*self._targets.workers, *drafts)))}")
        startup = self._targets.start(drafts)
        while not startup.is_ready:
            self._read_messages(POLL_S, startup.waits_for)
            if self._targets.failure is not None:
                raise self._targets.failure
        info = self._describe(startup)
        self._begin_serving(startup)
        self._await_draft()
        return info

    def _drafts(self) -> tuple[WorkerId, ...]:
        return () if self._draft is None else (self._draft.worker,)

    def _make_draft_startup(self, worker: WorkerId) -> GroupStartup:
        """Return the startup of a draft that replaces another."""
        self._devices.release([WorkerId("draft", 0, worker.incarnation - 1)])
        return GroupStartup(self._group, (worker,), self._setup, self._devices, self._sizing.for_draft)

    def _restart_targets(self) -> GroupStartup:
        self._done = None
        if self._draft is not None:
            self._draft.targets_down()
        return self._targets.restart()

    def _describe(self, startup: GroupStartup) -> WorkerInfo:
        """Report devices and memory; return what the controller needs."""
        for worker in startup.workers:
            loaded = startup.loaded[worker]
            where = f"on {startup.devices[worker]} (pid {startup.placed[worker].pid})"
            self._report(f"{worker} {where}: {loaded.weight_bytes / 2**20:.0f} MiB of weights")
        self._report(self._sizing.summary)
        speculates = self._config.speculative is not None
        # Costs of eager models only serve to detect hangs.
        costs = None if self._config.model.enforce_eager else step_costs(startup, self._targets.rank_0, self._drafts())
        rows_ahead = startup.measured(self._targets.rank_0).rows_ahead
        return msgspec.structs.replace(self._sizing.info, speculates=speculates, costs=costs, rows_ahead=rows_ahead)

    def _begin_serving(self, startup: GroupStartup) -> None:
        """Begin to serve with the workers of *startup*, all of which wait for plans."""
        self._targets.begin_serving()
        self._group.prepare_spare()
        self._predictor = RoundTimePredictor(startup.measured(self._targets.rank_0).step_s)
        if self._draft is not None:
            if self._draft.worker in startup.workers:
                self._draft.mark_ready()
            if startup.store is not None:
                self._draft.targets_up(self._targets.rank_0, startup.store)

    def _await_draft(self) -> None:
        until = self._clock() + DRAFT_AT_START_S
        while self._draft is not None and not self._draft.is_serving:
            if self._clock() > until:
                self._report(f"going on without the draft: still waiting for {self._draft.waits_for}")
                return
            self._read_messages(POLL_S, self._draft.waits_for)
            self._targets.check()

    def _await_result(self, round_number: int) -> RoundDone | RoundOutOfMemory:
        while self._done is None or self._done.round != round_number:
            self._read_messages(POLL_S)
            self._targets.check_in_round()
        done, self._done = self._done, None
        return done

    def _count_round(self, done: RoundDone) -> None:
        self._targets.count_round()
        self._phases.add(done, None if self._draft is None else self._draft.propose_s(done.round))
        if self._draft is not None:
            self._draft.take_result(done)

    def _read_messages(self, timeout_s: float, waits_for: str = "") -> None:
        """Handle all messages that are there or arrive within *timeout_s*, then look for hangs."""
        messages = self._group.receive(timeout_s)
        while messages:
            for worker, message in messages:
                self._take(worker, message)
            if self._done is not None:
                break  # return the round's result first
            messages = self._group.receive(0.0)
        self._check_hangs()
        if waits_for and self._clock() - self._reported_at >= REPORT_EVERY_S:
            self._report(f"waiting for {waits_for}")

    def _take(self, worker: WorkerId, message: FromWorker) -> None:
        """Pass one message to the supervisor of its worker. Messages of replaced workers are dropped."""
        if worker not in (*self._targets.workers, *self._drafts()):
            return
        self._watchdog.heard(worker, message)
        self._targets.hear(worker, message)
        if isinstance(message, Progress):
            self._report(f"{worker}: {message.text.removeprefix(f'{worker}: ')}")
        elif self._targets.is_starting(worker):
            self._targets.take(worker, message)
        elif isinstance(message, RoundDone | RoundOutOfMemory):
            self._done = message
        elif worker.role == "target" and isinstance(message, Died | WorkerFailed):
            how = "died" if isinstance(message, Died) else "failed"
            self._targets.lose(f"{worker} {how}: {message.reason}", worker)
        elif isinstance(message, GroupLost):
            self._targets.lose_group(worker, message)
        elif self._draft is not None:
            self._draft.take(worker, message)

    def _check_hangs(self) -> None:
        """Advance the watchdog's time, and replace workers that hang."""
        before = self._watchdog.now
        self._watchdog.tick()
        if self._draft is not None and self._draft.is_forming:
            self._watchdog.extend_round(self._watchdog.now - before)
        for worker, why in self._watchdog.silent():
            self._handle_hang(worker, why)
        overdue = None if self._done is not None else self._watchdog.overdue()
        if overdue is not None:
            self._targets.lose(f"the target group hangs: {overdue}", *self._targets.workers)
        if self._draft is not None:
            self._draft.tick()

    def _handle_hang(self, worker: WorkerId, why: str) -> None:
        if self._targets.is_starting(worker):
            self._targets.take(worker, Died(f"hangs: {why}"))
        elif worker.role == "target":
            self._targets.miss(worker, why)
        elif self._draft is not None:
            self._draft.lose(f"hangs: {why}")

    def _report(self, line: str) -> None:
        self._reported_at = self._clock()
        self._report_line(line)
