"""Checks a grammar before its request is admitted, in a subprocess that is killed if it exceeds the limits."""

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
from protos.sampling import StructuredOutputsParams
from protos.structured import grammar_of
from runtime.subprocess import python_command
from runtime.text.grammar_process import LENGTH, GrammarReply, GrammarSetup, framed
from runtime.text.tokenizer import Tokenizer

PARAM = "structured_outputs"
CACHE_SIZE = 1024
UNKNOWN = "?"


@dataclass(frozen=True)
class GrammarLimits:
    """Limits on checking one grammar.

    Attributes:
        time_s: seconds to compile it and follow it for some tokens.
        wait_s: seconds to wait for grammars that are being checked.
        start_s: seconds until the process has started and loaded the vocabulary.
        memory_bytes: in addition to the vocabulary.
    """

    time_s: float = 2.0
    wait_s: float = 10.0
    start_s: float = 60.0
    memory_bytes: int = 1 << 30


class _TimeOutError(Exception):
    """No reply arrived in time."""


class _EndedError(Exception):
    """The process ended."""


class GrammarChecker:
    """Checks grammars one at a time and caches the results. May be called from any thread.

    Its process starts with the first grammar, and again after one that exceeded the limits.

    Args:
        tokenizer: None if prompts and outputs are token ids only; then every grammar is refused.
        vocab_size: number of ids the model can sample.
        eos_ids: end an answer.
        limits: of each grammar.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Sequence[int], limits: GrammarLimits | None = None
    ) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, tuple(eos_ids)
        self.limits = limits or GrammarLimits()
        self._refusals: OrderedDict[bytes, str | None] = OrderedDict()
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def resolve(self, params: StructuredOutputsParams) -> Grammar:
        """Return the grammar of *params*. Raises as `check`. May take seconds."""
        grammar = grammar_of(params)
        self.check(grammar)
        return grammar

    def check(self, grammar: Grammar) -> None:
        """Compile and try *grammar*.

        Raises:
            InvalidRequestError: it cannot be used; the message gives the reason.
            OverloadedError: too many grammars are waiting.
        """
        refusal = self._refusal(grammar)
        if refusal is not None:
            raise InvalidRequestError(f"{PARAM}: {refusal}", PARAM)

    def close(self) -> None:
        """End the process. The next grammar starts it again."""
        with self._lock:
            self._end()

    def _refusal(self, grammar: Grammar) -> str | None:
        """Return why *grammar* cannot be used; None if it can."""
        key = hashlib.sha256(msgspec.msgpack.encode(grammar)).digest()
        refusal = self._refusals.get(key, UNKNOWN)
        if refusal is not UNKNOWN:
            return refusal
        if not self._lock.acquire(timeout=self.limits.wait_s):
            raise OverloadedError("too many grammars are waiting to be checked; try again", self.limits.time_s)
        try:
            if key not in self._refusals:
                self._cache(key, self._try(grammar))
            return self._refusals[key]
        finally:
            self._lock.release()

    def _cache(self, key: bytes, refusal: str | None) -> None:
        self._refusals[key] = refusal
        if len(self._refusals) > CACHE_SIZE:
            self._refusals.popitem(last=False)

    def _try(self, grammar: Grammar) -> str | None:
        """Return why *grammar* cannot be used; None if it can. A process that did not reply in time is killed.

        Time-outs are not cached: under less load, the next attempt may succeed.
        """
        try:
            return self._started().request(grammar, self.limits.time_s)
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
            setup = GrammarSetup(text, self._vocab_size, self._eos_ids, self.limits.memory_bytes)
            process = _Process()
            try:
                refusal = process.request(setup, self.limits.start_s)
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
    """A `runtime.text.grammar_process`, killed with its last reference."""

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

    def request(self, message: msgspec.Struct, timeout_s: float) -> str | None:
        """Send *message* and return the refusal in the reply."""
        assert self._popen.stdin is not None
        deadline = time.monotonic() + timeout_s
        try:
            self._popen.stdin.write(framed(message))
            self._popen.stdin.flush()
        except OSError:
            raise _EndedError from None
        size = LENGTH.unpack(self._read(LENGTH.size, deadline))[0]
        return msgspec.msgpack.decode(self._read(size, deadline), type=GrammarReply).refusal

    def _read(self, count: int, deadline: float) -> bytes:
        assert self._popen.stdout is not None
        pipe, data = self._popen.stdout.fileno(), b""
        while len(data) < count:
            if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
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
            with contextlib.suppress(OSError):  # unwritten data
                pipe.close()
