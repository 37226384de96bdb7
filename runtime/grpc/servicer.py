"""Serves a `GenerationService` on grpc.aio."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from protos import slipstream_v1_pb2 as pb
from protos import slipstream_v1_pb2_grpc as stubs
from runtime.frontend.keys import TENANT
from runtime.grpc import parsing
from runtime.grpc.errors import StatusError, as_status
from runtime.grpc.service import GenerationService
from runtime.http.server.limits import GuardOptions

REQUEST_ID = "request_id"
"""The metadata key of the request id, as on Ray Serve."""

OPEN_METHODS = ("/grpc.health.v1.Health/",)
"""Methods that need no key: health probes have none."""

RETRY_WHILE_LOADING_S = 5.0
MALFORMED = object()
"""Stands for a request that could not be parsed."""
NOT_A_MESSAGE = (grpc.StatusCode.INVALID_ARGUMENT, "the request is not a message of this method")

Reply = TypeVar("Reply")


class GenerationServicer(stubs.GenerationServiceServicer):
    """Answers calls once it has been opened, and refuses them before. Belongs to one event loop.

    Args:
        stall_s: seconds a message may wait for the client to read earlier ones.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._service: GenerationService | None = None
        self.num_running = 0
        """Number of running calls."""

    def open(self, service: GenerationService) -> None:
        """Let *service* answer from now on."""
        self._service = service

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        """Stream an answer. Cancellation or the client's deadline ends it at once."""
        await self._answered(context, self._generate(request, context))

    async def _generate(self, request: pb.GenerateRequest, context: Any) -> None:
        service = self._ready(request)
        name = parsing.request_id(request, _metadata_value(context.invocation_metadata(), REQUEST_ID))
        context.set_trailing_metadata(((REQUEST_ID, name),))
        await context.send_initial_metadata(((REQUEST_ID, name),))
        async with aclosing(service.generate(request, name)) as responses:
            async for response in responses:
                await self._write(context, response)

    async def _write(self, context: Any, response: pb.GenerateResponse) -> None:
        """Send *response*. Waits while the client does not read, at most `stall_s`."""
        try:
            async with asyncio.timeout(self._stall_s):
                await context.write(response)
        except TimeoutError:
            raise StatusError("DEADLINE_EXCEEDED", f"nothing of the answer was read for {self._stall_s:g} s") from None

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        """Return the ids of a text or a conversation."""
        return await self._answered(context, self._done(GenerationService.tokenize, request))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        """Return the text of token ids."""
        return await self._answered(context, self._done(GenerationService.detokenize, request))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        """Describe the model."""
        return await self._answered(context, self._done(GenerationService.model_info, request))

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        """Describe the server."""
        return await self._answered(context, self._done(GenerationService.server_info, request))

    async def _done(self, method: Callable[[GenerationService, Any], Awaitable[Reply]], request: Any) -> Reply:
        return await method(self._ready(request), request)

    def _ready(self, request: Any) -> GenerationService:
        if self._service is None:
            raise StatusError("UNAVAILABLE", "the model is still being loaded", RETRY_WHILE_LOADING_S)
        return self._service

    async def _answered(self, context: Any, work: Awaitable[Reply]) -> Reply:
        """Await *work*; an error ends the call with its status."""
        with self._counted():
            try:
                return await work
            except Exception as error:
                status = as_status(error)
                code, details, trailers = grpc.StatusCode[status.code_name], status.details, status.trailers
        # Waits for a client that does not read; the call holds no resources by now.
        await context.abort(code, details, (*(context.trailing_metadata() or ()), *trailers))
        raise AssertionError("abort raises")

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1


def _metadata_value(metadata: Any, key: str) -> str | None:
    return next((value for name, value in metadata or () if name == key), None)


class ApiKeyInterceptor(aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without an accepted key, except to `OPEN_METHODS`, and messages that cannot be parsed."""

    def __init__(self, options: GuardOptions) -> None:
        self._options = options
        # A handler of streams fits every kind of method: it refuses without waiting for a message.
        self._refusing = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """Return the handler of a call, or one that refuses it."""
        method = handler_call_details.method
        given = _metadata_value(handler_call_details.invocation_metadata, "authorization")
        if not method.startswith(OPEN_METHODS) and not self._options.keys.accepts(given):
            return self._refusing
        if self._options.salts_by_key:
            TENANT.set(self._options.keys.tenant(given))
        handler = await continuation(handler_call_details)
        return None if handler is None else _refusing_malformed(handler)


def _refusing_malformed(handler: Any) -> Any:
    """Return *handler* with messages that cannot be parsed answered by INVALID_ARGUMENT."""
    lenient = handler._replace(request_deserializer=_lenient(handler.request_deserializer))
    if handler.request_streaming:
        return lenient._replace(stream_stream=_checking_stream(handler.stream_stream))
    kind = "unary_stream" if handler.response_streaming else "unary_unary"
    return lenient._replace(**{kind: _checking(getattr(handler, kind))})


def _checking(answer: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def checked(request: Any, context: Any) -> Any:
        if request is MALFORMED:
            await context.abort(*NOT_A_MESSAGE)
        return await answer(request, context)

    return checked


def _checking_stream(
    answer: Callable[[AsyncIterator[Any], Any], AsyncIterator[Any]],
) -> Callable[[AsyncIterator[Any], Any], AsyncIterator[Any]]:
    async def parsed(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            if request is MALFORMED:
                await context.abort(*NOT_A_MESSAGE)
            yield request

    async def checked(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for reply in answer(parsed(requests, context), context):
            yield reply

    return checked


def _lenient(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return `MALFORMED` on parse errors: grpc.aio would log a traceback, and send its last line to the client."""

    def parsed(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return MALFORMED

    return parsed


async def _refuse(requests: AsyncIterator[bytes], context: Any) -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED, "the API key is missing or wrong: send metadata authorization: Bearer KEY"
    )
