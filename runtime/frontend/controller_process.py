"""The child's side of a `ProcessChannel`: runs the controller in its own process."""

import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import msgspec
import zmq

from protos.interfaces import Inbox
from protos.messages import Abort, Request, TokenOutput
from protos.progress import ProgressCallback
from runtime.frontend.channel import IDLE_S, Commands
from runtime.frontend.controller_loop import serve_controller
from runtime.frontend.process_channel import COMMANDS, REPORTS, Greeting, socket_address
from runtime.frontend.silence import signs_of_life
from runtime.subprocess import at_parents_death

if TYPE_CHECKING:
    from runtime.core.controller import Controller

PARENT_PIPE = 0
"""Standard input: the child's end of a pipe whose other end only the parent holds."""


class SocketInbox:
    """The `Inbox` of a controller in a process of its own."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self.stopped = False
        self._socket = socket
        self._decoder = msgspec.msgpack.Decoder(Commands)

    def drain(self) -> list[Request | Abort]:
        """See `Inbox`."""
        messages: list[Request | Abort] = []
        while self._socket.poll(0):
            commands = self._decoder.decode(self._socket.recv())
            self.stopped = self.stopped or commands.stop
            messages.extend(commands.unpack())
        return messages

    def wait(self) -> list[TokenOutput]:
        """See `Inbox`."""
        if not self.stopped:
            self._socket.poll(round(IDLE_S * 1000))
        return []


def serve_child(build: Callable[[str, Inbox, ProgressCallback], "Controller"]) -> NoReturn:
    """Build a controller from the parent's configuration and serve until stopped. Exits with 1 after a failure, else 0.

    Args:
        build: called with the configuration, the inbox the controller must read, and a callback for progress.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignore_signal)
    at_parents_death(signal.SIGCONT)  # if it is stopped, it continues, finds its pipe closed, and ends
    greeting = _read_greeting()
    threading.Thread(target=_exit_with_parent, args=(greeting.folder,), name="slipstream-parent", daemon=True).start()
    context = zmq.Context()

    def connect(kind: int, name: str) -> "zmq.Socket[bytes]":
        socket = context.socket(kind)
        socket.set_hwm(0)
        socket.connect(socket_address(Path(greeting.folder), name))
        return socket

    commands, reports = connect(zmq.PULL, COMMANDS), connect(zmq.PUSH, REPORTS)
    encoder, inbox = msgspec.msgpack.Encoder(), SocketInbox(commands)
    with signs_of_life(lambda: connect(zmq.PUSH, REPORTS)):
        succeeded = serve_controller(
            lambda report: build(greeting.config, inbox, report),
            inbox,
            lambda report: reports.send(encoder.encode(report)),
        )
    context.destroy(linger=1000)
    logging.shutdown()
    os._exit(0 if succeeded else 1)  # skips the teardown of libraries, which may take seconds


def _read_greeting() -> Greeting:
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(PARENT_PIPE, 65536)
        if not part:
            sys.exit("the engine process was started without its parent's greeting")
        line += part
    return msgspec.json.decode(line, type=Greeting)


def _ignore_signal(number: int, frame: FrameType | None) -> None:
    """Do nothing: the parent decides when to stop. `SIG_IGN` would be inherited by subprocesses."""


def _exit_with_parent(folder: str) -> None:
    """Wait for the pipe to close, which means that the parent has died; remove its sockets and exit."""
    while os.read(PARENT_PIPE, 65536):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
