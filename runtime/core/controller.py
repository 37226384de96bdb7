"""The loop around everything: admit, schedule, run, commit."""

import logging
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from msgspec import structs

from protos.errors import EngineDeadError, TargetLostError
from protos.interfaces import Executor, Inbox
from protos.messages import TokenOutput
from protos.stats import EngineStats, PhaseTimes, SpeculationState
from runtime.core.scheduler import Command, Scheduler
from runtime.core.speculation_policy import Policy
from runtime.core.timing import StepClock

logger = logging.getLogger(__name__)

REBUILD_SLICE_S = 0.1
"""While the targets are being rebuilt, requests and aborts are looked at this often."""

Result = TypeVar("Result")


class LocalInbox:
    """The inbox of an engine that is stepped by its caller: `wait` returns at once."""

    def __init__(self) -> None:
        self.stopped = False
        self._commands: list[Command] = []

    def put(self, commands: Iterable[Command]) -> None:
        """Add commands for the next step."""
        self._commands.extend(commands)

    def drain(self) -> list[Command]:
        """Return what was put since the last time."""
        commands, self._commands = self._commands, []
        return commands

    def wait(self) -> list[TokenOutput]:
        """Return at once."""
        return []


class Controller:
    """Runs rounds. `last_words` holds the final outputs of requests that a dead executor left behind."""

    def __init__(self, scheduler: Scheduler, policy: Policy, executor: Executor, inbox: Inbox) -> None:
        self.scheduler = scheduler
        self.policy = policy
        self.executor = executor
        self.inbox = inbox
        self.last_words: list[TokenOutput] = []
        self._clock = StepClock(scheduler.costs)
        self._is_lost = False
        self._num_losses = 0

    def step(self) -> list[TokenOutput]:
        """Run one round, or a part of a rebuilding; return what it added to each request.

        Raises:
            EngineDeadError: the executor failed; every request's end is in `last_words`.
        """
        ended = self.scheduler.admit(self.inbox.drain())
        if not self._guarded("between rounds", self._is_serving, ended):
            return ended
        began = time.monotonic()
        plan = self.scheduler.schedule(self.policy, self.executor.drafting)
        if not plan.rows:
            return ended or self.inbox.wait()
        verdicts = self._guarded(f"in round {plan.round}", lambda: self.executor.run(plan), ended)
        if verdicts is None:
            return ended
        outputs = self.scheduler.commit(plan, verdicts)
        self._clock.stepped(plan, outputs, self._times(), began)
        return ended + outputs

    def stats(self) -> EngineStats:
        """Return a picture of the engine's counters and gauges."""
        drafting = self.executor.drafting
        return structs.replace(
            self.scheduler.stats(),
            draft_changes=drafting.changes,
            guess_changes=dict(self.policy.changes),
            target_losses=self._num_losses,
            target_is_lost=self._is_lost,
            draft_is_away=not drafting.is_up,
            num_speculative_tokens=self.policy.current,
            speculation=self._state(),
            phases=self._times(),
            steps_s=self._clock.steps_s,
            guessed_s=self._clock.guessed_s,
            plain_s=self._clock.plain_s,
        )

    def _times(self) -> PhaseTimes:
        """What phases took, guesses made beside the controller included."""
        times = self.executor.times
        return structs.replace(times, propose_s=times.propose_s + self.scheduler.propose_s)

    def _state(self) -> SpeculationState:
        if not self.policy.limit:
            return "off"
        if not self.executor.drafting.is_up:
            return "no_draft"
        return "on" if self.policy.current else "paused"

    def _is_serving(self) -> bool:
        """Whether rounds can run; where the targets are lost, spend a little time on rebuilding them."""
        if self._is_lost:
            self._is_lost = not self.executor.rebuild(REBUILD_SLICE_S)
        else:
            self.executor.poll()
        return not self._is_lost

    def _guarded(self, when: str, act: Callable[[], Result], ended: list[TokenOutput]) -> Result | None:
        """Let the executor act; None where it lost its targets, and with them all work in flight."""
        try:
            return act()
        except TargetLostError as loss:
            self._give_up(loss)
        except EngineDeadError as death:
            self.last_words = ended + self.scheduler.fail_all(str(death))
            raise
        except Exception as failure:
            reason = f"the engine failed {when}: {type(failure).__name__}: {failure}"
            self.last_words = ended + self.scheduler.fail_all(reason)
            raise EngineDeadError(reason) from failure
        return None

    def _give_up(self, loss: TargetLostError) -> None:
        logger.warning("%s; rebuilding, %d request(s) go on from their tokens", loss, self.scheduler.num_unfinished)
        self._is_lost = True
        self._num_losses += 1
        self.scheduler.give_up()
