"""A channel to a controller in a thread of the frontend's process."""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from protos.interfaces import Inbox
from protos.messages import Abort, Request, TokenOutput
from protos.progress import ProgressCallback
from runtime.frontend.channel import IDLE_S, Commands, Report
from runtime.frontend.controller_loop import serve_controller

if TYPE_CHECKING:
    from runtime.core.controller import Controller


class ThreadInbox:
    """The `Inbox` of a controller in a thread."""

    def __init__(self) -> None:
        self.stopped = False
        self._queue: queue.SimpleQueue[Commands] = queue.SimpleQueue()
        self._held: list[Commands] = []

    def put(self, commands: Commands) -> None:
        """Add *commands*; may be called from any thread."""
        self._queue.put(commands)

    def drain(self) -> list[Request | Abort]:
        """See `Inbox`."""
        while not self._queue.empty():
            self._held.append(self._queue.get())
        held, self._held = self._held, []
        self.stopped = self.stopped or any(commands.stop for commands in held)
        return [message for commands in held for message in commands.unpack()]

    def wait(self) -> list[TokenOutput]:
        """See `Inbox`."""
        if self.stopped:
            return []
        try:
            self._held.append(self._queue.get(timeout=IDLE_S))
        except queue.Empty:
            pass
        else:
            self.stopped = self.stopped or self._held[-1].stop
        return []


class ThreadChannel:
    """A `Channel` to a controller in a thread of this process.

    Args:
        build: called in that thread with the inbox the controller must read, and a callback for progress.
    """

    def __init__(self, build: Callable[[Inbox, ProgressCallback], "Controller"]) -> None:
        self._build = build
        self._inbox = ThreadInbox()
        self._thread: threading.Thread | None = None
        self._closing = False

    async def start(self, on_report: Callable[[Report], None]) -> None:
        """See `Channel`."""
        loop = asyncio.get_running_loop()

        def forward(report: Report) -> None:
            if not self._closing:
                on_report(report)

        def send(report: Report) -> None:
            if not self._closing:
                loop.call_soon_threadsafe(forward, report)

        def serve() -> None:
            serve_controller(lambda report: self._build(self._inbox, report), self._inbox, send)

        self._thread = threading.Thread(target=serve, name="slipstream-controller", daemon=True)
        self._thread.start()

    def send(self, commands: Commands) -> None:
        """See `Channel`."""
        self._inbox.put(commands)

    async def close(self) -> None:
        """See `Channel`."""
        self._closing = True
        self._inbox.put(Commands(stop=True))
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
