"""Accepts connections without running out of files, and uvicorn's server with it.

asyncio's own server logs a traceback for each connection that it cannot accept, thousands in a second.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import cast

import uvicorn

from runtime.http.server.connection import GuardedProtocol
from runtime.http.server.open_connections import IDLE_S, OpenConnections
from runtime.metrics.logs import LogLimit

log = logging.getLogger("slipstream")

ACCEPTED_AT_ONCE = 64
"""Connections accepted before other work of the event loop goes on."""
RETRY_S = 0.5
"""Wait after the system has refused a file or memory."""
HANDSHAKE_S = 10.0
"""Time for the TLS handshake."""


class Acceptor:
    """Accepts the connections of one listening socket; pauses at the limit. Belongs to the running event loop.

    Args:
        listener: listens; closed by the caller.
        make: returns the protocol of a new connection.
        connections: counts the sockets; its `on_room` ends a pause.
        tls: for TLS.
    """

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], GuardedProtocol],
        connections: OpenConnections,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._listener = listener
        self._make = make
        self._connections = connections
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._is_open = self._is_reading = False
        self._connecting: dict[asyncio.Task[None], float] = {}
        """Connections that are being made, and since when, oldest first."""
        self._making_room: asyncio.TimerHandle | None = None
        self._log_limit = LogLimit()

    def open(self) -> None:
        """Begin to accept."""
        self._listener.setblocking(False)
        self._is_open = True
        self._connections.on_room = self._resume
        self._resume()

    def _resume(self) -> None:
        if self._is_open and not self._is_reading and self._connections.may_accept:
            self._is_reading = True
            self._loop.add_reader(self._listener, self._accept)

    def _pause(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._listener)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            if not self._connections.may_accept:
                self._pause()
                self._make_room()
                return
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no files or memory are left
                self._log_limit.log(log.error, "cannot accept connections for now: %s", error.strerror)
                self._pause()
                self._loop.call_later(RETRY_S, self._resume)
                return
            self._connections.num_sockets += 1
            task = self._loop.create_task(self._connect(connection))
            self._connecting[task] = self._loop.time()
            task.add_done_callback(self._connecting.pop)

    def _make_room(self) -> None:
        """While no socket may be accepted, close those whose clients do not shake hands, the oldest first.

        They have no protocol yet, so they are not among the silent connections.
        """
        if self._making_room is not None:
            self._making_room.cancel()
            self._making_room = None
        if self._is_reading or not self._is_open:
            return
        latest = self._loop.time() - IDLE_S
        for task in [task for task, since in self._connecting.items() if since <= latest][:ACCEPTED_AT_ONCE]:
            task.cancel()
        self._making_room = self._loop.call_later(RETRY_S, self._make_room)

    async def _connect(self, connection: socket.socket) -> None:
        """Make the protocol of *connection*, which reports its end itself."""
        connection.setblocking(False)
        handshake_s = None if self._tls is None else HANDSHAKE_S
        protocol = self._make()
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._tls, ssl_handshake_timeout=handshake_s
            )
        except (OSError, TimeoutError, asyncio.CancelledError) as error:  # includes ssl.SSLError
            log.debug("a connection ended before it began: %s", type(error).__name__)
            if protocol.transport is None:
                self._connections.closed_socket()

    def close(self) -> None:
        """Accept no more."""
        self._pause()
        self._is_open = False
        for task in self._connecting:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait for connections that were being made."""
        await asyncio.gather(*self._connecting, return_exceptions=True)


class BoundedServer(uvicorn.Server):
    """uvicorn's server with an `Acceptor`. Its configuration has a protocol of `guarded_protocol`."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on *sockets*, which listen."""
        await self.lifespan.startup()
        kind = cast("type[GuardedProtocol]", self.config.http_protocol_class)
        acceptors = [
            Acceptor(each, self._maker(kind), kind.open_connections, self.config.ssl) for each in sockets or ()
        ]
        for acceptor in acceptors:
            acceptor.open()
        self.servers: Sequence[Acceptor] = acceptors  # type: ignore[assignment]  # what uvicorn uses of a server
        self.started = True

    def _maker(self, kind: type[GuardedProtocol]) -> Callable[[], GuardedProtocol]:
        return lambda: kind(self.config, self.server_state, self.lifespan.state)
