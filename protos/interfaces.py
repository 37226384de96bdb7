"""Protocols between the parts. `runtime` and `workers` depend on each other only through these."""

from collections.abc import Sequence as Seq
from typing import ClassVar, Protocol

import msgspec

from protos.config.engine import SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.draft_module import DraftRunner
from protos.messages import Abort, Request, RoundPlan, StepCosts, TokenOutput, Verdict, WorkerInfo
from protos.stats import PhaseTimes


class Proposer(Protocol):
    """Drafts tokens for the target to verify. Any draft is valid.

    `on_worker` is True if it runs on the draft worker, with a `DraftRunner`, and False if in the controller process.
    `protos.draft_module.LearnedProposer.features_of` defines which of the target's features it is fed.
    """

    on_worker: ClassVar[bool]

    @classmethod
    def create(cls, config: SpeculativeConfig, runner: DraftRunner | None) -> "Proposer":
        """Return a proposer for *config*; *runner* is None in the controller process."""
        ...

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Return one draft per row, of 0 to `row.k` tokens in at most `row.depth` levels."""
        ...


class SequenceListener:
    """Base of proposers in the controller process that follow sequences from arrival to end.

    The methods are called in the controller's thread; slow work belongs in `prepare`. A sequence that is preempted or
    recomputed remains the same one.
    """

    def prepare(self) -> None:
        """Do about a millisecond of slow work. Called once per round while speculation is on, and rarely while not."""

    def is_prepared(self, key: int) -> bool:
        """Whether that work is done for this sequence: before, nothing is found for it."""
        return True

    def begin(self, key: int, request: Request) -> None:
        """A sequence arrived; *key*, from 1 on, is never reused."""

    def grow(self, key: int, token_ids: Seq[int], probed: Seq[int]) -> None:
        """A round committed *token_ids*; *probed* are the target's next tokens after the probes of the row's draft."""

    def end(self, key: int, token_ids: Seq[int]) -> None:
        """The sequence ended, for any reason, as *token_ids*: prompt and output."""


class DraftService(msgspec.Struct, frozen=True, gc=False):
    """Whether an executor's draft worker is available.

    Attributes:
        is_up: rows may be planned with `k > 0`.
        epoch: number of the draft worker, from 1 on, for plans. A worker of a new epoch has no sequences yet. 0 if the
            draft cannot be lost.
        changes: number of changes so far, by reason.
    """

    is_up: bool = True
    epoch: int = 0
    changes: dict[str, int] = {}


ALWAYS_UP = DraftService()


class Inbox(Protocol):
    """Where a controller reads new requests and aborts. `stopped` is True once its loop must end."""

    stopped: bool

    def drain(self) -> list[Request | Abort]:
        """Return everything that has arrived, in order, without waiting."""
        ...

    def wait(self) -> list[TokenOutput]:
        """Wait a short time for something to arrive; return no outputs."""
        ...


class Executor(Protocol):
    """Runs rounds: propose, score, verify."""

    @property
    def drafting(self) -> DraftService:
        """Whether the draft worker is available; changes only in `run`, `poll` and `rebuild`."""
        ...

    @property
    def times(self) -> PhaseTimes:
        """Time spent in each phase so far."""
        ...

    def start(self) -> WorkerInfo:
        """Load and warm up everything. Raises `ModelError` or `ConfigError`."""
        ...

    def run(self, plan: RoundPlan) -> list[Verdict]:
        """Run one round; return a verdict for each row that samples or needs prompt log-probabilities, in order.

        Raises:
            TargetLostError: `rebuild` must be called; the workers' state is lost.
            StepOutOfMemoryError: the round counts as never run; a smaller one may fit.
        """
        ...

    def poll(self) -> StepCosts | None:
        """Read what the workers sent since the last call, without waiting. Raises `TargetLostError`.

        Returns:
            The costs of steps where they have changed: models began to run compiled. Mostly None.
        """
        ...

    def rebuild(self, for_s: float) -> WorkerInfo | None:
        """Continue rebuilding a lost target group for at most *for_s* seconds; describe it once it serves again.

        It may have fewer KV blocks than before, or more again, up to the number at the start.

        Raises:
            NoRoomError: the cluster has had no room for it for too long. Call it again: it goes on looking.
            EngineDeadError: it could not be rebuilt.
        """
        ...

    @property
    def lacks(self) -> str:
        """The workers of a lost target group for which there is no room; empty if there is, or none is lost."""
        ...

    def shutdown(self) -> None:
        """Free everything. May be called twice."""
        ...
