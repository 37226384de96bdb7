"""The step loop: admit requests, plan a step, run it on the workers, commit the result.

Every engine has one `Controller`. `LLM` in one process calls `step` from its callers' threads
(`cluster.engine.LocalEngine`). HTTP and gRPC servers have it in a child process, and engines on Ray in an actor;
there the loop is `runtime.frontend.controller_loop.run_controller`, which calls `step` until its inbox is stopped.
"""

import _signal  # type: ignore[import-not-found]  # signal's functions without their enums, which took 20 us of a step
import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from msgspec import structs

from protos.errors import EngineDeadError, NoRoomError, StepOutOfMemoryError, TargetLostError
from protos.interfaces import Executor, Inbox
from protos.messages import Abort, Request, RoundPlan, StepCosts, TokenOutput, Verdict, WorkerInfo
from protos.stats import EngineStats, Outage, PhaseTimes, SpeculationState
from runtime.core.scheduler import Scheduler
from runtime.core.stats import StepClock
from runtime.policy.base import FinishedStep, Policy

logger = logging.getLogger(__name__)

REBUILD_SLICE_S = 0.1
"""While the targets are being rebuilt, `step` reads the inbox this often."""

Result = TypeVar("Result")


class LocalInbox:
    """The inbox of an engine that its caller steps: `wait` returns at once."""

    def __init__(self) -> None:
        self.stopped = False
        self._commands: deque[Request | Abort] = deque()  # threads may add to it while it is read

    def has_aborts(self) -> bool:
        """Whether aborts wait for a step."""
        return any(isinstance(command, Abort) for command in tuple(self._commands))

    def put(self, commands: Iterable[Request | Abort]) -> None:
        """Add commands for the next step."""
        self._commands.extend(commands)

    def drain(self) -> list[Request | Abort]:
        """See `Inbox`."""
        return [self._commands.popleft() for _ in range(len(self._commands))]

    def wait(self) -> list[TokenOutput]:
        """See `Inbox`."""
        return []


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let a KeyboardInterrupt that comes in the block wait for its end: what is half done would be lost.

    It comes in the main thread alone, so steps of other threads are not interrupted. A program's own handler of SIGINT
    is left as it is.
    """
    handler = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or _signal.getsignal(signal.SIGINT) is not handler:
        yield
        return
    came: list[int] = []
    _signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        _signal.signal(signal.SIGINT, handler)
    if came:
        raise KeyboardInterrupt


class Controller:
    """Runs steps. After the executor failed, `final_outputs` has the last outputs of all unfinished requests."""

    def __init__(self, scheduler: Scheduler, policy: Policy, executor: Executor, inbox: Inbox) -> None:
        self.scheduler = scheduler
        self.policy = policy
        self.executor = executor
        self.inbox = inbox
        self.final_outputs: list[TokenOutput] = []
        self.is_stepping = False
        self._outputs: list[TokenOutput] = []  # of this step, and of those before that were interrupted
        info = scheduler.info
        self._clock = StepClock(info.costs, is_awaited=info.device == "cpu", runs_ahead=info.rows_ahead > 0)
        self._lookup_s = 0.0  # of all steps so far
        self._outage: Outage | None = None
        self._num_losses = 0

    @property
    def info(self) -> WorkerInfo:
        """The loaded model, as the executor reported it."""
        return self.scheduler.info

    def shutdown(self) -> None:
        """Free the executor's workers."""
        self.executor.shutdown()

    def step(self) -> list[TokenOutput]:
        """Run one step; return what it added to each request. While the targets are lost, rebuild them instead.

        Raises:
            EngineDeadError: the executor failed; see `final_outputs`.
        """
        self.is_stepping = True
        try:
            self._step(self._outputs)
        except KeyboardInterrupt:
            # What the workers know of the step is not known: every sequence is sent and computed again.
            self.scheduler.requeue_all()
            raise
        finally:
            self.is_stepping = False
        outputs, self._outputs = self._outputs, []
        return outputs

    def _step(self, outputs: list[TokenOutput]) -> None:
        with _uninterrupted():
            outputs += self.scheduler.admit(self.inbox.drain())  # new requests, aborts
            if not self._poll(outputs):
                return  # lost targets are being rebuilt
            began = time.monotonic()
            plan = self.scheduler.schedule(self.policy, self.executor.drafting)  # rows, blocks, draft tokens
        if not plan.rows:
            if not outputs:
                outputs += self.inbox.wait()
            return
        verdicts = self._run(plan, outputs)  # propose, score and verify, on the workers
        if verdicts is None:
            return  # the targets were lost, or ran out of memory
        with _uninterrupted():
            committed = self.scheduler.commit(plan, verdicts)  # the only place where tokens are added
            outputs += committed
            self._report(plan, verdicts, committed, time.monotonic() - began)

    def _report(self, plan: RoundPlan, verdicts: list[Verdict], outputs: list[TokenOutput], seconds: float) -> None:
        """Report a committed step to what learns from it."""
        draft_s = self._clock.add(plan, verdicts, outputs, self._times(), seconds)
        before, self._lookup_s = self._lookup_s, self.scheduler.propose_s
        lookup_s = self._lookup_s - before
        num_tokens = sum([len(output.token_ids) for output in outputs])
        is_up = self.executor.drafting.is_up
        if is_up or self.scheduler.proposers is not None:  # otherwise the step shows nothing of drafts
            self.policy.end_step(FinishedStep(plan, verdicts, num_tokens, draft_s, seconds, lookup_s, is_up))

    def _poll(self, ended: list[TokenOutput]) -> bool:
        """Read the workers' messages, or continue rebuilding lost targets; return whether a step can run."""
        if self._outage is not None:
            self._rebuild(self._outage, ended)
        else:
            costs = self._guard("between rounds", self.executor.poll, ended)
            if costs is not None:
                self._revise(costs)
        return self._outage is None

    def _rebuild(self, outage: Outage, ended: list[TokenOutput]) -> None:
        """Continue to rebuild the lost targets. While there has been no room for too long, every request ends."""
        try:
            info = self._guard("between rounds", lambda: self.executor.rebuild(REBUILD_SLICE_S), ended)
        except NoRoomError as error:
            self._refuse(structs.replace(outage, lacks=self.executor.lacks, retry_after_s=error.retry_after_s), ended)
            return
        if info is not None:
            self.scheduler.resize(info.num_blocks, info.prefix_states)
        self._outage = None if info else structs.replace(outage, lacks=self.executor.lacks, retry_after_s=None)

    def _refuse(self, outage: Outage, ended: list[TokenOutput]) -> None:
        """End every request, those that have just come too, with an error that says when to send it again."""
        if self._outage is None or self._outage.retry_after_s is None:
            logger.warning("%s; requests are refused until there is", outage)
        failed = self.scheduler.fail_all(str(outage))
        ended += [structs.replace(output, retry_after_s=outage.retry_after_s) for output in failed]
        self._outage = outage

    def _revise(self, costs: StepCosts) -> None:
        """Use new costs of steps in the policy and in estimates."""
        self._clock.revise(costs)
        self.policy.revise(costs)

    def _run(self, plan: RoundPlan, ended: list[TokenOutput]) -> list[Verdict] | None:
        return self._guard(f"in round {plan.round}", lambda: self._try(plan, ended), ended)

    def _try(self, plan: RoundPlan, ended: list[TokenOutput]) -> list[Verdict] | None:
        """Run the plan; None if there is too little memory for it."""
        try:
            return self.executor.run(plan)
        except StepOutOfMemoryError as shortage:
            logger.warning(
                "out of memory in round %d of %d rows, steps are smaller now: %s", plan.round, len(plan.rows), shortage
            )
            ended += self.scheduler.give_up(plan, shortage)
            if isinstance(shortage, TargetLostError):
                raise
        return None

    def _guard(self, when: str, call: Callable[[], Result], ended: list[TokenOutput]) -> Result | None:
        """Call the executor; return None if it lost its targets and all requests were queued again."""
        try:
            return call()
        except TargetLostError as loss:
            self._requeue_all(loss)
        except NoRoomError:
            raise
        except EngineDeadError as death:
            self.final_outputs = ended + self.scheduler.fail_all(str(death))
            raise
        except Exception as failure:
            reason = f"the engine failed {when}: {type(failure).__name__}: {failure}"
            self.final_outputs = ended + self.scheduler.fail_all(reason)
            raise EngineDeadError(reason) from failure
        return None

    def _requeue_all(self, loss: TargetLostError) -> None:
        num_requests = self.scheduler.num_unfinished
        logger.warning("%s; rebuilding, %d request(s) continue from their tokens", loss, num_requests)
        self._outage = Outage(str(loss), time.time())
        self._num_losses += 1
        self.scheduler.requeue_all()

    def stats(self) -> EngineStats:
        """Return a snapshot of the engine's counters and gauges."""
        drafting = self.executor.drafting
        return structs.replace(
            self.scheduler.stats(),
            draft_changes=drafting.changes,
            speculation_changes=dict(self.policy.changes),
            target_losses=self._num_losses,
            outage=self._outage,
            draft_is_down=not drafting.is_up,
            num_speculative_tokens=self.policy.current,
            predicted_speedup=self.policy.predicted_speedup,
            speculation=self._speculation_state(),
            phases=self._times(),
            steps_s=self._clock.steps_s,
            speculative_s=self._clock.speculative_s,
            plain_s=self._clock.plain_s,
        )

    def _times(self) -> PhaseTimes:
        """Return the seconds of each phase, including proposers in this process."""
        times = self.executor.times
        return structs.replace(times, propose_s=times.propose_s + self.scheduler.propose_s)

    def _speculation_state(self) -> SpeculationState:
        if not self.policy.limit:
            return "off"
        if not self.executor.drafting.is_up:
            return "no_draft"
        return "on" if self.policy.current else "paused"
