"""Runs a `CompletionJob` and answers it, as one JSON body or as server-sent events."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import Request as HttpRequest
from msgspec import UNSET
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from runtime.frontend.admission import num_prompt_tokens
from runtime.frontend.client import EngineClient
from runtime.frontend.stream_queue import Delta
from runtime.http.errors import ApiError, as_api_error, error_body
from runtime.http.job import CompletionJob

T = TypeVar("T")
CLIENT_CLOSED = 499


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
    """Server-sent events. Closes their source at once when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events

    async def stream_response(self, send: Send) -> None:
        """Send all events, then close their source."""
        async with aclosing(self._events):
            await super().stream_response(send)


def respond_in_chunks(engine: EngineClient, job: CompletionJob) -> Response:
    """Answer with server-sent events. Raises as `EngineClient.check_open`, before the status is sent."""
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
    """Yield chunks as tokens arrive, grouped by packet; at the end usage and statistics, if requested."""
    async with (
        aclosing(engine.stream(job.requests, job.timeout_s)) as deltas,
        aclosing(job.pacing.batches(deltas)) as batches,
    ):
        async for batch in batches:
            yield _chunks_of(job, batch)
    if job.wants_usage:
        yield [job.envelope.wrap([], job.usage(), job.metrics())]


def _chunks_of(job: CompletionJob, batch: Sequence[Delta]) -> list[msgspec.Struct]:
    """Add *batch* to the choices; return a chunk for each choice with pending output."""
    touched = {choice.index: choice for choice in [job.add(delta) for delta in batch]}
    pending = [choice for choice in touched.values() if choice.has_pending]
    is_over = not job.wants_usage and all(choice.finish_reason is not None for choice in job.choices)
    no_usage = None if job.wants_usage else UNSET
    return [
        job.envelope.wrap([choice.flush()], no_usage, job.metrics(is_last=is_over and choice is pending[-1]))
        for choice in pending
    ]
