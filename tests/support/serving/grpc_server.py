"""HTTP and gRPC servers of an engine, on an event loop in a thread."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Iterator
from typing import Any, TypeVar

import grpc

from cluster.serving.frontend import Frontend, ServerContext
from cluster.serving.grpc_server import GrpcFrontend, GrpcOptions
from cluster.serving.http_server import HttpFrontend, HttpOptions
from cluster.serving.tls import TlsFiles
from protos import slipstream_v1_pb2 as pb
from protos import slipstream_v1_pb2_grpc as stubs
from runtime.frontend.async_engine import AsyncEngine
from runtime.frontend.keys import Keys
from runtime.frontend.pacing import UNPACED, Pacing
from runtime.http.context import ServerOptions
from runtime.http.server.limits import ConnectionLimits, GuardOptions
from tests.support.serving.fake_engine import tokenizer as fake_tokenizer

T = TypeVar("T")
HOST = "127.0.0.1"
SERVICE = "slipstream.v1.GenerationService"


class Served:
    """Two servers of *engine*; they listen after `start`, and answer after `load`."""

    def __init__(
        self,
        engine: AsyncEngine,
        loop: asyncio.AbstractEventLoop,
        *,
        keys: tuple[str, ...] = (),
        grpc_tls: TlsFiles | None = None,
        http_tls: TlsFiles | None = None,
        pacing: Pacing = UNPACED,
        stall_s: float = 60.0,
    ) -> None:
        guard = GuardOptions(Keys(keys))
        self.engine = engine
        self.options = ServerOptions(
            ("fake", "org/alias"), "1.2.3", unlisted_names=("/models/fake",), guard=guard, pacing=pacing
        )
        self._loop = loop
        self._http = HttpFrontend(HttpOptions(HOST, 0, http_tls), ConnectionLimits())
        self._grpc = GrpcFrontend(GrpcOptions(HOST, 0, grpc_tls), guard, ConnectionLimits(stall_s=stall_s))
        self._faces: list[Frontend] = [self._http, self._grpc]
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        """Address of the HTTP server."""
        return self._http.address

    @property
    def address(self) -> str:
        """Address of the gRPC server."""
        return f"{HOST}:{self._grpc.address.rpartition(':')[2]}"

    def run(self, work: Awaitable[T]) -> T:
        """Run *work* on the servers' event loop."""

        async def timed() -> T:
            async with asyncio.timeout(120):
                return await work

        return asyncio.run_coroutine_threadsafe(timed(), self._loop).result()

    async def start(self) -> None:
        for face in self._faces:
            await face.start()

    async def load(self, tokenizer: Any) -> None:
        await self.engine.start()
        assert self.engine.metrics is not None
        for face in self._faces:
            await face.open(ServerContext(self.engine, tokenizer, self.engine.metrics, self.options))
        self._tasks = [asyncio.create_task(face.serve()) for face in self._faces]

    async def stop(self) -> None:
        await self.engine.close()
        for face in self._faces:
            await face.stop(at_once=False)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def busy(self) -> None:
        """Wait until the controller reports a running request."""
        while not self.engine.stats().num_running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def idle(self) -> None:
        """Wait until the controller runs nothing."""
        while self.engine.stats().num_running or self.engine.stats().num_waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    @contextlib.contextmanager
    def channel(self, *options: tuple[str, Any]) -> Iterator[grpc.Channel]:
        """Yield a plain channel."""
        with grpc.insecure_channel(self.address, options) as channel:
            yield channel

    @contextlib.contextmanager
    def stub(self, *options: tuple[str, Any]) -> Iterator[Any]:
        """Yield a stub of the checked-in code."""
        with self.channel(*options) as channel:
            yield stubs.GenerationServiceStub(channel)


@contextlib.contextmanager
def serving(engine: AsyncEngine, *, tokenizer: Any = None, is_loaded: bool = True, **options: Any) -> Iterator[Served]:
    """Serve *engine* on free ports of the loopback."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    served = Served(engine, loop, **options)
    try:
        served.run(served.start())
        if is_loaded:
            served.run(served.load(tokenizer or fake_tokenizer()))
        yield served
    finally:
        served.run(served.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


def request(prompt: str, max_tokens: int = 8, **fields: Any) -> pb.GenerateRequest:
    """Return a greedy request for text; *fields* belong to the request or to its sampling parameters."""
    own = {name: fields.pop(name) for name in list(fields) if name in pb.GenerateRequest.DESCRIPTOR.fields_by_name}
    sampling = pb.SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, **fields})
    return pb.GenerateRequest(text=prompt, sampling=sampling, **own)


def answer(responses: Any) -> tuple[list[pb.GenerateChunk], list[pb.GenerateComplete]]:
    """Return the chunks and the final messages of a call."""
    messages = list(responses)
    kinds = {"chunk": [], "complete": []}  # type: dict[str, list[Any]]
    for message in messages:
        kind = message.WhichOneof("response")
        if kind is not None:
            kinds[kind].append(getattr(message, kind))
    return kinds["chunk"], kinds["complete"]
