"""What completions and chat completions share: collecting answers, streaming them, noticing who hung up."""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from fastapi import Request as HttpRequest
from msgspec import UNSET, UnsetType
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from protos.errors import failure
from protos.messages import Request, SpeculationStats, Step, TokenLogprobs, TokenOutput
from runtime.frontend.admission import num_prompt_tokens
from runtime.frontend.client import EngineClient
from runtime.frontend.pacing import UNPACED, Pacing
from runtime.frontend.speculation_override import speculating
from runtime.frontend.stream_queue import Delta
from runtime.http.errors import ApiError, as_api_error, error_body
from runtime.http.origins import Origins
from runtime.http.render import speculation, usage
from runtime.http.responses import ResponseMetrics, Usage
from runtime.http.schemas import GenerationRequest, SpecMetrics
from runtime.http.server.server import Server

T = TypeVar("T")
CLIENT_CLOSED = 499


class Choice(ABC):
    """One answer in the making: takes outputs, gives what may be sent since the last time."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.num_tokens = 0
        self.num_cached = 0
        self.speculation: SpeculationStats | None = None
        self.steps: list[Step] = []
        self.text = ""
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def add(self, output: TokenOutput) -> None:
        """Take what a step added. Raises `SlipstreamError` where the request failed."""
        if output.error is not None:
            raise failure(output.error)
        self.text += output.text
        self.num_tokens += len(output.token_ids)
        self.logprobs += output.logprobs or ()
        self.prompt_logprobs += output.prompt_logprobs or ()
        self.num_cached = max(self.num_cached, output.num_cached_tokens)
        self.speculation = output.speculation or self.speculation
        if output.step is not None and output.step.proposed:
            self.steps.append(output.step)
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason

    @property
    def has_news(self) -> bool:
        """Whether a chunk would say anything."""
        return self.finish_reason is not None or (self.num_tokens > 0 and bool(self.text or self.logprobs))

    def write(self) -> msgspec.Struct:
        """Return the response's part for everything added since the last call."""
        part = self.written()
        self.text, self.logprobs, self.prompt_logprobs = "", [], []
        return part

    @abstractmethod
    def written(self) -> msgspec.Struct:
        """Return the endpoint's form of what is pending."""


class Envelope(ABC):
    """What stands around the choices."""

    @abstractmethod
    def wrap(
        self,
        choices: list[Any],
        usage: Usage | UnsetType | None = UNSET,
        metrics: ResponseMetrics | UnsetType = UNSET,
    ) -> msgspec.Struct:
        """Return a response, or a chunk of a stream."""


@dataclass(frozen=True)
class CompletionJob:
    """One HTTP request for tokens, validated and ready to run.

    `groups` holds the requests of each prompt; flattened, they are in the order of `choices`.
    """

    groups: Sequence[Sequence[Request]]
    choices: Sequence[Choice]
    envelope: Envelope
    wants_usage: bool = False
    spec_metrics: SpecMetrics = "none"
    origins: Origins | None = None
    timeout_s: float | None = None
    pacing: Pacing = UNPACED

    @property
    def requests(self) -> list[Request]:
        """All requests, choice after choice."""
        return [request for group in self.groups for request in group]

    def usage(self) -> Usage:
        """Count the tokens so far."""
        cached, first = 0, 0
        for group in self.groups:
            cached += self.choices[first].num_cached
            first += len(group)
        return usage(self.groups, sum(choice.num_tokens for choice in self.choices), cached)

    def take(self, delta: Delta) -> Choice:
        """Let the choice have what a step added to it; return it."""
        choice = self.choices[delta.index]
        num_before = choice.num_tokens
        choice.add(delta.output)
        if self.origins is not None and choice.num_tokens > num_before:
            self.origins.add(delta.index, delta.output)
        return choice

    def metrics(self, *, is_last: bool = True) -> ResponseMetrics | UnsetType:
        """Return the statistics and origins that were asked for; statistics only with the last chunk."""
        metrics = self._statistics() if is_last else UNSET
        if self.origins is None:
            return metrics
        told = self.origins.take()
        if metrics is UNSET:
            return ResponseMetrics(token_origins=told) if told else UNSET
        return msgspec.structs.replace(metrics, token_origins=told)

    def _statistics(self) -> ResponseMetrics | UnsetType:
        if self.spec_metrics == "none":
            return UNSET
        steps = [step for choice in self.choices for step in choice.steps]
        stats = [choice.speculation for choice in self.choices]
        return speculation(stats, steps, is_detailed=self.spec_metrics == "detailed")


def marked(group: Sequence[Request], body: GenerationRequest, server: Server) -> list[Request]:
    """Return the samples of one prompt with what *body* says beside sampling.

    Every choice of a response tells the prompt's log-probabilities, so every sample computes them.

    Raises:
        InvalidRequestError: more is asked of speculation than is loaded.
    """
    first = group[0].sampling.prompt_logprobs
    return [
        msgspec.structs.replace(
            each,
            wants_steps=server.spec_metrics(body) != "none" or bool(body.token_origins),
            cache_salt=body.cache_salt or "",
            sampling=msgspec.structs.replace(each.sampling, prompt_logprobs=first),
        )
        for each in speculating(group, body.wish, server.engine.info)
    ]


async def respond_whole(engine: EngineClient, job: CompletionJob, http: HttpRequest) -> Response:
    """Answer with one JSON body."""
    await _unless_gone(http, _collect(engine, job))
    body = job.envelope.wrap([choice.write() for choice in job.choices], job.usage(), job.metrics())
    return Response(msgspec.json.encode(body), media_type="application/json")


async def _collect(engine: EngineClient, job: CompletionJob) -> None:
    async with aclosing(engine.stream(job.requests, job.timeout_s)) as deltas:
        async for delta in deltas:
            job.take(delta)


async def _unless_gone(http: HttpRequest, work: Awaitable[T]) -> T:
    """Do *work*, but give it up when the client hangs up."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_hung_up(http.receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(CLIENT_CLOSED, "the client closed the connection")
        return task.result()
    finally:
        for each in (task, watcher):
            each.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await each


async def _hung_up(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events whose source is closed at once when the client hangs up."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events

    async def stream_response(self, send: Send) -> None:
        """Send all events, then close their source."""
        async with aclosing(self._events):
            await super().stream_response(send)


def respond_in_chunks(engine: EngineClient, job: CompletionJob) -> Response:
    """Answer with server-sent events. Raises, while the status can still say so, as `EngineClient.check_open`."""
    engine.check_open(len(job.requests), num_prompt_tokens(job.requests))
    return EventStream(_events(engine, job))


async def _events(engine: EngineClient, job: CompletionJob) -> AsyncGenerator[bytes, None]:
    packet = job.pacing.packet
    try:
        async with aclosing(_chunks(engine, job)) as groups:
            async for chunks in groups:
                if data := packet([_event(msgspec.json.encode(chunk)) for chunk in chunks]):
                    yield data
    except Exception as error:
        yield packet([_event(error_body(as_api_error(error)))])
    yield packet([_event(b"[DONE]")])


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


async def _chunks(engine: EngineClient, job: CompletionJob) -> AsyncGenerator[list[msgspec.Struct], None]:
    """Yield chunks as tokens come, grouped by packet; usage and statistics at the end, where they were asked for."""
    async with (
        aclosing(engine.stream(job.requests, job.timeout_s)) as deltas,
        aclosing(job.pacing.batches(deltas)) as batches,
    ):
        async for batch in batches:
            yield _written(job, batch)
    if job.wants_usage:
        yield [job.envelope.wrap([], job.usage(), job.metrics())]


def _written(job: CompletionJob, batch: Sequence[Delta]) -> list[msgspec.Struct]:
    """Return a chunk for each choice that *batch* has news of."""
    touched = {choice.index: choice for choice in [job.take(delta) for delta in batch]}
    news = [choice for choice in touched.values() if choice.has_news]
    over = not job.wants_usage and all(choice.finish_reason is not None for choice in job.choices)
    no_usage = None if job.wants_usage else UNSET
    return [
        job.envelope.wrap([choice.write()], no_usage, job.metrics(is_last=over and choice is news[-1]))
        for choice in news
    ]
