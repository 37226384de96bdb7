"""Between a front end and the controller: what is said, and the loop that answers.

A front end posts `Mail`; the controller's side posts `Ready`, then `Outputs`, or `Failed`. All are
msgspec structs. `ThreadChannel` keeps the controller in a thread of this process; `runtime.frontend.process_channel`
keeps it in a child process behind ZMQ sockets. Front ends see only `Channel`.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from protos.errors import SlipstreamError
from protos.interfaces import Inbox
from protos.messages import Abort, Request, TokenOutput, WorkerInfo
from protos.progress import ProgressCallback
from protos.stats import EngineStats

log = logging.getLogger("slipstream")

IDLE_S = 0.5
"""An idle controller looks up this often, so that statistics settle and a stop is never missed."""

STATS_EVERY_S = 0.25
SILENT_FOR_S = 1.0
"""A controller that has nothing to tell says so this often; a longer silence means a long step, or worse."""


class Mail(msgspec.Struct, frozen=True):
    """From a front end. `stop` ends the controller's loop; whatever runs is given up."""

    requests: tuple[Request, ...] = ()
    aborts: tuple[str, ...] = ()
    stop: bool = False


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The controller is loaded and serves."""

    info: WorkerInfo


class Said(msgspec.Struct, frozen=True, tag=True):
    """What the controller is doing while it loads, in a line."""

    text: str


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """What one step produced, with a snapshot when one is due."""

    outputs: list[TokenOutput]
    stats: EngineStats | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The controller is gone. `kind` is the class name of the error that ended it."""

    reason: str
    kind: str = "EngineDeadError"


Report = Ready | Said | Outputs | Failed


class Steps(Protocol):
    """The part of the controller that the loop needs."""

    def step(self) -> list[TokenOutput]:
        """Run one round, or wait for mail when there is nothing to do."""
        ...

    def stats(self) -> EngineStats:
        """Return a snapshot."""
        ...


class Host(Protocol):
    """A built engine: the controller and whatever it owns."""

    @property
    def controller(self) -> Steps:
        """The controller, which reads the inbox it was built with."""
        ...

    @property
    def info(self) -> WorkerInfo:
        """What the loaded executor said."""
        ...

    def shutdown(self) -> None:
        """Free everything."""
        ...


class Channel(Protocol):
    """A front end's way to one controller. `start` and `close` once each, on one event loop."""

    async def start(self, deliver: Callable[[Report], None]) -> None:
        """Start the controller; from now on *deliver* is called on this event loop with each report."""
        ...

    def send(self, mail: Mail) -> None:
        """Post *mail* without waiting. Mail to a controller that is gone is dropped."""
        ...

    async def close(self) -> None:
        """Stop the controller and free everything. *deliver* is not called afterwards."""
        ...


def run_controller(host: Host, inbox: Inbox, post: Callable[[Outputs], None]) -> None:
    """Step until the inbox says stop, posting outputs, statistics when they changed, and a sign of life."""
    controller, sent, due, spoke = host.controller, EngineStats(), 0.0, time.monotonic()
    while not inbox.stopped:
        outputs = controller.step()
        stats = None
        if (now := time.monotonic()) >= due:
            due = now + STATS_EVERY_S
            fresh = controller.stats()
            if fresh != sent:
                stats = sent = fresh
        if outputs or stats is not None or now - spoke >= SILENT_FOR_S:
            spoke = now
            post(Outputs(outputs, stats))


def serve_controller(build: Callable[[ProgressCallback], Host], inbox: Inbox, post: Callable[[Report], None]) -> bool:
    """Build a host and run it to its end, reporting progress, readiness and failure. False after a failure."""
    host = None
    try:
        host = build(lambda text: post(Said(text)))
        post(Ready(host.info))
        run_controller(host, inbox, post)
    except SlipstreamError as error:
        if error.__cause__ is not None:
            log.exception("the controller failed")
        post(Failed(str(error), type(error).__name__))
        return False
    except Exception as error:
        log.exception("the controller failed")
        post(Failed(f"the controller failed: {type(error).__name__}"))
        return False
    finally:
        if host is not None:
            host.shutdown()
    return True


def unpack(mail: Mail) -> Iterable[Request | Abort]:
    """The messages in *mail*, as the controller wants them."""
    yield from mail.requests
    if mail.aborts:
        yield Abort(mail.aborts)


class ThreadInbox:
    """The inbox of a controller in a thread of the front end's process."""

    def __init__(self) -> None:
        self.stopped = False
        self._mail: queue.SimpleQueue[Mail] = queue.SimpleQueue()
        self._held: list[Mail] = []

    def put(self, mail: Mail) -> None:
        """Add *mail*; may be called from any thread."""
        self._mail.put(mail)

    def drain(self) -> list[Request | Abort]:
        """See `Inbox`."""
        while not self._mail.empty():
            self._held.append(self._mail.get())
        held, self._held = self._held, []
        self.stopped = self.stopped or any(mail.stop for mail in held)
        return [message for mail in held for message in unpack(mail)]

    def wait(self) -> list[TokenOutput]:
        """See `Inbox`."""
        if self.stopped:
            return []
        try:
            self._held.append(self._mail.get(timeout=IDLE_S))
        except queue.Empty:
            pass
        else:
            self.stopped = self.stopped or self._held[-1].stop
        return []


class ThreadChannel:
    """A controller in a thread of this process.

    Args:
        build: called in that thread with the inbox the controller must read, and with what tells of progress.
    """

    def __init__(self, build: Callable[[Inbox, ProgressCallback], Host]) -> None:
        self._build = build
        self._inbox = ThreadInbox()
        self._thread: threading.Thread | None = None
        self._closing = False

    async def start(self, deliver: Callable[[Report], None]) -> None:
        """See `Channel`."""
        loop = asyncio.get_running_loop()

        def hand_over(report: Report) -> None:
            if not self._closing:
                deliver(report)

        def post(report: Report) -> None:
            if not self._closing:
                loop.call_soon_threadsafe(hand_over, report)

        def serve() -> None:
            serve_controller(lambda say: self._build(self._inbox, say), self._inbox, post)

        self._thread = threading.Thread(target=serve, name="slipstream-controller", daemon=True)
        self._thread.start()

    def send(self, mail: Mail) -> None:
        """See `Channel`."""
        self._inbox.put(mail)

    async def close(self) -> None:
        """See `Channel`."""
        self._closing = True
        self._inbox.put(Mail(stop=True))
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
