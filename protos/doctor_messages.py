"""What `slipstream doctor` and the processes it examines with say to each other, over a gang's channel."""

from typing import Literal

import msgspec

from protos.worker_messages import Died, Stop, StoreAddress


class Join(msgspec.Struct, frozen=True, tag=True):
    """Form *group* with the other ranks, who meet at *store*; answered by `Joined`.

    Attributes:
        is_near: whether its ranks share memory where they can, as target ranks do.
    """

    group: str
    store: StoreAddress
    rank: int
    size: int
    backend: str
    device: str
    is_near: bool


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Time an operation of *group*, which all its ranks are told to; answered by `Measured`.

    Attributes:
        what: "broadcast" by each rank in turn, or "ping": there and back between two.
        num_bytes: size of the tensor.
        repeats: how many operations one after the other.
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
    """The process runs. What it has: versions ("" where there is none), the names of its CUDA devices, its store."""

    host: str
    torch: str
    cuda: str
    nccl: str
    devices: tuple[str, ...]
    store: StoreAddress


class Joined(msgspec.Struct, frozen=True, tag=True):
    """The group is formed, *over* what; it took *seconds*."""

    seconds: float
    over: str


class Measured(msgspec.Struct, frozen=True, tag=True):
    """One operation takes *seconds*, and what arrives is what was sent."""

    seconds: float


class Trouble(msgspec.Struct, frozen=True, tag=True):
    """What was ordered could not be done."""

    reason: str


FromDiagnostics = Seen | Joined | Measured | Trouble | Died
