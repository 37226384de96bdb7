"""Messages between a controller and its worker group, and the protocols of their transport.

A group has T target ranks and at most one draft. It starts in two phases: every worker is placed and reports its host
(`Placed`); then each receives its rank, device and rendezvous store (`Setup`), loads the weights (`Loaded`), receives
the number of KV blocks (`Allocate`), warms up, and is ready (`WorkerReady`). Then it receives `Plan`s until `Stop`.
If another target rank is lost, those that remain receive `Rejoin`, and start again from `Loaded`.

All messages are frozen msgspec structs and cross processes as msgpack.
"""

from collections.abc import Sequence as Seq
from typing import Literal, Protocol

import msgspec

from protos.messages import RoundPlan, Verdict, WorkerInfo

Role = Literal["target", "draft"]


class WorkerId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One worker. A replacement has the next `incarnation`; messages of the old worker are dropped."""

    role: Role
    rank: int = 0
    incarnation: int = 0

    def __str__(self) -> str:
        name = self.role if self.role == "draft" else f"target rank {self.rank}"
        return name if not self.incarnation else f"{name} (restart {self.incarnation})"


class StoreAddress(msgspec.Struct, frozen=True, array_like=True):
    """Address of a `TCPStore`, opened by target rank 0 on a free port."""

    host: str
    port: int


# From the controller to a worker.


class Setup(msgspec.Struct, frozen=True, tag=True):
    """A worker's rank, device and configuration.

    Attributes:
        config: the `EngineConfig`, as JSON.
        worker: its id.
        world: number of target ranks.
        device: "cpu", or "cuda:i" among the devices visible to this worker.
        backend: of torch.distributed, "gloo" or "nccl".
        store: rendezvous of the tensor-parallel ranks; None for a single rank, and for the draft.
        group: the number of their group; a group that follows another has the next one.
    """

    config: str
    worker: WorkerId
    world: int
    device: str
    backend: str
    store: StoreAddress | None = None
    group: int = 0


class Rejoin(msgspec.Struct, frozen=True, tag=True):
    """Another rank of this target rank's group is being replaced: keep the weights, and form group number *group*.

    The ranks meet at *store*. From then on as after `Setup`: `Loaded`, `Allocate`, `WorkerReady`.
    """

    store: StoreAddress
    group: int


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """The number of KV blocks of every worker and the context length: the minimum over workers.

    `vocab_size` is the target's, which the draft uses for sampling. `prefix_states` is how many recurrent states every
    target rank keeps for the prefix cache.
    """

    num_blocks: int
    max_model_len: int
    vocab_size: int = 0
    prefix_states: int = 0


class FormDraftChannel(msgspec.Struct, frozen=True, tag=True):
    """Form draft channel number *epoch* in the background: target rank 0 and the draft meet at *store*.

    Target rank 0 publishes the address and key for the draft's messages in that store.
    """

    epoch: int
    store: StoreAddress


class Plan(msgspec.Struct, frozen=True, tag=True):
    """Run this round. `plan.epoch` is the number of its draft channel; 0: no draft."""

    plan: RoundPlan


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave the loop and exit."""


ToWorker = Setup | Rejoin | Allocate | FormDraftChannel | Plan | Stop


# From a worker to the controller.


class Placed(msgspec.Struct, frozen=True, tag=True):
    """The process runs. Target rank 0 has a `store`.

    `devices` are the names of its visible devices, empty on a CPU; `visible_devices` is CUDA_VISIBLE_DEVICES, if set.
    """

    host: str
    node: str
    pid: int
    devices: tuple[str, ...] = ()
    store: StoreAddress | None = None
    visible_devices: str | None = None


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The weights are loaded. `info.num_blocks` is the number of KV blocks that fit on this worker.

    `weight_bytes` counts this rank's own share. A target rank also reports the bytes that its KV caches may take and
    those of one block, and over how many ranks the model can be split.
    """

    info: WorkerInfo
    weight_bytes: int
    cache_bytes: int = 0
    block_bytes: int = 0
    splits: tuple[int, ...] = ()


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """Warmed up. `step_s` are measured seconds of one forward by number of tokens fed.

    `draft_s` are those of a draft in the same process. `rows_ahead`: see `WorkerInfo`.
    """

    step_s: dict[int, float] = {}
    draft_s: dict[int, float] = {}
    rows_ahead: int = 0


class DraftChannelReady(msgspec.Struct, frozen=True, tag=True):
    """This end of draft channel *epoch* is formed."""

    epoch: int


class DraftChannelFailed(msgspec.Struct, frozen=True, tag=True):
    """This end of draft channel *epoch* is lost, or could not be formed."""

    epoch: int
    reason: str


class Drafted(msgspec.Struct, frozen=True, tag=True):
    """The draft tokens of *round* were sent over draft channel *epoch*. `propose_s` is the time spent drafting."""

    round: int
    epoch: int
    propose_s: float = 0.0


class RoundDone(msgspec.Struct, frozen=True, tag=True):
    """Target rank 0's result of a round, and the seconds spent in its phases.

    `draft_missed`: the draft did not arrive before its deadline.
    """

    round: int
    verdicts: Seq[Verdict]
    wait_s: float = 0.0
    score_s: float = 0.0
    verify_s: float = 0.0
    draft_missed: bool = False


class RoundOutOfMemory(msgspec.Struct, frozen=True, tag=True):
    """Target rank 0 has too little memory for a round, which counts as never run: see `StepOutOfMemoryError`."""

    round: int
    reason: str
    keeps_state: bool


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent twice a second from a separate thread.

    `stage` is what the worker is doing; `cpu_s` are the seconds of CPU time that its process has used.
    """

    stage: str
    round: int = -1
    cpu_s: float = 0.0


class Progress(msgspec.Struct, frozen=True, tag=True):
    """A line about the progress of the start, for the user."""

    text: str


class WorkerFailed(msgspec.Struct, frozen=True, tag=True):
    """The worker failed; `kind` is the class name of the error."""

    reason: str
    kind: str


class GroupLost(msgspec.Struct, frozen=True, tag=True):
    """An operation of this target rank's group failed, since another rank is gone. It waits for `Rejoin`.

    `out_of_memory`: this rank has left its group itself, for want of memory. No rank is gone.
    """

    reason: str
    out_of_memory: bool = False


class Died(msgspec.Struct, frozen=True, tag=True):
    """The worker's process is gone. Reported by the worker group, which watches it."""

    reason: str


FromWorker = (
    Placed
    | Loaded
    | WorkerReady
    | DraftChannelReady
    | DraftChannelFailed
    | Drafted
    | RoundDone
    | RoundOutOfMemory
    | Heartbeat
    | Progress
    | WorkerFailed
    | GroupLost
    | Died
)


class Port(Protocol):
    """A worker's end of its channel. `send` may be called from any thread, `receive` from one."""

    def send(self, message: FromWorker) -> None:
        """Send without waiting."""
        ...

    def receive(self, timeout_s: float | None) -> ToWorker | None:
        """Return the next message; None if none arrived within *timeout_s* (None: no limit)."""
        ...


class WorkerGroup(Protocol):
    """Starts, watches and ends the worker processes of one replica, and transports their messages.

    Used by one thread. `receive` returns all events, deaths included, in the order in which they were noticed.
    """

    def start(self, workers: Seq[WorkerId]) -> None:
        """Place and start these workers in the background; `receive` returns `Placed` or `Died` for each."""
        ...

    def send(self, worker: WorkerId, message: ToWorker) -> None:
        """Send without waiting. Messages to a worker that is gone are dropped."""
        ...

    def receive(self, timeout_s: float) -> list[tuple[WorkerId, FromWorker]]:
        """Return the messages that arrived, as soon as there are any; none after *timeout_s*."""
        ...

    def kill(self, workers: Seq[WorkerId], *, waits: bool = True) -> None:
        """End these at once (SIGKILL). `receive` no longer returns their messages.

        Returns when they are gone; without *waits* possibly before, for nodes that cannot be reached.
        """
        ...

    def prepare_spare(self) -> None:
        """Start a process, in the background, that waits to replace a lost worker. May do nothing."""
        ...

    def close(self) -> None:
        """End every worker and release its resources. May be called twice."""
        ...
