"""Messages between a frontend and a controller, and the interface of the channel that carries them.

A frontend sends `Commands`. The controller sends `LoadProgress` while it loads, then `Ready`, then `Outputs`. If it
fails, it sends `Failed`. A controller in a process of its own also sends `Alive`, whatever it does, and the channel
reports `Stalled` if it falls silent.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from protos.messages import Abort, Request, TokenOutput, WorkerInfo
from protos.stats import EngineStats

IDLE_S = 0.5
"""Longest time an idle controller waits for commands before it checks for a stop and sends statistics."""


class Commands(msgspec.Struct, frozen=True):
    """From a frontend. `stop` ends the controller's loop and abandons running requests."""

    requests: tuple[Request, ...] = ()
    aborts: tuple[str, ...] = ()
    stop: bool = False

    def unpack(self) -> Iterator[Request | Abort]:
        """Yield the requests and aborts one by one."""
        yield from self.requests
        if self.aborts:
            yield Abort(self.aborts)


class LoadProgress(msgspec.Struct, frozen=True, tag=True):
    """What the controller is loading, in one line."""

    text: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The controller is loaded and accepts requests."""

    info: WorkerInfo


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Outputs of one step, with a snapshot of the statistics if one is due."""

    outputs: list[TokenOutput]
    stats: EngineStats | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The controller has ended. `kind` is the class name of the error that ended it."""

    reason: str
    kind: str = "EngineDeadError"


class Alive(msgspec.Struct, frozen=True, tag=True):
    """The controller's process runs. Sent by a thread of its own, so during long steps too."""


class Stalled(msgspec.Struct, frozen=True, tag=True):
    """Nothing has come from the controller for too long. The next report, if any, means that it has continued."""

    reason: str
    retry_after_s: float


Report = LoadProgress | Ready | Outputs | Failed | Alive | Stalled


class Channel(Protocol):
    """A frontend's connection to one controller. `start` and `close` are called once each, on one event loop."""

    async def start(self, on_report: Callable[[Report], None]) -> None:
        """Start the controller; from now on call *on_report* with each report, on this event loop."""
        ...

    def send(self, commands: Commands) -> None:
        """Send *commands* without waiting. Commands to a controller that has ended are dropped."""
        ...

    async def close(self) -> None:
        """Stop the controller and free everything. *on_report* is not called afterwards."""
        ...
