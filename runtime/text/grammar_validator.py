"""Checks a grammar before its request is admitted, in a process that is killed if it exceeds the limits."""

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from protos.errors import InvalidRequestError, SlipstreamError
from protos.grammars.fork import Refusal, Vocabulary
from protos.grammars.host import GrammarHost, GrammarProcess, HostEndedError
from protos.guidance import GrammarError
from protos.messages import Grammar
from protos.sampling import StructuredOutputsParams
from protos.structured import grammar_of
from runtime.text.grammar_process import Trial
from runtime.text.tokenizer import Tokenizer

PARAM = "structured_outputs"
MODULE = "runtime.text.grammar_process"
CACHE_SIZE = 1024
TOO_SLOW_S = 600.0
"""A grammar that took too long is refused for so long: under less load, another attempt may succeed."""
FOR_EVER = float("inf")
START_TRIES = 2
NEARLY = 0.9
"""The clocks of two processes differ a little."""


@dataclass(frozen=True)
class GrammarLimits:
    """Limits on checking one grammar.

    Attributes:
        time_s: seconds of a processor to compile it and follow it for some tokens.
        polite_s: seconds after which it gives way to other processes.
        longest_s: seconds in all, where other processes keep the processors busy.
        start_s: seconds until the first process has loaded the vocabulary.
        memory_bytes: in addition to the vocabulary.
    """

    time_s: float = 2.0
    polite_s: float = 0.2
    longest_s: float = 10.0
    start_s: float = 60.0
    memory_bytes: int = 1 << 30


@dataclass(frozen=True)
class _Finding:
    """Why a grammar cannot be used, if so, and until when that holds, in monotonic seconds."""

    refusal: str | None
    until: float = FOR_EVER


class GrammarChecker:
    """Checks grammars, each in a process of its own, and caches the results. May be called from any thread.

    The process that forks them starts with the first grammar.

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
        self._findings: OrderedDict[bytes, _Finding] = OrderedDict()
        self._lock = threading.Lock()
        self._host = GrammarHost(MODULE, self._vocabulary)

    def resolve(self, params: StructuredOutputsParams) -> Grammar:
        """Return the grammar of *params*. Raises as `check`. May take seconds."""
        grammar = grammar_of(params)
        self.check(grammar)
        return grammar

    def knows(self, params: StructuredOutputsParams) -> bool:
        """Whether `resolve` is quick: the grammar was checked before. Raises `InvalidRequestError`."""
        return self._found(_digest(grammar_of(params))) is not None

    def check(self, grammar: Grammar) -> None:
        """Compile and try *grammar*.

        Raises:
            InvalidRequestError: it cannot be used; the message gives the reason.
        """
        key = _digest(grammar)
        finding = self._found(key)
        if finding is None:
            finding = self._try(grammar)
            self._cache(key, finding)
        if finding.refusal is not None:
            raise InvalidRequestError(f"{PARAM}: {finding.refusal}", PARAM)

    def close(self) -> None:
        """End all processes. The next grammar starts them again."""
        self._host.close()

    def _found(self, key: bytes) -> _Finding | None:
        """Return what is known of a grammar; None if nothing is."""
        finding = self._findings.get(key)
        return finding if finding is not None and finding.until > time.monotonic() else None

    def _cache(self, key: bytes, finding: _Finding) -> None:
        with self._lock:
            self._findings[key] = finding
            self._findings.move_to_end(key)
            if len(self._findings) > CACHE_SIZE:
                self._findings.popitem(last=False)

    def _try(self, grammar: Grammar) -> _Finding:
        """Return whether *grammar* can be used. A process that did not reply in time is killed."""
        process = self._fork()
        process.send(Trial(grammar, self.limits.time_s))
        began = time.monotonic()
        try:
            reply = process.receive(Refusal, self.limits.polite_s)
            if reply is None:
                process.give_way()
                reply = process.receive(Refusal, self.limits.longest_s - self.limits.polite_s)
        except HostEndedError:
            return self._ended(time.monotonic() - began)
        finally:
            process.end()
        return self._ended(self.limits.longest_s) if reply is None else _Finding(reply.reason)

    def _ended(self, took_s: float) -> _Finding:
        """Return the finding about a grammar whose process was killed after *took_s*."""
        limits = self.limits
        if took_s >= limits.time_s * NEARLY:
            why = f"it took more than {limits.time_s:g} s to compile; make it simpler"
        else:
            why = f"it needs more than {limits.memory_bytes >> 20} MiB, or is nested too deeply"
        return _Finding(f"the grammar is too complex: {why}", time.monotonic() + TOO_SLOW_S)

    def _fork(self) -> GrammarProcess:
        for _ in range(START_TRIES):  # the process that forks may have been killed since
            try:
                self._host.start(self.limits.start_s)
                return self._host.fork()
            except GrammarError as error:
                raise InvalidRequestError(str(error), PARAM) from None
            except HostEndedError:
                continue
        raise SlipstreamError("the process that checks grammars could not be started")

    def _vocabulary(self) -> Vocabulary:
        if self._tokenizer is None:
            raise InvalidRequestError(f"{PARAM} is text, but skip_tokenizer_init is set", PARAM)
        text = self._tokenizer.backend_tokenizer.to_str()
        return Vocabulary(text, self._vocab_size, self._eos_ids, self.limits.memory_bytes)


def _digest(grammar: Grammar) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(grammar)).digest()
