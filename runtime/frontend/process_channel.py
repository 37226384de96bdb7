"""A channel to a controller in a child process: msgpack over ZMQ sockets in a private folder.

The child ends when the pipe on its standard input closes, and the parent waits for the child's exit. The first line on
that pipe is a `Greeting`. `runtime.frontend.controller_process` is the child's side.
"""

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from runtime.frontend.channel import Commands, Failed, Report
from runtime.frontend.delivery import deliver
from runtime.subprocess import socket_folder

STOP_GRACE_S = 5.0
"""A child that does not stop within this time is killed."""
COMMANDS, REPORTS = "commands", "reports"
"""Names of the two sockets: to the controller, and from it."""


class Greeting(msgspec.Struct, frozen=True):
    """The first message to a child: the folder of the sockets, and its configuration as JSON text."""

    folder: str
    config: str


def socket_address(folder: Path, name: str) -> str:
    """Return the ZMQ address of the socket *name*, `COMMANDS` or `REPORTS`."""
    return f"ipc://{folder / name}"


class ProcessChannel:
    """A `runtime.frontend.channel.Channel` to a controller in a child process.

    Args:
        command: starts the child, which must call `runtime.frontend.controller_process.serve_child`.
        config: JSON text, passed to the child's builder.
    """

    def __init__(self, command: Sequence[str], config: str) -> None:
        self._command = tuple(command)
        self._config = config
        self._folder = socket_folder()
        self._context = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._commands: zmq.Socket[bytes] | None = None
        self._reports: zmq.asyncio.Socket | None = None
        self._child: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The child's process id, once started."""
        return None if self._child is None else self._child.pid

    async def start(self, on_report: Callable[[Report], None]) -> None:
        """See `Channel`."""
        self._commands = self._context.socket(zmq.PUSH)
        self._bind(self._commands, COMMANDS)
        self._reports = zmq.asyncio.Socket(self._context, zmq.PULL)
        self._bind(self._reports, REPORTS)
        self._child = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        greeting = msgspec.json.encode(Greeting(str(self._folder), self._config))
        pipe = self._child.stdin
        if pipe is not None:
            pipe.write(greeting + b"\n")
        self._watcher = asyncio.create_task(self._watch(self._child, self._reports, on_report))

    def _bind(self, socket: "zmq.Socket[bytes] | zmq.asyncio.Socket", name: str) -> None:
        socket.set_hwm(0)
        socket.linger = 0
        socket.bind(socket_address(self._folder, name))

    async def _watch(
        self, child: asyncio.subprocess.Process, reports: zmq.asyncio.Socket, on_report: Callable[[Report], None]
    ) -> None:
        """Pass on the child's reports, and `Failed` once it has exited."""
        code = await deliver(reports, child.wait(), on_report, self.kill)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        on_report(Failed(f"the engine process ended ({how})"))

    def send(self, commands: Commands) -> None:
        """See `Channel`."""
        if self._commands is not None:
            with contextlib.suppress(zmq.Again):
                self._commands.send(self._encoder.encode(commands), zmq.NOBLOCK)

    async def close(self) -> None:
        """See `Channel`."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self._child is not None:
            await self._stop(self._child)
        for socket in (self._commands, self._reports):
            if socket is not None:
                socket.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _stop(self, child: asyncio.subprocess.Process) -> None:
        self.send(Commands(stop=True))
        try:
            await asyncio.wait_for(child.wait(), STOP_GRACE_S)
        except TimeoutError:
            child.kill()
            await child.wait()

    def kill(self) -> None:
        """Kill the child."""
        if self._child is not None and self._child.returncode is None:
            self._child.kill()
