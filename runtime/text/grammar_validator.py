"""Whether a grammar can be used is found out before its request is admitted, in a process that may be killed."""

import contextlib
import hashlib
import os
import select
import subprocess
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from protos.errors import InvalidRequestError, OverloadedError, SlipstreamError
from protos.messages import Grammar
from protos.structured import StructuredOutputsParams, grammar_of
from runtime.subprocess import python_command
from runtime.text.grammar_process import LENGTH, GrammarReply, GrammarSetup, framed
from runtime.text.tokenizer import Tokenizer

PARAM = "structured_outputs"
REMEMBERED = 1024
UNKNOWN = "?"


@dataclass(frozen=True)
class GrammarLimits:
    """What trying out one grammar may take.

    Attributes:
        time_s: to compile it and to follow it for some tokens.
        wait_s: until those that were asked about before are done.
        start_s: until the process is there and knows the vocabulary.
        memory_bytes: beside the vocabulary.
    """

    time_s: float = 2.0
    wait_s: float = 10.0
    start_s: float = 60.0
    memory_bytes: int = 1 << 30


class _TimeOutError(Exception):
    """Nothing came in time."""


class _EndedError(Exception):
    """The process ended."""


class GrammarChecker:
    """Tries out grammars, one at a time; remembers what it found. May be called from any thread.

    Its process starts with the first grammar, and anew after one that was too much for it.

    Args:
        tokenizer: None where only token ids go in and out, which have no grammar.
        vocab_size: ids that the model can say.
        eos_ids: what ends an answer.
        limits: of each grammar.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Sequence[int], limits: GrammarLimits | None = None
    ) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, tuple(eos_ids)
        self.limits = limits or GrammarLimits()
        self._found: OrderedDict[bytes, str | None] = OrderedDict()
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def resolve(self, asked: StructuredOutputsParams | None) -> Grammar | None:
        """Return the grammar of what was asked, if anything was; raises as `check`. May take seconds."""
        if asked is None:
            return None
        grammar = grammar_of(asked)
        self.check(grammar)
        return grammar

    def check(self, grammar: Grammar) -> None:
        """Return if *grammar* can be used.

        Raises:
            InvalidRequestError: it cannot, and why.
            OverloadedError: too many others are waiting.
        """
        refusal = self._refusal(grammar)
        if refusal is not None:
            raise InvalidRequestError(f"{PARAM}: {refusal}", PARAM)

    def close(self) -> None:
        """End the process. It starts again where another grammar comes."""
        with self._lock:
            self._end()

    def _refusal(self, grammar: Grammar) -> str | None:
        """Return why *grammar* cannot be used; None where it can."""
        key = hashlib.sha256(msgspec.msgpack.encode(grammar)).digest()
        known = self._found.get(key, UNKNOWN)
        if known is not UNKNOWN:
            return known
        if not self._lock.acquire(timeout=self.limits.wait_s):
            raise OverloadedError("too many grammars are waiting to be checked; try again", self.limits.time_s)
        try:
            if key not in self._found:
                self._remember(key, self._ask(grammar))
            return self._found[key]
        finally:
            self._lock.release()

    def _remember(self, key: bytes, refusal: str | None) -> None:
        self._found[key] = refusal
        if len(self._found) > REMEMBERED:
            self._found.popitem(last=False)

    def _ask(self, grammar: Grammar) -> str | None:
        """Return why *grammar* cannot be used; None where it can. A process that did not answer is replaced.

        That it did not is not remembered: on a busier day than others, the next try may find more time.
        """
        try:
            return self._started().ask(grammar, self.limits.time_s)
        except _TimeOutError:
            why = f"it took more than {self.limits.time_s:g} s to compile; make it simpler"
        except _EndedError:
            why = f"it needs more than {self.limits.memory_bytes >> 20} MiB, or is nested too deeply"
        self._end()
        raise InvalidRequestError(f"{PARAM}: the grammar is too complex: {why}", PARAM)

    def _started(self) -> "_Process":
        if self._process is None or not self._process.is_alive:
            self._end()
            if self._tokenizer is None:
                raise InvalidRequestError(f"{PARAM} is text, but skip_tokenizer_init is set", PARAM)
            text = self._tokenizer.backend_tokenizer.to_str()
            hello = GrammarSetup(text, self._vocab_size, self._eos_ids, self.limits.memory_bytes)
            process = _Process()
            try:
                refusal = process.ask(hello, self.limits.start_s)
            except (_TimeOutError, _EndedError):
                process.end()
                raise SlipstreamError("the process that checks grammars could not be started") from None
            if refusal is not None:
                process.end()
                raise InvalidRequestError(refusal, PARAM)
            self._process = process
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


class _Process:
    """One run of `runtime.text.grammar_process`; ended with its last reference."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            python_command("runtime.text.grammar_process"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.end = weakref.finalize(self, _end, self._popen)

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._popen.poll() is None

    def ask(self, message: msgspec.Struct, within_s: float) -> str | None:
        """Return the refusal that answers *message*."""
        assert self._popen.stdin is not None
        until = time.monotonic() + within_s
        try:
            self._popen.stdin.write(framed(message))
            self._popen.stdin.flush()
        except OSError:
            raise _EndedError from None
        size = LENGTH.unpack(self._read(LENGTH.size, until))[0]
        return msgspec.msgpack.decode(self._read(size, until), type=GrammarReply).refusal

    def _read(self, count: int, until: float) -> bytes:
        assert self._popen.stdout is not None
        pipe, data = self._popen.stdout.fileno(), b""
        while len(data) < count:
            if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
                raise _TimeOutError
            part = os.read(pipe, count - len(data))
            if not part:
                raise _EndedError
            data += part
        return data


def _end(popen: "subprocess.Popen[bytes]") -> None:
    popen.kill()
    popen.wait()
    for pipe in (popen.stdin, popen.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what it was never told
                pipe.close()
