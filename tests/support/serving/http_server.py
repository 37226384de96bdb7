"""An HTTP server in a thread."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import uvicorn

from cluster.serving.frontend import bound
from runtime.frontend.async_engine import AsyncEngine
from runtime.http.app import create_app
from runtime.http.context import ServerOptions
from tests.support.serving import fake_engine


@dataclass(frozen=True)
class Served:
    """A running server."""

    url: str
    engine: AsyncEngine
    client: openai.OpenAI
    loop: asyncio.AbstractEventLoop

    def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json={"model": "fake", **body}, timeout=60)

    @staticmethod
    def events(answer: httpx.Response) -> list[Any]:
        """Return the chunks of a stream."""
        *lines, last = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert last == "[DONE]"
        return [json.loads(line) for line in lines]

    def idle(self) -> None:
        """Wait until the controller runs nothing."""

        async def settled() -> None:
            async with asyncio.timeout(60):
                while self.engine.stats().num_running:  # noqa: ASYNC110 - snapshots come without an event
                    await asyncio.sleep(0.01)

        asyncio.run_coroutine_threadsafe(settled(), self.loop).result()


class Listening(uvicorn.Server):
    """Sets `listening` once it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


@contextlib.contextmanager
def serving(engine: AsyncEngine, tokenizer: Any = None, **options: Any) -> Iterator[Served]:
    """Serve *engine* on a free loopback port from a thread, with *options* of `ServerOptions`."""
    with bound("127.0.0.1", 0) as listener:
        told = ServerOptions(("fake", "org/alias"), "1.2.3", unlisted_names=("/models/fake",), **options)
        assert engine.metrics is not None
        app = create_app(engine, tokenizer or fake_engine.tokenizer(), engine.metrics, told)
        server = Listening(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1))

        async def serve() -> None:
            loops.append(asyncio.get_running_loop())
            await engine.start()
            await server.serve(sockets=[listener])
            await engine.close()

        loops: list[asyncio.AbstractEventLoop] = []
        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        assert server.listening.wait(90)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
        try:
            yield Served(url, engine, client, loops[0])
        finally:
            client.close()
            server.should_exit = True
            thread.join(30)
