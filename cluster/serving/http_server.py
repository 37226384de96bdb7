"""The HTTP server of `slipstream serve`."""

import asyncio
import contextlib
import socket
from dataclasses import dataclass, replace

import uvicorn

from cluster.serving.frontend import ServerContext, bound, listen
from cluster.serving.startup_info import url_host
from cluster.serving.tls import TlsFiles
from runtime.http.app import create_app
from runtime.http.server.acceptor import BoundedServer
from runtime.http.server.connection import guarded_protocol
from runtime.http.server.limits import ConnectionLimits

KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections (5 s and more), so that the client closes first."""
BACKLOG = 2048
"""Connections that may wait to be accepted."""
CLOSING_S = 1
"""Seconds in which unfinished answers may send their error."""


@dataclass(frozen=True)
class HttpOptions:
    """The address and certificates of the HTTP server."""

    host: str = "0.0.0.0"
    port: int = 8000
    tls: TlsFiles | None = None


class HttpFrontend:
    """See `cluster.serving.frontend.Frontend`."""

    def __init__(self, options: HttpOptions, limits: ConnectionLimits) -> None:
        self._options = options
        self._limits = limits
        self._owned = contextlib.ExitStack()
        self._listener: socket.socket | None = None
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def num_running(self) -> int:
        """See `Frontend`."""
        return 0 if self._server is None else len(self._server.server_state.tasks)

    @property
    def address(self) -> str:
        """See `Frontend`."""
        scheme = "http" if self._options.tls is None else "https"
        return f"{scheme}://{url_host(self._options.host)}:{self._listening.getsockname()[1]}"

    @property
    def _listening(self) -> socket.socket:
        assert self._listener is not None, "not started"
        return self._listener

    async def start(self) -> None:
        """See `Frontend`."""
        self._listener = self._owned.enter_context(bound(self._options.host, self._options.port))

    async def open(self, context: ServerContext) -> None:
        """See `Frontend`."""
        tls, guard = self._options.tls, context.options.guard
        options = replace(context.options, guard=replace(guard, sites=guard.sites.bound_to(self._options.host)))
        self._server = BoundedServer(
            uvicorn.Config(
                create_app(context.engine, context.tokenizer, context.metrics, options),
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
        listen(self._listening, BACKLOG)  # clients may connect as soon as the address is printed

    async def serve(self) -> None:
        """See `Frontend`. Runs uvicorn's phases one by one: its `serve` would also take over SIGINT and SIGTERM."""
        server, sockets = self._server, [self._listening]
        assert server is not None, "not open"
        self._serving = asyncio.current_task()
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup(sockets)
        await server.main_loop()
        await server.shutdown(sockets)

    async def publish_health(self) -> None:
        """See `Frontend`. `/health` reads the engine's state itself."""

    async def stop(self, *, at_once: bool) -> None:
        """See `Frontend`."""
        if self._server is not None:
            self._server.force_exit = at_once
            self._server.should_exit = True
        if self._serving is not None:
            await asyncio.wait((self._serving,))
        self._owned.close()
