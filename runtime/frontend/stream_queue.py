"""What one stream has been sent and not yet read: bounded, however slowly its reader reads."""

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from protos.errors import SlipstreamError, SlowReaderError
from protos.messages import TokenOutput

KEPT_APART = 16
"""So many outputs wait one by one; what comes after them is added to the last one of its request."""

ADDED_UP = ("token_ids", "text", "logprobs", "prompt_logprobs")
"""Fields of `TokenOutput` that grow; of the others the newest counts. Outputs that tell of their step stay apart."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of the request at `index` of those that were streamed together."""

    index: int
    output: TokenOutput


@dataclass(frozen=True)
class ReadingLimits:
    """How slow a reader may be.

    `max_unread` counts tokens, and candidates of log-probabilities, that wait for it; `stall_s` is how long one
    output may wait while others come.
    """

    max_unread: int = 65_536
    stall_s: float = 60.0


PATIENT = ReadingLimits()


def joined(earlier: TokenOutput, later: TokenOutput) -> TokenOutput:
    """Return one output that says what *earlier* and then *later*, of the same request, say."""
    grown = {name: _added(getattr(earlier, name), getattr(later, name)) for name in ADDED_UP}
    speculation, cached = (
        later.speculation or earlier.speculation,
        max(earlier.num_cached_tokens, later.num_cached_tokens),
    )
    return msgspec.structs.replace(later, **grown, speculation=speculation, num_cached_tokens=cached)


def _added(earlier: Any, later: Any) -> Any:
    if not earlier or not later:
        return earlier or later
    return earlier + later if isinstance(earlier, str) else [*earlier, *later]


def weight(output: TokenOutput) -> int:
    """Return what *output* counts for in `ReadingLimits.max_unread`."""
    entries = [*(output.logprobs or ()), *(output.prompt_logprobs or ())]
    return len(output.token_ids) + sum(len(entry.token_ids) for entry in entries)


class StreamQueue:
    """The inbox of one stream. Belongs to its event loop; the engine puts, one reader takes.

    Args:
        places: each request's id, and its index in the stream.
        limits: how slow the reader may be.
    """

    def __init__(self, places: Mapping[str, int], limits: ReadingLimits) -> None:
        self.open = dict(places)
        self._limits = limits
        self._waiting: deque[Delta] = deque()
        self._unread = 0
        self._read_at = 0.0
        self._failure: SlipstreamError | None = None
        self._news = asyncio.Event()

    def put(self, output: TokenOutput) -> None:
        """Add *output*. Raises `SlowReaderError` where the reader is too far behind: this stream must be failed."""
        now = time.monotonic()
        if not self._waiting:
            self._read_at = now
        self._unread += weight(output)
        self._check(now)
        self._add(Delta(self.open[output.request_id], output))
        self._news.set()

    def _check(self, now: float) -> None:
        """A reader that has read everything is never slow, however much comes at once."""
        if not self._waiting:
            return
        if self._unread > self._limits.max_unread:
            raise SlowReaderError(
                f"the answer was given up: {self._unread} tokens and candidates wait to be read; at "
                f"most {self._limits.max_unread} may"
            )
        if now - self._read_at > self._limits.stall_s:
            raise SlowReaderError(
                "the answer was given up: nothing of it was read for "
                f"{now - self._read_at:.0f} s; at most {self._limits.stall_s:g} s may pass"
            )

    def _add(self, delta: Delta) -> None:
        if len(self._waiting) >= KEPT_APART and delta.output.step is None:
            for place in range(len(self._waiting) - 1, -1, -1):
                if self._waiting[place].index == delta.index and self._waiting[place].output.step is None:
                    self._waiting[place] = Delta(delta.index, joined(self._waiting[place].output, delta.output))
                    return
        self._waiting.append(delta)

    def fail(self, error: SlipstreamError) -> None:
        """Let the reader find *error* behind what waits; nothing else comes."""
        if self._failure is None:
            self._failure = error
        self._news.set()

    async def take(self) -> Delta:
        """Return the next output, waiting for it. Raises what the stream was failed with."""
        while not self._waiting:
            if self._failure is not None:
                raise self._failure
            self._news.clear()
            await self._news.wait()
        self._read_at = time.monotonic()
        delta = self._waiting.popleft()
        self._unread -= weight(delta.output)
        if delta.output.finish_reason is not None:
            del self.open[delta.output.request_id]
        return delta
