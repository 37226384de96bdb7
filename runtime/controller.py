"""The loop around everything: admit, schedule, run, commit."""

from collections.abc import Iterable
from typing import Protocol

from protos.errors import EngineDeadError
from protos.interfaces import Executor
from protos.messages import RoundPlan, TokenOutput, Verdict
from runtime.policy import Policy
from runtime.scheduler import Command, Scheduler
from runtime.stats import EngineStats


class Inbox(Protocol):
    """Where new requests and aborts come from."""

    def drain(self) -> list[Command]:
        """Return what came in since the last time, without waiting."""
        ...

    def wait(self) -> list[TokenOutput]:
        """Return, with nothing to show, when something has come in or it is time to look around."""
        ...


class LocalInbox:
    """The inbox of an engine in the caller's own thread; there is nobody to wait for."""

    def __init__(self) -> None:
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

    def step(self) -> list[TokenOutput]:
        """Run one round; return what it added to each request.

        Raises:
            EngineDeadError: the executor failed; every request's end is in `last_words`.
        """
        ended = self.scheduler.admit(self.inbox.drain())
        plan = self.scheduler.schedule(self.policy)
        if plan.is_empty:
            return ended or self.inbox.wait()
        verdicts = self._run(plan, ended)
        return ended + self.scheduler.commit(plan, verdicts)

    def stats(self) -> EngineStats:
        """Return a picture of the engine's counters and gauges."""
        return self.scheduler.stats()

    def _run(self, plan: RoundPlan, ended: list[TokenOutput]) -> list[Verdict]:
        try:
            return self.executor.run(plan)
        except Exception as failure:
            reason = f"the engine failed in round {plan.round}: {type(failure).__name__}: {failure}"
            self.last_words = ended + self.scheduler.fail_all(reason)
            raise EngineDeadError(reason) from failure
