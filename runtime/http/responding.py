"""Runs a `CompletionJob` and answers it, as one JSON body or as server-sent events."""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
from fastapi import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from runtime.frontend.client import EngineClient
from runtime.frontend.stream_queue import Delta, Deltas
from runtime.http.context import RouteContext
from runtime.http.errors import ApiError, as_api_error, error_body
from runtime.http.job import CompletionJob
from runtime.http.schemas import GenerationRequest

T = TypeVar("T")
CLIENT_CLOSED = 499
DONE = b"data: [DONE]\n\n"


async def respond_whole(engine: EngineClient, job: CompletionJob, http: HttpRequest) -> Response:
    """Answer with one JSON body."""
    await _unless_disconnected(http, _collect(engine, job))
    body = job.envelope.wrap([choice.flush() for choice in job.choices], job.usage(), job.metrics())
    return Response(msgspec.json.encode(body), media_type="application/json")


async def _collect(engine: EngineClient, job: CompletionJob) -> None:
    async with aclosing(engine.stream(job.requests, job.timeout_s)) as deltas:
        async for delta in deltas:
            job.add(delta)


async def _unless_disconnected(http: HttpRequest, work: Awaitable[T]) -> T:
    """Await *work*, but cancel it when the client disconnects."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(http.receive))
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


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events, made of *deltas*. Closes both at once when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], deltas: Deltas) -> None:
        super().__init__(events, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events, self._deltas = events, deltas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, then close their source; it is open even if the client has gone before the first one."""
        async with aclosing(self._deltas), aclosing(self._events):
            await super().__call__(scope, receive, send)


class EventWriter(ABC):
    """Writes one response as server-sent events."""

    def __init__(self, job: CompletionJob) -> None:
        self.job = job

    def begin(self) -> list[bytes]:
        """Return the events before the first output."""
        return []

    @abstractmethod
    def add(self, batch: Sequence[Delta]) -> list[bytes]:
        """Add *batch* to the job; return the events for it. Raises `SlipstreamError` if a request failed."""

    @abstractmethod
    def finish(self) -> list[bytes]:
        """Return the events after the last output."""

    @abstractmethod
    def fail(self, error: ApiError) -> list[bytes]:
        """Return the events that end a failed response."""


class ChunkWriter(EventWriter):
    """Writes chunks in the format of OpenAI's completions and chat completions."""

    def add(self, batch: Sequence[Delta]) -> list[bytes]:
        """Return a chunk for each choice with pending output."""
        job = self.job
        touched = {choice.index: choice for choice in [job.add(delta) for delta in batch]}
        pending = [choice for choice in touched.values() if choice.has_pending]
        is_over = job.stream_usage == "none" and all(choice.finish_reason is not None for choice in job.choices)
        usage = job.chunk_usage()
        return [
            _chunk(job.envelope.wrap([choice.flush()], usage, job.metrics(is_last=is_over and choice is pending[-1])))
            for choice in pending
        ]

    def finish(self) -> list[bytes]:
        """Return usage and statistics, if requested, and the end mark."""
        job = self.job
        last = [] if job.stream_usage == "none" else [_chunk(job.envelope.wrap([], job.usage(), job.metrics()))]
        return [*last, DONE]

    def fail(self, error: ApiError) -> list[bytes]:
        """Return the error and the end mark."""
        return [b"data: " + error_body(error) + b"\n\n", DONE]


def _chunk(body: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def respond_in_events(engine: EngineClient, writer: EventWriter) -> Response:
    """Answer with server-sent events. Raises as `EngineClient.stream`, before the status is sent."""
    deltas = engine.stream(writer.job.requests, writer.job.timeout_s)
    return EventStream(_packets(deltas, writer), deltas)


async def _packets(deltas: Deltas, writer: EventWriter) -> AsyncGenerator[bytes, None]:
    """Yield events as tokens arrive, grouped by packet."""
    job = writer.job
    packet = job.pacing.packet
    try:
        if first := writer.begin():
            yield packet(first)
        async with aclosing(job.pacing.batches(deltas)) as batches:
            async for batch in batches:
                if data := packet(writer.add(batch)):
                    yield data
        last = writer.finish()
    except Exception as error:
        last = writer.fail(as_api_error(error))
    yield packet(last)


async def respond(
    context: RouteContext,
    http: HttpRequest,
    body: GenerationRequest,
    job: CompletionJob,
    events: Callable[[CompletionJob], EventWriter] = ChunkWriter,
) -> Response:
    """Run *job* and answer as *body* wants it; *events* makes the writer of a stream."""
    recorder = context.recorder(http.headers, job.requests)
    job = replace(job, timeout_s=body.timeout, pacing=context.options.pacing, recorder=recorder)
    if body.stream:
        return respond_in_events(context.engine, events(job))
    return await respond_whole(context.engine, job, http)
