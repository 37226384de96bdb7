"""An HTTP server with its guards, for the fake engine, on a real socket."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from cluster.serving.frontend import bound
from cluster.serving.setup import client_of
from protos.config.engine import SpeculativeConfig
from runtime.frontend.async_engine import AsyncEngine
from runtime.http.app import create_app
from runtime.http.context import ServerOptions
from runtime.http.options import SafetyOptions
from runtime.http.server.acceptor import BoundedServer
from runtime.http.server.connection import guarded_protocol
from runtime.metrics.prometheus import Metrics
from tests.support.serving.certificates import Signed
from tests.support.serving.fake_engine import build, make_preprocessor, tokenizer
from tests.support.serving.thread_channel import ThreadChannel

DRAFTS = SpeculativeConfig(method="draft_model", num_speculative_tokens=4, model="none", policy="fixed")


async def settled(engine: AsyncEngine) -> None:
    """Wait until *engine* runs nothing and holds no blocks."""
    async with asyncio.timeout(60):
        while (now := engine.stats()).num_running or now.num_waiting or now.kv_usage:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # snapshots come without an event


@dataclass(frozen=True)
class Guarded:
    """A running server. Calls to the engine run on its event loop."""

    port: int
    engine: AsyncEngine
    loop: asyncio.AbstractEventLoop
    client: httpx.Client

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(path, **options)

    def raw(self, data: bytes, timeout_s: float = 120.0) -> bytes:
        """Send *data* as it is; return everything that comes back until the server closes the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout_s) as connection:
            connection.sendall(data)
            received = b""
            with contextlib.suppress(ConnectionResetError):
                while part := connection.recv(65536):
                    received += part
            return received

    def drain(self) -> None:
        """Let the engine refuse new requests."""
        self.loop.call_soon_threadsafe(self.engine.drain)

    def idle(self) -> None:
        """Wait until the engine runs nothing and holds no blocks."""
        asyncio.run_coroutine_threadsafe(settled(self.engine), self.loop).result()


def guarded_engine(safety: SafetyOptions, max_model_len: int = 512) -> AsyncEngine:
    """Return the fake engine with the limits of *safety*; it drafts."""
    channel = ThreadChannel(lambda inbox, say: build(inbox, say, max_model_len, DRAFTS))
    return client_of(channel, make_preprocessor, Metrics("fake"), safety)


class ListeningBounded(BoundedServer):
    """Sets `listening` once it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for each in sockets or ():
            each.listen(2048)
        await super().startup(sockets)
        self.listening.set()


@contextlib.contextmanager
def guarded(
    max_model_len: int = 512, tls: Signed | None = None, keep_alive_s: int = 5, **safety: Any
) -> Iterator[Guarded]:
    """Serve the fake engine from a thread, with the safety options given; by HTTPS with *tls*."""
    allowed = SafetyOptions.of(safety)
    engine = guarded_engine(allowed, max_model_len)
    assert engine.metrics is not None
    options = ServerOptions(("fake",), "1.2.3", guard=allowed.guard, pacing=allowed.pacing)
    app = create_app(engine, tokenizer(), engine.metrics, options)
    config = uvicorn.Config(
        app,
        log_config=None,
        lifespan="off",
        timeout_graceful_shutdown=1,
        timeout_keep_alive=keep_alive_s,
        http=guarded_protocol(allowed.connections),
        ssl_certfile=None if tls is None else tls.cert,
        ssl_keyfile=None if tls is None else tls.key,
    )
    with bound("127.0.0.1", 0) as listener:
        server = ListeningBounded(config)
        loops: list[asyncio.AbstractEventLoop] = []

        async def serve() -> None:
            loops.append(asyncio.get_running_loop())
            await engine.start()
            await server.serve(sockets=[listener])
            await engine.close()

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        assert server.listening.wait(120)
        port = listener.getsockname()[1]
        try:
            scheme = "http" if tls is None else "https"
            with httpx.Client(base_url=f"{scheme}://127.0.0.1:{port}", timeout=120, verify=False) as client:
                yield Guarded(port, engine, loops[0], client)
        finally:
            server.should_exit = True
            thread.join(120)


def events(text: str) -> list[Any]:
    """Return the JSON of every event of a stream but the last, which must be `[DONE]`."""
    found = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert found.pop() == "[DONE]"
    return [json.loads(each) for each in found]
