"""Messages between `slipstream doctor` and its probe processes, over a worker group's channel."""

from typing import Literal

import msgspec

from protos.worker_messages import Died, Stop, StoreAddress


class Join(msgspec.Struct, frozen=True, tag=True):
    """Form *group* with the other ranks, which meet at *store*; answered by `Joined`.

    Attributes:
        is_near: whether its ranks use shared memory if possible, as target ranks do.
    """

    group: str
    store: StoreAddress
    rank: int
    size: int
    backend: str
    device: str
    is_near: bool


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Time an operation of *group*; sent to all its ranks, answered by `Measured`.

    Attributes:
        what: "broadcast" by each rank in turn, or "ping": a round trip between two ranks.
        num_bytes: size of the tensor.
        repeats: number of operations.
    """

    group: str
    what: Literal["broadcast", "ping"]
    num_bytes: int
    repeats: int


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Leave *group*. Not answered."""

    group: str


ToDiagnostics = Join | Measure | Leave | Stop


class Seen(msgspec.Struct, frozen=True, tag=True):
    """The process runs. Reports library versions ("" if missing), the names of its CUDA devices, and its store."""

    host: str
    torch: str
    cuda: str
    nccl: str
    devices: tuple[str, ...]
    store: StoreAddress


class Joined(msgspec.Struct, frozen=True, tag=True):
    """The group was formed in *seconds*; *over* names the transport."""

    seconds: float
    over: str


class Measured(msgspec.Struct, frozen=True, tag=True):
    """One operation takes *seconds*; the received data was correct."""

    seconds: float


class Trouble(msgspec.Struct, frozen=True, tag=True):
    """The operation failed."""

    reason: str


FromDiagnostics = Seen | Joined | Measured | Trouble | Died
