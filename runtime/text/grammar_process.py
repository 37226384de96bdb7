"""A subprocess that compiles and tries grammars, so that slow or large ones can be killed.

Started by `runtime.text.grammar_validator`. It reads frames from standard input, answers each on standard output, and
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

from protos.guidance import GrammarError, error_message, matcher, vocabulary
from protos.messages import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

READ, WRITE = 0, 1  # file descriptors
LENGTH = struct.Struct("<I")
STACK_BYTES = 2 << 20
"""Smaller than the stack of any worker thread, so that a grammar that fits here fits there."""
NUM_STEPS = 48
"""Tokens of a random path on which a grammar is tried: some grammars become expensive after the first tokens."""

Message = TypeVar("Message")


class GrammarSetup(msgspec.Struct, frozen=True):
    """The first message to the process: the vocabulary, and the memory limit in bytes in addition to it."""

    tokenizer_json: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    memory_bytes: int


class GrammarReply(msgspec.Struct, frozen=True):
    """Why a grammar, or the vocabulary, cannot be used; None if it can."""

    refusal: str | None = None


def framed(message: msgspec.Struct) -> bytes:
    """Return the frame that carries *message*."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def main() -> None:
    """Serve until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    serving = threading.Thread(target=_serve)
    serving.start()
    serving.join()


def _serve() -> None:
    setup = _read(GrammarSetup)
    try:
        words = vocabulary(setup.tokenizer_json, setup.vocab_size, setup.eos_ids)
    except GrammarError as error:
        _write(GrammarReply(str(error)))
        return
    _limit_memory(setup.memory_bytes)
    _write(GrammarReply())
    while True:
        _write(GrammarReply(try_grammar(_read(Grammar), words)))


def _limit_memory(num_bytes: int) -> None:
    """Limit the address space to *num_bytes* more than is in use now."""
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
        in_use = int(file.read().split()[0]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (in_use + num_bytes, in_use + num_bytes))


def try_grammar(grammar: Grammar, words: "LLTokenizer") -> str | None:
    """Return why *grammar* cannot be used; None if it compiles and a random path through it succeeds."""
    try:
        return _follow(matcher(grammar, words))
    except GrammarError as error:
        return str(error)


def _follow(grammar: "LLMatcher") -> str | None:
    rng = random.Random(0)
    for _ in range(NUM_STEPS):
        bits = grammar.compute_bitmask()
        if grammar.is_error():
            return error_message(grammar)
        if grammar.is_stopped():
            return None
        if not grammar.try_consume_tokens([_random_id(bits, rng)]):
            return None  # it has ended
    return None


def _random_id(bits: Seq[int], rng: random.Random) -> int:
    """Return one of the ids whose bits are set, 0 if there is none."""
    nonzero = [index for index, byte in enumerate(bits) if byte]
    if not nonzero:
        return 0
    index = rng.choice(nonzero)
    return 8 * index + rng.choice([bit for bit in range(8) if bits[index] >> bit & 1])


def _read(kind: type[Message]) -> Message:
    return msgspec.msgpack.decode(_read_exactly(LENGTH.unpack(_read_exactly(LENGTH.size))[0]), type=kind)


def _read_exactly(count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = os.read(READ, count - len(data))
        if not part:
            sys.exit()  # ends this thread, and with it `main`
        data += part
    return bytes(data)


def _write(reply: GrammarReply) -> None:
    os.write(WRITE, framed(reply))
