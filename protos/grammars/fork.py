"""Processes that compile and follow grammars, each forked from one that has read the vocabulary. The child's side.

The first process reads a `Vocabulary` from standard input and answers with why it cannot be used, if so. For each
socket that it then gets over its own it forks: the fork serves that socket and ends with it. It ends itself when its
parent closes that socket. A message is a frame: its length as four bytes, then msgpack.
"""

import array
import contextlib
import gc
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from protos.guidance import GrammarError, vocabulary

if TYPE_CHECKING:
    from llguidance import LLTokenizer

CONTROL = 0
"""The file descriptor of the first process's socket."""
LENGTH = struct.Struct("<I")
FIRST_TO_BE_KILLED = "1000"
"""Where memory runs out, the kernel ends a grammar's process before any other."""
IDLE_S = 1.0

Message = TypeVar("Message")


class Vocabulary(msgspec.Struct, frozen=True):
    """What grammars are followed with, and the limit on each process's memory, in bytes in addition to it."""

    tokenizer_json: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    memory_bytes: int


class Refusal(msgspec.Struct, frozen=True):
    """Why a grammar, or the vocabulary, cannot be used; None if it can."""

    reason: str | None = None


class ForkConnection:
    """A socket in the process that serves it. Ends the process when the other end is closed."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def read(self, kind: type[Message]) -> Message:
        """Return the next message."""
        size = LENGTH.unpack(self._read_exactly(LENGTH.size))[0]
        return msgspec.msgpack.decode(self._read_exactly(size), type=kind)

    def write(self, message: msgspec.Struct) -> None:
        """Send a message."""
        try:
            self._socket.sendall(framed(message))
        except OSError:
            os._exit(0)

    def _read_exactly(self, count: int) -> bytearray:
        data = bytearray()
        while len(data) < count:
            try:
                part = self._socket.recv(count - len(data))
            except OSError:
                part = b""
            if not part:
                os._exit(0)
            data += part
        return data


Serve = Callable[[ForkConnection, "LLTokenizer"], None]


def framed(message: msgspec.Struct) -> bytes:
    """Return the frame that carries *message*."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def fork_for_each(serve: Serve) -> None:
    """Run the first process: fork for each socket, and call *serve* in the fork."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control = socket.socket(fileno=CONTROL)
    connection = ForkConnection(control)
    setup = connection.read(Vocabulary)
    try:
        words = vocabulary(setup.tokenizer_json, setup.vocab_size, setup.eos_ids)
    except GrammarError as error:
        connection.write(Refusal(str(error)))
        return
    connection.write(Refusal())
    gc.collect()
    gc.freeze()  # so that forks share the pages
    control.settimeout(IDLE_S)
    while True:
        end = _received(control)
        _reap()
        if end is not None and os.fork() == 0:
            control.close()
            _serve_fork(end, serve, words, setup.memory_bytes)
        if end is not None:
            end.close()


def _received(control: socket.socket) -> socket.socket | None:
    """Return the next socket to be served; None if none has come for a while. Ends with the parent."""
    try:
        data, ancillary, _, _ = control.recvmsg(1, socket.CMSG_SPACE(array.array("i").itemsize))
    except TimeoutError:
        return None
    except ConnectionResetError:  # the parent ended before it read the answer
        sys.exit()
    if not data or not ancillary:
        sys.exit()
    numbers = array.array("i")
    numbers.frombytes(ancillary[0][2][: numbers.itemsize])
    return socket.socket(fileno=numbers[0])


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _serve_fork(end: socket.socket, serve: Serve, words: "LLTokenizer", memory_bytes: int) -> None:
    try:
        _end_with_parent()
        _limit_memory(memory_bytes)
        end.setblocking(True)
        end.sendall(LENGTH.pack(os.getpid()))
        serve(ForkConnection(end), words)
    finally:
        os._exit(0)


def _end_with_parent() -> None:
    """Have the kernel kill this process with its parent, and before others where memory runs out."""
    import ctypes  # noqa: PLC0415 - only in these processes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123
        file.write(FIRST_TO_BE_KILLED)


def _limit_memory(num_bytes: int) -> None:
    """Limit the address space to *num_bytes* more than is in use now."""
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
        in_use = int(file.read().split()[0]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (in_use + num_bytes, in_use + num_bytes))
