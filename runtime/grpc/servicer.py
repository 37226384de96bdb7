"""`slipstream.v1.GenerationService` on grpc.aio: what `Answering` answers, put on the wire."""

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
from runtime.grpc import reading
from runtime.grpc.answering import Answering
from runtime.grpc.errors import StatusError, as_status
from runtime.grpc.health import SERVICE
from runtime.http.server.limits import GuardOptions

REQUEST_ID = "request_id"
"""The metadata key that names a request, as on Ray Serve."""

OPEN_TO_ALL = ("/grpc.health.v1.Health/",)
"""Methods that need no key: whoever watches over a server holds none."""

RETRY_WHILE_LOADING_S = 5.0
MALFORMED = object()
"""What stands for a request that could not be parsed."""

Reply = TypeVar("Reply")


class GenerationServicer(stubs.GenerationServiceServicer):
    """Answers calls once it has been opened, and refuses them before. Belongs to one event loop.

    Args:
        stall_s: how long a message may wait until the client has read enough of those before.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._answering: Answering | None = None
        self.num_running = 0
        """Calls that are being answered."""

    def open(self, answering: Answering) -> None:
        """Let *answering* answer from now on."""
        self._answering = answering

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        """Stream an answer; a client that cancels, or whose deadline is over, ends it at once."""
        await self._answered(context, self._generate(request, context))

    async def _generate(self, request: pb.GenerateRequest, context: Any) -> None:
        answering = self._ready(request)
        name = reading.request_id(request, _told(context.invocation_metadata(), REQUEST_ID))
        context.set_trailing_metadata(((REQUEST_ID, name),))
        await context.send_initial_metadata(((REQUEST_ID, name),))
        async with aclosing(answering.generate(request, name)) as responses:
            async for response in responses:
                await self._write(context, response)

    async def _write(self, context: Any, response: pb.GenerateResponse) -> None:
        """Send *response*, which waits while the client does not read; not for ever."""
        try:
            async with asyncio.timeout(self._stall_s):
                await context.write(response)
        except TimeoutError:
            raise StatusError("DEADLINE_EXCEEDED", f"nothing of the answer was read for {self._stall_s:g} s") from None

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        """Return the ids of a text or a conversation."""
        return await self._answered(context, self._done(Answering.tokenize, request))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        """Return the text of token ids."""
        return await self._answered(context, self._done(Answering.detokenize, request))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        """Return what is served."""
        return await self._answered(context, self._done(Answering.model_info, request))

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        """Return what serves it."""
        return await self._answered(context, self._done(Answering.server_info, request))

    async def _done(self, method: Callable[[Answering, Any], Awaitable[Reply]], request: Any) -> Reply:
        return await method(self._ready(request), request)

    def _ready(self, request: Any) -> Answering:
        if self._answering is None:
            raise StatusError("UNAVAILABLE", "the model is still being loaded", RETRY_WHILE_LOADING_S)
        if request is MALFORMED:
            raise StatusError("INVALID_ARGUMENT", "the request is no message of slipstream.v1")
        return self._answering

    async def _answered(self, context: Any, work: Awaitable[Reply]) -> Reply:
        """Do *work*; whatever it raises ends the call with a status and one line."""
        with self._counted():
            try:
                return await work
            except Exception as error:
                status = as_status(error)
                code, details, trailers = grpc.StatusCode[status.code_name], status.details, status.trailers
        # Where the client does not read, this waits for it: by now the call holds nothing any more.
        await context.abort(code, details, (*(context.trailing_metadata() or ()), *trailers))
        raise AssertionError("abort raises")

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1


def _told(metadata: Any, key: str) -> str | None:
    return next((value for name, value in metadata or () if name == key), None)


class Gate(aio.ServerInterceptor):  # type: ignore[misc]
    """Lets only calls in that bring a key, but for those to `OPEN_TO_ALL`; makes messages that are none `MALFORMED`."""

    def __init__(self, options: GuardOptions) -> None:
        self._options = options
        # A handler of streams suits every kind of method: it need not wait for a message to refuse.
        self._refusing = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """Return the handler of a call, or the one that refuses it."""
        method = handler_call_details.method
        given = _told(handler_call_details.invocation_metadata, "authorization")
        if not method.startswith(OPEN_TO_ALL) and not self._options.keys.accepts(given):
            return self._refusing
        if self._options.salts_by_key:
            TENANT.set(self._options.keys.tenant(given))
        handler = await continuation(handler_call_details)
        if handler is None or not method.startswith(f"/{SERVICE}/"):
            return handler
        return handler._replace(request_deserializer=_lenient(handler.request_deserializer))


def _lenient(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Let our own code answer what cannot be parsed: grpc.aio would log a traceback, and tell its last line."""

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
