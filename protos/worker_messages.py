"""What a controller and the workers of its gang say to each other, and the protocols that carry it. DESIGN section 4.

A gang is T target ranks and at most one draft. It starts in two phases: every worker is placed and says where it is
(`Placed`); then each is told its rank, its device and where its groups meet (`Setup`), loads (`Loaded`), is told how
many KV blocks all can hold (`Allocate`), warms up, and is `Ready`. From then on it gets `RoundPlan`s until `Stop`.

All messages are frozen msgspec structs and cross processes as msgpack.
"""

from collections.abc import Sequence as Seq
from typing import Literal, Protocol

import msgspec

from protos.messages import RoundPlan, Verdict, WorkerInfo

Role = Literal["target", "draft"]


class WorkerId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One worker. A worker that replaces another has the next `incarnation`; mail of the old one is dropped."""

    role: Role
    rank: int = 0
    incarnation: int = 0

    def __str__(self) -> str:
        name = self.role if self.role == "draft" else f"target rank {self.rank}"
        return name if not self.incarnation else f"{name} (restart {self.incarnation})"


class StoreAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a `TCPStore` listens. It is opened by target rank 0, on a port the system chose."""

    host: str
    port: int


# From the controller to a worker.


class Setup(msgspec.Struct, frozen=True, tag=True):
    """Who a worker is and what it loads.

    Attributes:
        config: the `EngineConfig`, as JSON.
        worker: which one it is.
        world: number of target ranks.
        device: "cpu", or "cuda:i" with i counted among the devices this worker sees.
        backend: of torch.distributed, "gloo" or "nccl".
        store: where the ranks of `tp` meet; None for a single rank, and for the draft.
    """

    config: str
    worker: WorkerId
    world: int
    device: str
    backend: str
    store: StoreAddress | None = None


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """How many KV blocks every worker holds, and the context length they leave: the minimum over workers.

    `vocab_size` is the target's, which the draft samples in.
    """

    num_blocks: int
    max_model_len: int
    vocab_size: int = 0


class FormPair(msgspec.Struct, frozen=True, tag=True):
    """Form `pair` number *epoch* in the background: target 0 and the draft meet at *store* under that prefix.

    Where target 0 listens for the draft's announcements, and under which key, it says in that store.
    """

    epoch: int
    store: StoreAddress


class Plan(msgspec.Struct, frozen=True, tag=True):
    """Run this round. `plan.epoch` names the pair that serves it; 0 means that no draft does."""

    plan: RoundPlan


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave the loop and exit."""


ToWorker = Setup | Allocate | FormPair | Plan | Stop


# From a worker to the controller.


class Placed(msgspec.Struct, frozen=True, tag=True):
    """The process runs. `devices` are those it sees, by name; empty on a CPU. `store` is offered by target rank 0."""

    host: str
    node: str
    pid: int
    devices: tuple[str, ...] = ()
    store: StoreAddress | None = None


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The weights are in place. `info.num_blocks` is how many KV blocks this worker could hold.

    `weight_bytes` counts this rank's own share.
    """

    info: WorkerInfo
    weight_bytes: int


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """Warmed up; waits for plans. `step_s` are measured seconds of one forward by number of tokens fed.

    `draft_s` are those of a draft that lives in the same process.
    """

    step_s: dict[int, float] = {}
    draft_s: dict[int, float] = {}


class PairReady(msgspec.Struct, frozen=True, tag=True):
    """This end of pair *epoch* is formed."""

    epoch: int


class PairFailed(msgspec.Struct, frozen=True, tag=True):
    """This end of pair *epoch* is broken, or could not be formed."""

    epoch: int
    reason: str


class Drafted(msgspec.Struct, frozen=True, tag=True):
    """The draft's ids of *round* are on their way over pair *epoch*, as int32 `[rows, width]`.

    `propose_s` is how long they took.

    Announced to target 0, which only then posts a receive, and to the controller, which counts.
    """

    round: int
    epoch: int
    propose_s: float = 0.0
    rows: int = 0
    width: int = 0


class Taken(msgspec.Struct, frozen=True, tag=True):
    """The draft took the features of *count* rounds that were sent to it. Said to target 0 alone."""

    count: int


class RoundDone(msgspec.Struct, frozen=True, tag=True):
    """Target 0's result of a round, and what its phases took in seconds.

    `draft_missed` says that the draft was waited for in vain.
    """

    round: int
    verdicts: Seq[Verdict]
    wait_s: float = 0.0
    score_s: float = 0.0
    verify_s: float = 0.0
    draft_missed: bool = False


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent twice a second from a thread of its own.

    `stage` says what the worker does; while it is not "serving", it may take as long as it takes.
    """

    stage: str
    round: int = -1


class Progress(msgspec.Struct, frozen=True, tag=True):
    """A line for whoever waits."""

    text: str


class WorkerFailed(msgspec.Struct, frozen=True, tag=True):
    """The worker gives up; `kind` is the class name of the error."""

    reason: str
    kind: str


class Died(msgspec.Struct, frozen=True, tag=True):
    """The worker's process is gone. Said by the gang, which watches it, not by the worker."""

    reason: str


FromWorker = (
    Placed
    | Loaded
    | WorkerReady
    | PairReady
    | PairFailed
    | Drafted
    | RoundDone
    | Heartbeat
    | Progress
    | WorkerFailed
    | Died
)


class Port(Protocol):
    """A worker's end of its channel. `send` may be called from any thread, `receive` from one."""

    def send(self, message: FromWorker) -> None:
        """Send without waiting."""
        ...

    def receive(self, timeout_s: float | None) -> ToWorker | None:
        """Return the next message, None where none came within *timeout_s* (None: wait for good)."""
        ...


class WorkerGroup(Protocol):
    """Starts, watches and ends the worker processes of one replica, and carries their mail.

    Used by one thread. Everything that happens comes out of `receive`, deaths too, in the order it was noticed.
    """

    def start(self, workers: Seq[WorkerId]) -> None:
        """Place and start these workers, in the background; each will say `Placed`, or the gang `Died`."""
        ...

    def send(self, worker: WorkerId, message: ToWorker) -> None:
        """Send without waiting. Mail to a worker that is gone is dropped."""
        ...

    def receive(self, timeout_s: float) -> list[tuple[WorkerId, FromWorker]]:
        """Return what came in, as soon as there is something, or nothing after *timeout_s*."""
        ...

    def kill(self, workers: Seq[WorkerId], *, waits: bool = True) -> None:
        """End these at once (SIGKILL). Their mail no longer comes out of `receive`.

        Returns when they are gone; without *waits* perhaps before, which matters where their node is cut off.
        """
        ...

    def close(self) -> None:
        """End every worker and give back what was placed. May be called twice."""
        ...
