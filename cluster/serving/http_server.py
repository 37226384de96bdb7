"""The HTTP server of a service of its own."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import uvicorn

from cluster.serving.frontend import ServerContext, bound
from cluster.serving.startup_info import described, served_names, url_host
from cluster.serving.tls import TlsFiles
from runtime.http.app import create_app
from runtime.http.server.connection import guarded_protocol
from runtime.http.server.limits import ConnectionLimits

__all__ = ["HttpFrontend", "HttpOptions", "bound", "described", "served_names"]

KEEP_ALIVE_S = 75  # clients keep idle connections for 5 s and more; whoever closes first must not be the server
BACKLOG = 2048  # connections that may wait to be accepted
CLOSING_S = 1
"""Answers that could not be finished in time have this long to say so."""


@dataclass(frozen=True)
class HttpOptions:
    """Where and how to listen."""

    host: str = "0.0.0.0"
    port: int = 8000
    tls: TlsFiles | None = None


class _Server(uvicorn.Server):
    """Leaves signals to the service."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpFrontend:
    """See `cluster.serving.frontend.Frontend`."""

    def __init__(self, options: HttpOptions, limits: ConnectionLimits) -> None:
        self._options = options
        self._limits = limits
        self._owned = contextlib.ExitStack()
        self._listener: socket.socket | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def num_running(self) -> int:
        """See `Face`."""
        return 0 if self._server is None else len(self._server.server_state.tasks)

    @property
    def address(self) -> str:
        """See `Face`."""
        scheme = "http" if self._options.tls is None else "https"
        return f"{scheme}://{url_host(self._options.host)}:{self._taken.getsockname()[1]}"

    @property
    def _taken(self) -> socket.socket:
        assert self._listener is not None, "not started"
        return self._listener

    async def start(self) -> None:
        """See `Face`."""
        self._listener = self._owned.enter_context(bound(self._options.host, self._options.port))

    async def open(self, parts: ServerContext) -> None:
        """See `Face`."""
        tls = self._options.tls
        self._server = _Server(
            uvicorn.Config(
                create_app(parts.engine, parts.tokenizer, parts.metrics, parts.options),
                http=guarded_protocol(self._limits),
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_graceful_shutdown=CLOSING_S,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                ssl_certfile=None if tls is None else tls.cert,
                ssl_keyfile=None if tls is None else tls.key,
            )
        )
        self._taken.listen(BACKLOG)  # whoever is told the address may connect at once

    async def serve(self) -> None:
        """See `Face`."""
        assert self._server is not None, "not open"
        self._serving = asyncio.current_task()
        await self._server.serve(sockets=[self._taken])

    async def look(self) -> None:
        """See `Face`: `/health` asks the engine itself."""

    async def stop(self, *, at_once: bool) -> None:
        """See `Face`."""
        if self._server is not None:
            self._server.force_exit = at_once
            self._server.should_exit = True
        if self._serving is not None:
            await asyncio.wait((self._serving,))
        self._owned.close()
