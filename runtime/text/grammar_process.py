"""The process in which grammars are tried out: it may take too long, or too much, and is killed then.

Started by `runtime.text.grammar_validator`. It reads frames from standard input and answers each on standard output; it
ends when its parent closes the pipe. A frame is its length as four bytes, then msgpack.
"""

import os
import random
import resource
import signal
import struct
import sys
import threading
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, TypeVar

import msgspec

from protos.guidance import GrammarError, matcher, trouble, vocabulary
from protos.messages import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

READ, WRITE = 0, 1
LENGTH = struct.Struct("<I")
STACK_BYTES = 2 << 20
"""Less than any thread of a worker has: what is not too deep for this is not too deep there."""
STEPS = 48
"""A grammar is followed for so many tokens along a path of its own: some are cheap only at their beginning."""

Message = TypeVar("Message")


class GrammarSetup(msgspec.Struct, frozen=True):
    """What the process is told first: the vocabulary, and how many bytes of memory it may have beside it."""

    tokenizer_json: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    memory_bytes: int


class GrammarReply(msgspec.Struct, frozen=True):
    """Why a grammar, or the vocabulary, cannot be used; None where it can."""

    refusal: str | None = None


def framed(message: msgspec.Struct) -> bytes:
    """Return the frame that carries *message*."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def main() -> None:
    """Serve until the parent goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to answer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    serving = threading.Thread(target=_serve)
    serving.start()
    serving.join()


def _serve() -> None:
    hello = _read(GrammarSetup)
    try:
        words = vocabulary(hello.tokenizer_json, hello.vocab_size, hello.eos_ids)
    except GrammarError as error:
        _write(GrammarReply(str(error)))
        return
    _limit_memory(hello.memory_bytes)
    _write(GrammarReply())
    while True:
        _write(GrammarReply(tried(_read(Grammar), words)))


def _limit_memory(num_bytes: int) -> None:
    """Leave room for *num_bytes* beside what is in use."""
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
        in_use = int(file.read().split()[0]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (in_use + num_bytes, in_use + num_bytes))


def tried(grammar: Grammar, words: "LLTokenizer") -> str | None:
    """Return why *grammar* cannot be used; None where it can, as far as a walk through it tells."""
    try:
        return _walked(matcher(grammar, words))
    except GrammarError as error:
        return str(error)


def _walked(found: "LLMatcher") -> str | None:
    dice = random.Random(0)
    for _ in range(STEPS):
        bits = found.compute_bitmask()
        if found.is_error():
            return trouble(found)
        if found.is_stopped():
            return None
        if not found.try_consume_tokens([_any_of(bits, dice)]):
            return None  # an end-of-sequence token, or nothing is left
    return None


def _any_of(bits: Seq[int], dice: random.Random) -> int:
    """Return one of the ids whose bits are set, 0 where none is."""
    places = [place for place, byte in enumerate(bits) if byte]
    if not places:
        return 0
    place = dice.choice(places)
    return 8 * place + dice.choice([bit for bit in range(8) if bits[place] >> bit & 1])


def _read(kind: type[Message]) -> Message:
    return msgspec.msgpack.decode(_exactly(LENGTH.unpack(_exactly(LENGTH.size))[0]), type=kind)


def _exactly(count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = os.read(READ, count - len(data))
        if not part:
            sys.exit()  # in a thread: ends it, and `main` with it
        data += part
    return bytes(data)


def _write(answer: GrammarReply) -> None:
    os.write(WRITE, framed(answer))
