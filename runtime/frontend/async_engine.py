"""The asynchronous engine of the HTTP and gRPC servers.

It tokenises prompts, sends requests to a controller over a `Channel`, and streams outputs to each caller. Cancelling or
closing a stream aborts its unfinished requests; their blocks are free within one step.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import msgspec

from protos.errors import (
    ConfigError,
    DeadlineExceededError,
    DrainingError,
    EngineDeadError,
    EngineStalledError,
    ModelError,
    NoRoomError,
    OverloadedError,
    PlacementError,
    SlipstreamError,
)
from protos.messages import Request, WorkerInfo
from protos.progress import ProgressCallback
from protos.sampling import SamplingParams
from protos.stats import EngineStats
from runtime.frontend.admission import DEFAULT_QUEUE_LIMITS, Admission, QueueLimits, num_prompt_tokens
from runtime.frontend.channel import Alive, Channel, Failed, LoadProgress, Outputs, Ready, Report, Stalled
from runtime.frontend.client import EngineState, Prompt
from runtime.frontend.keys import TENANT
from runtime.frontend.open_streams import OpenStreams
from runtime.frontend.preparation import Preparation
from runtime.frontend.stream_queue import DEFAULT_READING_LIMITS, Delta, OpenStream, ReadingLimits, StreamQueue
from runtime.metrics.prometheus import Metrics
from runtime.text.preprocessor import Preprocessor

log = logging.getLogger("slipstream")

START_ERRORS: dict[str, type[SlipstreamError]] = {
    "ConfigError": ConfigError,
    "ModelError": ModelError,
    "PlacementError": PlacementError,
}

DRAINING_RETRY_S = 5.0
"""Retry delay that clients of a draining server are given, in seconds."""

MakePreprocessor = Callable[[WorkerInfo], Awaitable[Preprocessor]]


class AsyncEngine:
    """An `EngineClient` over a channel. Belongs to the event loop it was started on.

    Args:
        channel: leads to the controller; owned by this engine.
        make_preprocessor: called with the model's `WorkerInfo` once it is loaded.
        metrics: records requests and outputs, if given.
        timeout_s: time limit of requests that set none, in seconds; None for no limit.
        reading: limits on slow readers.
        queue: limits on waiting requests.
    """

    def __init__(
        self,
        channel: Channel,
        make_preprocessor: MakePreprocessor,
        metrics: Metrics | None = None,
        *,
        timeout_s: float | None = None,
        reading: ReadingLimits = DEFAULT_READING_LIMITS,
        queue: QueueLimits = DEFAULT_QUEUE_LIMITS,
    ) -> None:
        self.metrics = metrics
        self._timeout_s = timeout_s
        self._admission = Admission(queue)
        self._streams = OpenStreams(channel, self._admission, reading, metrics)
        self._preparation = Preparation()
        self._channel = channel
        self._make_preprocessor = make_preprocessor
        self._preprocessor: Preprocessor | None = None
        self._info: WorkerInfo | None = None
        self._ready: asyncio.Future[WorkerInfo] | None = None
        self._failure: SlipstreamError | None = None
        self._has_died = asyncio.Event()
        self._stalled: Stalled | None = None
        self._report_progress: ProgressCallback = log.info
        self._stats = EngineStats()
        self._reported_at = time.monotonic()
        self._is_draining = False

    async def start(self, report: ProgressCallback = log.info) -> WorkerInfo:
        """Start the controller and wait until it is ready; *report* is called with its progress.

        Raises:
            ConfigError, ModelError, PlacementError: raised by the controller.
            EngineDeadError: it ended for another reason.
        """
        self._report_progress = report
        self._ready = asyncio.get_running_loop().create_future()
        await self._channel.start(self._on_report)
        self._info = await self._ready
        self._preprocessor = await self._make_preprocessor(self._info)
        return self._info

    @property
    def is_alive(self) -> bool:
        """See `EngineClient`."""
        return self._preprocessor is not None and self._failure is None

    @property
    def state(self) -> EngineState:
        """See `EngineClient`."""
        if self._failure is not None:
            return "dead"
        if self._preprocessor is None:
            return "starting"
        if self._stalled is not None:
            return "stalled"
        if self._is_draining:
            return "draining"
        return "degraded" if self._stats.target_is_lost or self._stats.draft_is_down else "live"

    @property
    def silence_s(self) -> float:
        """See `EngineClient`."""
        return time.monotonic() - self._reported_at

    def drain(self) -> None:
        """Refuse new requests from now on; running ones continue."""
        self._is_draining = True

    async def death(self) -> EngineDeadError:
        """Wait until the engine fails; return why. `close` does not count as failure."""
        await self._has_died.wait()
        return self._death()

    @property
    def info(self) -> WorkerInfo:
        """See `EngineClient`."""
        if self._info is None:
            raise EngineDeadError("the engine has not been started")
        return self._info

    @property
    def preprocessor(self) -> Preprocessor:
        """The model's preprocessor. Raises `EngineDeadError` before the start and after the end."""
        self._check_alive()
        if self._preprocessor is None:
            raise EngineDeadError("the engine has not been started")
        return self._preprocessor

    def stats(self) -> EngineStats:
        """See `EngineClient`."""
        return self._stats

    async def prepare(self, prompt: Prompt, params: SamplingParams, request_id: str) -> list[Request]:
        """See `EngineClient`."""
        preprocessor = self.preprocessor
        self.check_open()
        requests = await self._preparation.requests(preprocessor, prompt, params, request_id)
        self.check_open(len(requests), num_prompt_tokens(requests))  # while the response can still be a 429
        return requests

    async def render_chat(self, messages: Any, params: SamplingParams, **options: Any) -> Prompt:
        """See `EngineClient`."""
        self.check_open()
        return await self._preparation.in_thread(self.preprocessor.chat, messages, params, **options)

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, is_truncated: bool = False
    ) -> tuple[int, ...]:
        """See `EngineClient`."""
        if not text:
            return ()
        options = {"add_special_tokens": add_special_tokens, "is_truncated": is_truncated}
        return await self._preparation.in_thread(self.preprocessor.tokenize, text, **options)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """See `EngineClient`."""
        return await asyncio.to_thread(self.preprocessor.detokenize, token_ids) if token_ids else ""

    async def generate(self, prompt: Prompt, params: SamplingParams, request_id: str) -> AsyncGenerator[Delta, None]:
        """Prepare and stream one prompt; `Delta.index` counts the samples of `params.n`."""
        stream = self.stream(await self.prepare(prompt, params, request_id))
        try:
            async for delta in stream:
                yield delta
        finally:
            await stream.aclose()

    def stream(self, requests: Sequence[Request], timeout_s: float | None = None) -> OpenStream:
        """See `EngineClient`. Raises `EngineDeadError` if the controller ends first."""
        self.check_open(len(requests), num_prompt_tokens(requests))
        queue = self._streams.open(_with_tenant(requests))
        timer = self._start_timer(queue, self._timeout_s if timeout_s is None else timeout_s)

        def close() -> None:
            if timer is not None:
                timer.cancel()
            self._streams.close(queue)

        return OpenStream(queue, close)

    def _start_timer(self, stream: StreamQueue, timeout_s: float | None) -> asyncio.TimerHandle | None:
        if timeout_s is None:
            return None
        error = DeadlineExceededError(f"the request exceeded its time-out of {timeout_s:g} s and was aborted")
        return asyncio.get_running_loop().call_later(timeout_s, self._streams.fail, stream, error)

    def check_open(self, num_requests: int = 1, num_tokens: int = 1) -> None:
        """See `EngineClient`."""
        self._check_alive()
        try:
            self.check_running()
            if self._is_draining:
                raise DrainingError("the server is about to stop and takes no new requests", DRAINING_RETRY_S)
            self._admission.check(num_requests, num_tokens)
        except OverloadedError as error:
            if self.metrics:
                self.metrics.turned_away(error)
            raise

    def check_running(self) -> None:
        """See `EngineClient`."""
        self._check_alive()
        if self._stalled is not None:
            raise EngineStalledError(self._stalled.reason, self._stalled.retry_after_s)
        outage = self._stats.outage
        if outage is not None and outage.retry_after_s is not None:
            raise NoRoomError(str(outage), outage.retry_after_s)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._death()

    def _death(self) -> EngineDeadError:
        kind = type(self._failure) if isinstance(self._failure, EngineDeadError) else EngineDeadError
        return kind(str(self._failure))

    def _on_report(self, report: Report) -> None:
        """Handle a report of the channel, on the event loop."""
        if isinstance(report, Stalled):
            self._stall(report)
            return
        self._stalled = None
        if isinstance(report, Alive):
            return
        self._reported_at = time.monotonic()
        if isinstance(report, Outputs):
            self._stats = report.stats or self._stats
            for output in report.outputs:
                self._streams.add(output)
        elif isinstance(report, LoadProgress):
            self._report_progress(report.text)
        elif isinstance(report, Ready):
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(report.info)
        elif self._failure is None:
            self._fail(report)

    def _stall(self, report: Stalled) -> None:
        """End all streams: nothing comes until the controller continues, and it then finds them aborted."""
        self._stalled = report
        log.error("%s; %d request(s) end, and new ones are refused", report.reason, len(self._streams))
        self._streams.fail_all(EngineStalledError(report.reason, report.retry_after_s))

    def _fail(self, report: Failed) -> None:
        self._failure = START_ERRORS.get(report.kind, EngineDeadError)(report.reason)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(self._failure)
            return
        log.error("the engine has failed: %s; %d request(s) are lost", report.reason, len(self._streams))
        self._streams.end(self._death())
        self._has_died.set()

    async def close(self) -> None:
        """Stop the controller. Open streams raise `DrainingError` after `drain`, else `EngineDeadError`."""
        end: SlipstreamError | None = None
        if self._failure is None:
            self._failure = EngineDeadError("the engine was shut down")
            if self._is_draining:
                end = DrainingError("the server has stopped, before this answer ended", DRAINING_RETRY_S)
        self._streams.end(end or self._death())
        await self._channel.close()


def _with_tenant(requests: Sequence[Request]) -> Sequence[Request]:
    """Return *requests* with the tenant in their cache salt, so that API keys do not share caches."""
    tenant = TENANT.get()
    if not tenant:
        return requests
    return [msgspec.structs.replace(each, cache_salt=f"{tenant}/{each.cache_salt}") for each in requests]
