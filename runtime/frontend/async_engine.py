"""The async engine: what every front end (HTTP, gRPC, Python) asks for answers.

It tokenises, hands requests to a controller over a `Channel`, and gives each caller its own stream.
Cancelling or closing a stream aborts what is left of it; the blocks are free within one step.
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
    InvalidRequestError,
    ModelError,
    OverloadedError,
    PlacementError,
    SlipstreamError,
    SlowReaderError,
)
from protos.messages import Request, WorkerInfo
from protos.progress import ProgressCallback
from protos.sampling import SamplingParams
from protos.stats import EngineStats
from runtime.frontend.admission import ROOMY, Admission, QueueLimits, num_prompt_tokens
from runtime.frontend.channel import Channel, Commands, Failed, LoadProgress, Outputs, Ready, Report
from runtime.frontend.client import EngineState, Prompt
from runtime.frontend.keys import TENANT
from runtime.frontend.stream_queue import PATIENT, Delta, ReadingLimits, StreamQueue
from runtime.metrics.prometheus import Metrics
from runtime.text.preprocessor import Preprocessor
from runtime.text.tokenizer_pool import TokenizerPool

log = logging.getLogger("slipstream")

LONG_PROMPT = 20_000
"""Prompts of more characters are tokenised in a thread, so that other requests are not held up."""

START_ERRORS: dict[str, type[SlipstreamError]] = {
    "ConfigError": ConfigError,
    "ModelError": ModelError,
    "PlacementError": PlacementError,
}

DRAINING_RETRY_S = 5.0
"""Whoever is turned away by a server that stops is told to look for another one after this long."""

MakePreprocessor = Callable[[WorkerInfo], Awaitable[Preprocessor]]


def _of_tenant(requests: Sequence[Request]) -> Sequence[Request]:
    """Return *requests* with caches kept apart from those of other keys."""
    tenant = TENANT.get()
    if not tenant:
        return requests
    return [msgspec.structs.replace(each, cache_salt=f"{tenant}/{each.cache_salt}") for each in requests]


class AsyncEngine:
    """An `EngineClient` over a channel. Belongs to the event loop it was started on.

    Args:
        channel: leads to the controller; owned by this engine.
        make_preprocessor: called once the engine is loaded, with what it said of itself.
        metrics: told of every request and output.
        timeout_s: how long requests may take that bring no limit of their own; None for any time.
        reading: how slow a reader may be.
        queue: how much may wait.
    """

    def __init__(
        self,
        channel: Channel,
        make_preprocessor: MakePreprocessor,
        metrics: Metrics | None = None,
        *,
        timeout_s: float | None = None,
        reading: ReadingLimits = PATIENT,
        queue: QueueLimits = ROOMY,
    ) -> None:
        self.metrics = metrics
        self._timeout_s = timeout_s
        self._reading = reading
        self._admission = Admission(queue)
        self._tokenising = TokenizerPool()
        self._channel = channel
        self._make_preprocessor = make_preprocessor
        self._preprocessor: Preprocessor | None = None
        self._info: WorkerInfo | None = None
        self._ready: asyncio.Future[WorkerInfo] | None = None
        self._failure: SlipstreamError | None = None
        self._has_died = asyncio.Event()
        self._say: ProgressCallback = log.info
        self._stats = EngineStats()
        self._heard_at = time.monotonic()
        self._is_draining = False
        self._deliveries: dict[str, StreamQueue] = {}

    async def start(self, say: ProgressCallback = log.info) -> WorkerInfo:
        """Start the controller and wait until it serves; *say* is told what it does, line by line.

        Raises:
            ConfigError, ModelError: as the controller found.
            EngineDeadError: it ended for another reason.
        """
        self._say = say
        self._ready = asyncio.get_running_loop().create_future()
        await self._channel.start(self._deliver)
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
        if self._is_draining:
            return "draining"
        return "degraded" if self._stats.target_is_lost or self._stats.draft_is_down else "live"

    @property
    def silence_s(self) -> float:
        """See `EngineClient`."""
        return time.monotonic() - self._heard_at

    def drain(self) -> None:
        """Take no new requests from now on; what runs goes on."""
        self._is_draining = True

    async def death(self) -> EngineDeadError:
        """Return why the engine is gone, once it is; a `close` does not count."""
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
        """What makes requests. Raises `EngineDeadError` before the start and after the end."""
        self._check_alive()
        if self._preprocessor is None:
            raise EngineDeadError("the engine has not been started")
        return self._preprocessor

    def stats(self) -> EngineStats:
        """See `EngineClient`."""
        return self._stats

    async def prepare(self, prompt: Prompt, params: SamplingParams, request_id: str) -> list[Request]:
        """See `EngineClient`."""
        make = self.preprocessor.requests
        self.check_open()
        if params.structured_outputs is not None or _is_long(prompt) or _is_long(params.prediction):
            requests = await self._tokenising.run(make, prompt, params, request_id)
        else:
            requests = make(prompt, params, request_id)
        self.check_open(len(requests), num_prompt_tokens(requests))  # while an answer can still begin with 429
        return requests

    async def render_chat(self, messages: Any, params: SamplingParams, **options: Any) -> Prompt:
        """See `EngineClient`."""
        self.check_open()
        return await self._tokenising.run(self.preprocessor.chat, messages, params, **options)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """See `EngineClient`."""
        if not text:
            return ()
        return await self._tokenising.run(self.preprocessor.tokenize, text, add_special_tokens=add_special_tokens)

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

    async def stream(self, requests: Sequence[Request], timeout_s: float | None = None) -> AsyncGenerator[Delta, None]:
        """See `EngineClient`. Raises `EngineDeadError` if the controller ends first."""
        delivery = self._enter(_of_tenant(requests))
        alarm = self._set_alarm(delivery, self._timeout_s if timeout_s is None else timeout_s)
        try:
            while delivery.open:
                yield await delivery.take()
        finally:
            if alarm is not None:
                alarm.cancel()
            self._leave(delivery)

    def _set_alarm(self, delivery: StreamQueue, timeout_s: float | None) -> asyncio.TimerHandle | None:
        if timeout_s is None:
            return None
        error = DeadlineExceededError(f"the request took longer than its time-out of {timeout_s:g} s and was given up")
        return asyncio.get_running_loop().call_later(timeout_s, self._give_up, delivery, error)

    def _enter(self, requests: Sequence[Request]) -> StreamQueue:
        self.check_open(len(requests), num_prompt_tokens(requests))
        names = [request.request_id for request in requests]
        for name in names:
            if name in self._deliveries:
                raise InvalidRequestError(f"request_id {name!r} is already being answered", "request_id")
        self._admission.enter(requests)
        delivery = StreamQueue({name: index for index, name in enumerate(names)}, self._reading)
        self._deliveries.update(dict.fromkeys(names, delivery))
        for request in requests:
            if self.metrics:
                self.metrics.submitted(request)
        self._channel.send(Commands(requests=tuple(requests)))
        return delivery

    def _give_up(self, delivery: StreamQueue, error: SlipstreamError) -> None:
        """Abort what is left of a stream at once, whether its reader looks or not."""
        if self.metrics:
            self.metrics.turned_away(error)
        delivery.fail(error)
        self._leave(delivery)

    def _leave(self, delivery: StreamQueue) -> None:
        """Abort the requests of a stream that nobody listens to any more."""
        names = [name for name in delivery.open if self._deliveries.get(name) is delivery]
        for name in names:
            del self._deliveries[name]
            self._admission.leave(name)
            if self.metrics:
                self.metrics.aborted(name)
        if names and self._failure is None:
            self._channel.send(Commands(aborts=tuple(names)))

    def check_open(self, num_requests: int = 1, num_tokens: int = 1) -> None:
        """See `EngineClient`."""
        self._check_alive()
        try:
            if self._is_draining:
                raise DrainingError("the server is about to stop and takes no new requests", DRAINING_RETRY_S)
            self._admission.check(num_requests, num_tokens)
        except OverloadedError as error:
            if self.metrics:
                self.metrics.turned_away(error)
            raise

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._death()

    def _death(self) -> EngineDeadError:
        kind = type(self._failure) if isinstance(self._failure, EngineDeadError) else EngineDeadError
        return kind(str(self._failure))

    def _deliver(self, report: Report) -> None:
        """Take a report from the channel; runs on the event loop."""
        self._heard_at = time.monotonic()
        if isinstance(report, Outputs):
            self._take_outputs(report)
        elif isinstance(report, LoadProgress):
            self._say(report.text)
        elif isinstance(report, Ready):
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(report.info)
        elif self._failure is None:
            self._fail(report)

    def _take_outputs(self, report: Outputs) -> None:
        if report.stats is not None:
            self._stats = report.stats
        for output in report.outputs:
            delivery = self._deliveries.get(output.request_id)
            if delivery is None:
                continue  # aborted meanwhile
            if self.metrics:
                self.metrics.received(output)
            if output.token_ids or output.finish_reason is not None:
                self._admission.start(output.request_id)
            if output.finish_reason is not None:
                del self._deliveries[output.request_id]
            try:
                delivery.put(output)
            except SlowReaderError as error:
                self._give_up(delivery, error)

    def _fail(self, report: Failed) -> None:
        self._failure = START_ERRORS.get(report.kind, EngineDeadError)(report.reason)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(self._failure)
            return
        log.error("the engine is gone: %s; %d request(s) cannot be answered", report.reason, len(self._deliveries))
        self._wake_all()
        self._has_died.set()

    def _wake_all(self) -> None:
        """Tell every stream that nothing more will come."""
        for delivery in set(self._deliveries.values()):
            delivery.fail(self._death())

    async def close(self) -> None:
        """Stop the controller. What is in flight gets `EngineDeadError`."""
        if self._failure is None:
            self._failure = EngineDeadError("the engine was shut down")
        self._wake_all()
        await self._channel.close()


def _is_long(text: object) -> bool:
    """Whether *text* takes long enough to tokenise that others would notice."""
    return isinstance(text, str) and len(text) > LONG_PROMPT
