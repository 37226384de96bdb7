"""Limits on HTTP connections: their number, and the size and delay of request headers.

Bodies are limited by `runtime.http.server.guard`.
"""

import asyncio
import contextlib
import enum
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from runtime.http.errors import ApiError, error_body
from runtime.http.server.limits import ConnectionLimits
from runtime.http.server.open_connections import OpenConnections
from runtime.http.server.request_parser import RequestParser

REASONS = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}

BODY_PROGRESS = 4096
"""Bytes of a body after which its client counts as not silent."""


class Reading(enum.Enum):
    """What was read last of the newest request."""

    HEAD = enum.auto()
    """Nothing of it yet, or a part of its head."""
    BODY = enum.auto()
    """Its head, and perhaps a part of its body."""
    WHOLE = enum.auto()
    """All of it."""


class _HeadRefusedError(Exception):
    """Raised in a parser callback, to make the parser stop."""


def guarded_protocol(limits: ConnectionLimits) -> "type[GuardedProtocol]":
    """Return a protocol class for uvicorn with *limits*."""
    own = {"limits": limits, "open_connections": OpenConnections(limits.max_connections)}
    return type("LimitedProtocol", (GuardedProtocol,), own)


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on connections and request heads. Its errors are JSON like all others."""

    limits = ConnectionLimits()
    open_connections = OpenConnections(limits.max_connections)
    """Those of one server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = RequestParser(self)  # type: ignore[assignment]  # what uvicorn uses of a parser
        self._head_bytes = self._body_bytes = 0
        self._reading = Reading.HEAD
        self._has_content = False  # whether what was just read ends a request, or has a part of its body
        self._head_timer: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None

    def connection_made(self, transport: Any) -> None:
        """Refuse the connection if there are too many."""
        super().connection_made(transport)
        self._limit_stall(transport)
        if not self.open_connections.enter(self):
            self._refuse(
                ApiError(
                    503,
                    f"the server has {self.limits.max_connections} connections and takes no more",
                    code="too_many_connections",
                    headers={"retry-after": "1"},
                )
            )
        else:
            self._start_timer()

    def _limit_stall(self, transport: Any) -> None:
        """Close the connection if the client stops receiving: a blocked write has no time-out of its own."""
        option = getattr(socket, "TCP_USER_TIMEOUT", None)
        connection = transport.get_extra_info("socket")
        if option is not None and connection is not None:
            with contextlib.suppress(OSError):  # not every connection is TCP
                connection.setsockopt(socket.IPPROTO_TCP, option, round(self.limits.stall_s * 1000))

    def _start_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.limits.head_timeout_s, self._on_head_timeout)

    def _on_head_timeout(self) -> None:
        self._refuse(
            ApiError(
                408,
                f"the request's headers did not arrive within {self.limits.head_timeout_s:g} s",
                code="header_timeout",
            )
        )

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timer of the head."""
        self._stop_timer()
        self.open_connections.leave(self)
        self.loop.call_soon(self.open_connections.closed_socket)  # the socket is closed after this call
        super().connection_lost(exc)

    def cut(self) -> None:
        """Close the connection without a word, to make room for another."""
        self._stop_timer()
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse *data*; refuse a head that is too large, and as many bytes that are neither a head nor a body.

        Such are trailers: the parser keeps them until they are whole.
        """
        if self._refusal is not None:
            return
        self._has_content = False
        super().data_received(data)
        self._hear_body(len(data))
        self._head_bytes = 0 if self._has_content else self._head_bytes + len(data)
        if self._head_bytes > self.limits.max_head_bytes and self._refusal is None:
            self._refuse(self._too_large(f"more than {self.limits.max_head_bytes} bytes"))

    def _hear_body(self, num_bytes: int) -> None:
        """Count bytes of a body: whoever sends a few at a time is as good as silent. The same holds for heads."""
        if self._reading is Reading.BODY and not self.cycle.response_complete:
            self._body_bytes += num_bytes
            if self._body_bytes >= BODY_PROGRESS:
                self._body_bytes = 0
                self.open_connections.hear(self)

    def on_message_begin(self) -> None:
        """Start the timer of the next request's head."""
        super().on_message_begin()
        self._unset_keepalive_if_required()
        if self.cycle is None or self.cycle.response_complete:
            self.open_connections.hear(self)
        self._reading = Reading.HEAD
        self._start_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Leave out trailers, the fields after a body: a proxy has not checked them as headers."""
        if self._reading is Reading.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Check the size and number of headers."""
        self._stop_timer()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.limits.max_head_bytes:
            self._refusal = self._too_large(f"{size} bytes")
            raise _HeadRefusedError
        if len(self.headers) > self.limits.max_headers:
            self._refusal = self._too_large(f"{len(self.headers)} headers")
            raise _HeadRefusedError
        super().on_headers_complete()
        self._reading = Reading.BODY

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._has_content = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole; from now on its client waits for us."""
        self._has_content = True
        self._reading = Reading.WHOLE
        self._stop_timer()
        if self.cycle.response_complete:  # it was answered before it was whole
            self._await_next()
        else:
            self.open_connections.answer(self)
        super().on_message_complete()

    def _await_next(self) -> None:
        """Wait for the next request as after a response: uvicorn ends its timer with every byte."""
        self.open_connections.hear(self)
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def on_response_complete(self) -> None:
        """Wait for the next request; for the rest of this one as long as for a head."""
        is_in_body = self._reading is Reading.BODY
        if not self.pipeline or is_in_body:  # else the next request is there, and whole
            self.open_connections.hear(self)
        if is_in_body and self.cycle.response_complete:
            self._start_timer()
        super().on_response_complete()

    def _too_large(self, got: str) -> ApiError:
        return ApiError(
            431,
            f"a request may have at most {self.limits.max_headers} headers and "
            f"{self.limits.max_head_bytes} bytes of them, got {got}",
            code="headers_too_large",
        )

    def send_400_response(self, msg: str) -> None:
        """Answer a malformed or refused request."""
        self._refuse(self._refusal or ApiError(400, "this is not a valid HTTP request"))

    def _refuse(self, error: ApiError) -> None:
        self._refusal = error
        self._stop_timer()
        if self._may_answer():
            self.transport.write(_raw_response(error))
        self.transport.close()

    def _may_answer(self) -> bool:
        """Whether what is written now is not within another response, nor after that of the request just read."""
        if self._reading is Reading.BODY:
            return not self.pipeline and not self.cycle.response_started
        return self.cycle is None or bool(self.cycle.response_complete)


def _raw_response(error: ApiError) -> bytes:
    """Return the HTTP response for *error* as bytes."""
    body = error_body(error)
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    headers |= error.headers or {}
    lines = [f"HTTP/1.1 {error.status} {REASONS[error.status]}", *map(": ".join, headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body
