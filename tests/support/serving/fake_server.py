"""An HTTP server for the fake engine, in a thread."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

import uvicorn

from protos.config.engine import SpeculativeConfig
from runtime.http.app import create_app
from runtime.http.context import ServerOptions
from tests.support.serving.fake_engine import local_engine, tokenizer

DRAFTING = SpeculativeConfig("fake", num_speculative_tokens=4)


@contextlib.contextmanager
def served(max_model_len: int = 512, speculative: SpeculativeConfig | None = DRAFTING) -> Iterator[str]:
    """Serve a fake engine, by default one that drafts, on a free loopback port; yield its address."""
    engine = local_engine(max_model_len, speculative)
    assert engine.metrics is not None
    app = create_app(engine, tokenizer(), engine.metrics, ServerOptions(("fake",), "1"))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        async def serve() -> None:
            await engine.start()
            await server.serve(sockets=[listener])
            await engine.close()

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
