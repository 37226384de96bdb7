"""The controller in a child process, spoken to as msgpack over ZMQ sockets in a private folder.

Each side notices the other's death at once: the child reads a pipe that only its parent writes, and
the parent waits for the child. The first line on that pipe is the child's `Hello`.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec
import zmq
import zmq.asyncio

from protos.interfaces import Inbox
from protos.messages import Abort, Request, TokenOutput
from protos.progress import ProgressCallback
from runtime.frontend.channel import IDLE_S, Failed, Host, Mail, Report, serve_controller, unpack
from runtime.subprocess import socket_folder

STOP_GRACE_S = 5.0
"""A child that was told to stop is killed after this long."""

LIFELINE = 0
"""The child's end of the pipe its parent holds: standard input."""


class Hello(msgspec.Struct, frozen=True):
    """What a child is told first: where the sockets are, and its configuration as JSON text."""

    folder: str
    config: str


def _address(folder: Path, name: str) -> str:
    return f"ipc://{folder / name}"


class ProcessChannel:
    """A `runtime.frontend.channel.Channel` to a controller in a child process.

    Args:
        command: starts the child, which must call `serve_child`.
        config: handed to the child's builder; JSON text.
    """

    def __init__(self, command: Sequence[str], config: str) -> None:
        self._command = tuple(command)
        self._config = config
        self._folder = socket_folder()
        self._context = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
        self._up: zmq.Socket[bytes] | None = None
        self._down: zmq.asyncio.Socket | None = None
        self._child: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The child's process id, once started."""
        return None if self._child is None else self._child.pid

    async def start(self, deliver: Callable[[Report], None]) -> None:
        """See `Channel`."""
        self._up = self._context.socket(zmq.PUSH)
        self._bind(self._up, "up")
        self._down = zmq.asyncio.Socket(self._context, zmq.PULL)
        self._bind(self._down, "down")
        self._child = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        hello = msgspec.json.encode(Hello(str(self._folder), self._config))
        pipe = self._child.stdin
        if pipe is not None:
            pipe.write(hello + b"\n")
        self._watcher = asyncio.create_task(self._watch(self._child, self._down, deliver))

    def _bind(self, socket: "zmq.Socket[bytes] | zmq.asyncio.Socket", name: str) -> None:
        socket.set_hwm(0)
        socket.linger = 0
        socket.bind(_address(self._folder, name))

    async def _watch(
        self, child: asyncio.subprocess.Process, down: zmq.asyncio.Socket, deliver: Callable[[Report], None]
    ) -> None:
        """Deliver reports until the child is gone, then what it had still sent, then that it is gone."""
        receiver = asyncio.create_task(self._receive(down, deliver))
        try:
            code = await child.wait()
        finally:
            receiver.cancel()
            await asyncio.gather(receiver, return_exceptions=True)
        while await down.poll(timeout=50):
            deliver(self._decoder.decode(await down.recv()))
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        deliver(Failed(f"the engine process ended ({how})"))

    async def _receive(self, down: zmq.asyncio.Socket, deliver: Callable[[Report], None]) -> None:
        while True:
            deliver(self._decoder.decode(await down.recv()))
            await asyncio.sleep(0)  # what has come already is received without a pause, and readers need theirs

    def send(self, mail: Mail) -> None:
        """See `Channel`."""
        if self._up is not None:
            with contextlib.suppress(zmq.Again):
                self._up.send(self._encoder.encode(mail), zmq.NOBLOCK)

    async def close(self) -> None:
        """See `Channel`."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self._child is not None:
            await self._end(self._child)
        for socket in (self._up, self._down):
            if socket is not None:
                socket.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _end(self, child: asyncio.subprocess.Process) -> None:
        self.send(Mail(stop=True))
        try:
            await asyncio.wait_for(child.wait(), STOP_GRACE_S)
        except TimeoutError:
            child.kill()
            await child.wait()

    def kill(self) -> None:
        """End the child at once."""
        if self._child is not None and self._child.returncode is None:
            self._child.kill()


class SocketInbox:
    """The inbox of a controller in a child process."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self.stopped = False
        self._socket = socket
        self._decoder = msgspec.msgpack.Decoder(Mail)

    def drain(self) -> list[Request | Abort]:
        """See `Inbox`."""
        messages: list[Request | Abort] = []
        while self._socket.poll(0):
            mail = self._decoder.decode(self._socket.recv())
            self.stopped = self.stopped or mail.stop
            messages.extend(unpack(mail))
        return messages

    def wait(self) -> list[TokenOutput]:
        """See `Inbox`."""
        if not self.stopped:
            self._socket.poll(round(IDLE_S * 1000))
        return []


def _read_hello() -> Hello:
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(LIFELINE, 65536)
        if not part:
            sys.exit("the engine process was started without its parent's greeting")
        line += part
    return msgspec.json.decode(line, type=Hello)


def _leave_to_parent(number: int, frame: FrameType | None) -> None:
    """The parent decides when to stop, so that answers can finish; an ignored signal would be inherited."""


def _end_with_parent(folder: str) -> None:
    """Leave at once when the pipe closes: the parent is gone, and cannot remove the sockets itself."""
    while os.read(LIFELINE, 65536):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def serve_child(build: Callable[[str, Inbox, ProgressCallback], Host]) -> NoReturn:
    """Be the child of a `ProcessChannel`: build from the configuration, serve, and exit: 1 after a failure, else 0.

    Args:
        build: called with the configuration, the inbox the controller must read, and what tells of progress.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave_to_parent)
    hello = _read_hello()
    threading.Thread(target=_end_with_parent, args=(hello.folder,), name="slipstream-lifeline", daemon=True).start()
    context = zmq.Context()
    up, down = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket, name in ((up, "up"), (down, "down")):
        socket.set_hwm(0)
        socket.connect(_address(Path(hello.folder), name))
    encoder, inbox = msgspec.msgpack.Encoder(), SocketInbox(up)
    succeeded = serve_controller(
        lambda say: build(hello.config, inbox, say), inbox, lambda report: down.send(encoder.encode(report))
    )
    context.destroy(linger=1000)
    logging.shutdown()
    os._exit(0 if succeeded else 1)  # nothing is left to do, and libraries may take seconds to take themselves apart
