"""The outputs of one stream that have not been read yet, with limits on slow readers."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import msgspec

from protos.errors import SlipstreamError, SlowReaderError
from protos.messages import TokenOutput

MAX_SEPARATE = 16
"""If more outputs are queued, a new one is merged into the last queued output of its request."""

CONCATENATED = ("token_ids", "text", "logprobs", "prompt_logprobs")
"""Fields of `TokenOutput` that are concatenated in a merge; of other fields the newest value is kept.

Outputs with a `step` are not merged.
"""


@dataclass(frozen=True, slots=True)
class Delta:
    """An output of the request at `index` in its stream."""

    index: int
    output: TokenOutput


class Deltas(Protocol):
    """What a stream brings. Closing it aborts what has not finished."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Delta: ...

    async def aclose(self) -> None: ...  # noqa: D102


@dataclass(frozen=True)
class ReadingLimits:
    """Limits on slow readers.

    `max_unread` is the number of unread tokens and log-probability candidates where nothing was read for `patience_s`:
    one step may bring more. `stall_s` is how long nothing may be read while new outputs arrive.
    """

    max_unread: int = 65_536
    patience_s: float = 1.0
    stall_s: float = 60.0


DEFAULT_READING_LIMITS = ReadingLimits()


def merge_outputs(earlier: TokenOutput, later: TokenOutput) -> TokenOutput:
    """Return one output for *earlier* and *later* of the same request."""
    merged = {name: _concatenate(getattr(earlier, name), getattr(later, name)) for name in CONCATENATED}
    speculation, cached = (
        later.speculation or earlier.speculation,
        max(earlier.num_cached_tokens, later.num_cached_tokens),
    )
    return msgspec.structs.replace(later, **merged, speculation=speculation, num_cached_tokens=cached)


def _concatenate(earlier: Any, later: Any) -> Any:
    if not earlier or not later:
        return earlier or later
    return earlier + later if isinstance(earlier, str) else [*earlier, *later]


def weight(output: TokenOutput) -> int:
    """Return the tokens and log-probability candidates of *output*, as `ReadingLimits.max_unread` counts them."""
    entries = [*(output.logprobs or ()), *(output.prompt_logprobs or ())]
    return len(output.token_ids) + sum(len(entry.token_ids) for entry in entries)


class StreamQueue:
    """The queue of one stream, with one reader. Belongs to one event loop.

    `open` maps the ids of unfinished requests to their indices.

    Args:
        indices: the index in the stream of each request id.
        limits: limits on a slow reader.
    """

    def __init__(self, indices: Mapping[str, int], limits: ReadingLimits) -> None:
        self.open = dict(indices)
        self._limits = limits
        self._queue: deque[Delta] = deque()
        self._unread = 0
        self._read_at = 0.0
        self._failure: SlipstreamError | None = None
        self._changed = asyncio.Event()

    def put(self, output: TokenOutput) -> None:
        """Add *output*. Raises `SlowReaderError` if the reader exceeds the limits; the caller must fail the stream."""
        now = time.monotonic()
        if not self._queue:
            self._read_at = now
        self._unread += weight(output)
        self._check(now)
        self._add(Delta(self.open[output.request_id], output))
        self._changed.set()

    def _check(self, now: float) -> None:
        """Raise `SlowReaderError` if the reader is too slow. If nothing was queued, it is not, however much arrives."""
        if not self._queue:
            return
        if self._unread > self._limits.max_unread and now - self._read_at > self._limits.patience_s:
            raise SlowReaderError(
                f"the answer was aborted: {self._unread} tokens and candidates are unread; the limit is "
                f"{self._limits.max_unread}"
            )
        if now - self._read_at > self._limits.stall_s:
            raise SlowReaderError(
                "the answer was aborted: nothing of it was read for "
                f"{now - self._read_at:.0f} s; the limit is {self._limits.stall_s:g} s"
            )

    def _add(self, delta: Delta) -> None:
        if len(self._queue) >= MAX_SEPARATE and delta.output.step is None:
            for position in range(len(self._queue) - 1, -1, -1):
                if self._queue[position].index == delta.index and self._queue[position].output.step is None:
                    self._queue[position] = Delta(
                        delta.index, merge_outputs(self._queue[position].output, delta.output)
                    )
                    return
        self._queue.append(delta)

    def fail(self, error: SlipstreamError) -> None:
        """Let the reader get *error* after what is queued. Nothing may be put afterwards."""
        if self._failure is None:
            self._failure = error
        self._changed.set()

    async def take(self) -> Delta:
        """Wait for the next output and return it. Raises the error that the stream was failed with."""
        while not self._queue:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        self._read_at = time.monotonic()
        delta = self._queue.popleft()
        self._unread -= weight(delta.output)
        if delta.output.finish_reason is not None:
            del self.open[delta.output.request_id]
        return delta


class OpenStream:
    """The `Deltas` of requests that have been sent.

    Args:
        queue: of their outputs.
        close: called once the stream is over, failed or closed; perhaps again.
    """

    def __init__(self, queue: StreamQueue, close: Callable[[], None]) -> None:
        self._queue, self._close = queue, close

    def __aiter__(self) -> Self:
        """See `Deltas`."""
        return self

    async def __anext__(self) -> Delta:
        """See `Deltas`. Raises the error that the stream was failed with."""
        if not self._queue.open:
            self._close()
            raise StopAsyncIteration
        try:
            return await self._queue.take()
        except BaseException:
            self._close()
            raise

    async def aclose(self) -> None:
        """See `Deltas`."""
        self._close()
