"""Processes that compile and follow grammars, each forked from one that has read the vocabulary. The parent's side.

A grammar can be slow in ways that no limit of the grammar library bounds, and the library holds the interpreter's lock
while it advances. So grammars run in processes (`protos.grammars.fork`), which can be left behind and killed.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from protos.grammars.fork import LENGTH, Refusal, Vocabulary, framed
from protos.guidance import GrammarError

START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {} import main; main()"
LOWEST_PRIORITY = 19
CHUNK = 1 << 18

Message = TypeVar("Message")


class HostEndedError(Exception):
    """A process has ended."""


class GrammarHost:
    """Starts a process for each caller, by forking one that has read the vocabulary. May be used from any thread.

    Args:
        module: its `main` calls `protos.grammars.fork.fork_for_each`.
        load_vocabulary: called by `start`.
    """

    def __init__(self, module: str, load_vocabulary: Callable[[], Vocabulary]) -> None:
        self._module, self._load_vocabulary = module, load_vocabulary
        self._lock = threading.Lock()
        self._first: _FirstProcess | None = None

    @property
    def is_ready(self) -> bool:
        """Whether `fork` is quick."""
        return self._first is not None

    def start(self, timeout_s: float = 60.0) -> None:
        """Start the first process, unless it runs. Returns when it has read the vocabulary, after seconds.

        Raises:
            GrammarError: the vocabulary cannot be used.
            HostEndedError: the process did not start.
            Exception: whatever `load_vocabulary` raises.
        """
        with self._lock:
            if self._first is None:
                first = _FirstProcess(self._module)
                try:
                    first.load(self._load_vocabulary(), timeout_s)
                except BaseException:
                    first.end()
                    raise
                self._first = first

    def fork(self) -> "GrammarProcess":
        """Return a new process. Raises `HostEndedError` if the first process has ended; `start` replaces it."""
        first = self._first
        if first is None:
            raise HostEndedError
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                first.serve(theirs)
            except OSError:
                ours.close()
                self.close()
                raise HostEndedError from None
        return GrammarProcess(ours)

    def close(self) -> None:
        """End all processes. `start` starts anew."""
        first, self._first = self._first, None
        if first is not None:
            first.end()


class _FirstProcess:
    """The process that forks; it is killed with the last reference, and its forks end with it.

    Attributes:
        pid: its number.
    """

    def __init__(self, module: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            popen = subprocess.Popen(
                [sys.executable, "-c", START.format(module), json.dumps(sys.path)],
                stdin=theirs.fileno(),
                start_new_session=True,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        self.pid = popen.pid
        self._socket = ours
        self._process = GrammarProcess(ours, pid=0)
        self.end = weakref.finalize(self, _end_first, popen, ours)

    def load(self, words: Vocabulary, timeout_s: float) -> None:
        """Have it read the vocabulary."""
        self._process.send(words)
        found = self._process.receive(Refusal, timeout_s)
        if found is None:
            raise HostEndedError
        if found.reason is not None:
            raise GrammarError(found.reason)

    def serve(self, end: socket.socket) -> None:
        """Have a fork serve *end*."""
        socket.send_fds(self._socket, [b"f"], [end.fileno()])


def _end_first(popen: "subprocess.Popen[bytes]", end: socket.socket) -> None:
    end.close()
    popen.kill()
    popen.wait()


class GrammarProcess:
    """One process that serves one socket; killed with its last reference. Sending and reading never block.

    Args:
        end: of the socket.
        pid: of the process, if it is known; else it is the first thing read.

    Attributes:
        has_ended: whether the other end is closed.
    """

    def __init__(self, end: socket.socket, pid: int | None = None) -> None:
        end.setblocking(False)
        self.has_ended = False
        self._socket, self._pid = end, pid
        self._outgoing, self._incoming = bytearray(), bytearray()
        self._pids: list[int] = []
        weakref.finalize(self, _end, self._pids, end)

    def fileno(self) -> int:
        """Return the socket's file descriptor."""
        return self._socket.fileno()

    @property
    def wants_to_send(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._outgoing)

    @property
    def has_message(self) -> bool:
        """Whether a whole message was read already, which `take` returns."""
        start = LENGTH.size if self._pid is None else 0
        if len(self._incoming) < start + LENGTH.size:
            return False
        size: int = LENGTH.unpack_from(self._incoming, start)[0]
        return len(self._incoming) >= start + LENGTH.size + size

    def give_way(self) -> None:
        """Let other processes go first from now on."""
        if self._pid:
            with contextlib.suppress(OSError):  # it may have ended
                os.setpriority(os.PRIO_PROCESS, self._pid, LOWEST_PRIORITY)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message, later if there is no room now: see `exchange`."""
        self._outgoing += framed(message)
        self.exchange()

    def exchange(self) -> None:
        """Send and read what can be without waiting."""
        try:
            with contextlib.suppress(BlockingIOError):
                while self._outgoing:
                    del self._outgoing[: self._socket.send(self._outgoing[:CHUNK])]
            with contextlib.suppress(BlockingIOError):
                while not self.has_ended:
                    data = self._socket.recv(CHUNK)
                    self._incoming += data
                    if not data:
                        self._note_end()
        except OSError:
            self._note_end()

    def _note_end(self) -> None:
        self.has_ended = True
        self._pids.clear()  # the number may become another process's

    def take(self, kind: type[Message]) -> Message | None:
        """Return the next message that was read; None if there is none."""
        if self._pid is None and len(self._incoming) >= LENGTH.size:
            self._pid = LENGTH.unpack_from(self._incoming)[0]
            self._pids.append(self._pid)
            del self._incoming[: LENGTH.size]
        if self._pid is None or len(self._incoming) < LENGTH.size:
            return None
        end = LENGTH.size + LENGTH.unpack_from(self._incoming)[0]
        if len(self._incoming) < end:
            return None
        message = msgspec.msgpack.decode(self._incoming[LENGTH.size : end], type=kind)
        del self._incoming[:end]
        return message

    def receive(self, kind: type[Message], timeout_s: float) -> Message | None:
        """Wait for the next message; return None if none came in time. Raises `HostEndedError` if it has ended."""
        deadline = time.monotonic() + timeout_s
        while (message := self.take(kind)) is None:
            left_s = deadline - time.monotonic()
            if self.has_ended:
                raise HostEndedError
            if left_s <= 0:
                return None
            wait_for([self], left_s)
        return message

    def end(self) -> None:
        """Kill the process."""
        _end(self._pids, self._socket)
        self.has_ended = True


def _end(pids: Sequence[int], end: socket.socket) -> None:
    """Kill a fork. Its parent, which reaps it, does so after at least a moment: the number is not another's yet."""
    if end.fileno() >= 0:
        end.close()
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def wait_for(processes: Iterable[GrammarProcess], timeout_s: float) -> None:
    """Wait until one of *processes* has sent something, or *timeout_s* has passed, and exchange what can be.

    Answers that came while a question was sent are there already: then there is nothing to wait for.
    """
    waiting = {process.fileno(): process for process in processes if not process.has_ended}
    if any(process.has_message for process in waiting.values()):
        return
    poll = select.poll()
    for number, process in waiting.items():
        poll.register(number, select.POLLIN | (select.POLLOUT if process.wants_to_send else 0))
    for number, _ in poll.poll(max(0.0, timeout_s) * 1e3):
        waiting[number].exchange()
