"""The protocols through which the parts meet. `runtime` and `workers` know each other only by these."""

from collections.abc import Sequence as Seq
from typing import ClassVar, Protocol

import msgspec

from protos.config.engine import SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.draft_module import DraftRunner
from protos.messages import Abort, Request, RoundPlan, TokenOutput, Verdict, WorkerInfo
from protos.stats import PhaseTimes


class Proposer(Protocol):
    """Guesses what the target will say. Never decides anything: any draft is a valid draft.

    `on_worker` says whether it lives on the draft worker (handed a `DraftRunner`) or beside the controller. What it is
    fed of the target's features there, `protos.draft_module.LearnedProposer.features_of` says.
    """

    on_worker: ClassVar[bool]

    @classmethod
    def create(cls, config: SpeculativeConfig, runner: DraftRunner | None) -> "Proposer":
        """Return a proposer as *config* asks; *runner* is None beside the controller."""
        ...

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Return one draft a row, of 0 to `row.k` tokens."""
        ...


class SequenceListener:
    """What a proposer beside the controller inherits where it wants to know of sequences, from arrival to end.

    It is told in the controller's own thread; whatever takes long belongs into `prepare`. A sequence that is preempted,
    or computed again, goes on as the same one.
    """

    def prepare(self) -> None:
        """Do a slice, of a millisecond or so, of what takes long. Called once a round, while speculation is on."""

    def begin(self, key: int, request: Request) -> None:
        """A sequence arrived; *key*, from 1 on, is never used twice."""

    def grow(self, key: int, token_ids: Seq[int], probed: Seq[int]) -> None:
        """A round committed *token_ids*; *probed* is what the target says behind each probe of the row's draft."""

    def end(self, key: int, token_ids: Seq[int]) -> None:
        """The sequence ended, for whatever reason, as *token_ids*: prompt and output."""


class DraftService(msgspec.Struct, frozen=True, gc=False):
    """Whether an executor's draft worker can be counted on now.

    Attributes:
        is_up: rows may be planned with `k > 0`.
        epoch: names who drafts, from 1 on; goes into plans. A draft of a new epoch knows no sequence yet. 0 where
            nothing that drafts can be lost.
        changes: how often the service changed so far, by reason.
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
        """Whether the draft worker can be counted on now; changes only in `run`, `poll` and `rebuild`."""
        ...

    @property
    def times(self) -> PhaseTimes:
        """What the phases of all rounds took so far."""
        ...

    def start(self) -> WorkerInfo:
        """Load and warm up everything. Raises `ModelError` or `ConfigError`."""
        ...

    def run(self, plan: RoundPlan) -> list[Verdict]:
        """Run one round; one verdict for each row that samples or owes prompt log-probabilities, in order.

        Raises:
            TargetLostError: `rebuild` must be called; whatever the workers knew is gone.
        """
        ...

    def poll(self) -> None:
        """Read what the workers sent since the last call, without waiting. Raises `TargetLostError`."""
        ...

    def rebuild(self, for_s: float) -> bool:
        """Go on rebuilding a lost target group for at most *for_s* seconds; return whether it serves again.

        Raises:
            PlacementError: there is no place for it, and there was none for too long.
            EngineDeadError: it could not be rebuilt.
        """
        ...

    def shutdown(self) -> None:
        """Free everything. May be called twice."""
        ...
