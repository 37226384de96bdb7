"""Parses requests that offer another protocol, and are answered in HTTP/1.1 nevertheless (RFC 9110, 7.8).

Java's client offers HTTP/2 with the first request on a connection (`Upgrade: h2c`). httptools takes what follows the
head of such a request for the other protocol, though it is the request's body.
"""

from typing import Any, Protocol

import httptools


class Callbacks(Protocol):
    """What a parser calls."""

    def on_message_begin(self) -> None:
        """A request begins."""
        ...

    def on_url(self, url: bytes) -> None:
        """Take a part of the target."""
        ...

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or a trailer."""
        ...

    def on_headers_complete(self) -> None:
        """The head is whole."""
        ...

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        ...

    def on_message_complete(self) -> None:
        """The request is whole."""
        ...


class RequestParser:
    """httptools' parser, except that it declines other protocols: it parses the head again, without the offer.

    The beginning of such a request, its target and its headers are announced twice.

    Args:
        callbacks: as for httptools.
    """

    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks = callbacks
        self._url, self._headers = b"", list[tuple[bytes, bytes]]()
        self._declines = False
        self.on_body = callbacks.on_body
        self._parser = self._new()

    def _new(self) -> Any:
        parser = httptools.HttpRequestParser(self)
        # As uvicorn: the response to the first of pipelined requests may close the connection.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def feed_data(self, data: bytes) -> None:
        """Parse *data*.

        Raises:
            httptools.HttpParserError: it is malformed, or a callback failed.
            httptools.HttpParserUpgrade: the method is CONNECT, after which anything may follow.
        """
        while data:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                if not self._declines:
                    raise
                data = self._head() + data[offer.args[0] :]
                self._declines, self._parser = False, self._new()
            else:
                return

    def _head(self) -> bytes:
        """Return the head of the request that was parsed last, without its offer."""
        parser = self._parser
        lines = [b"%s %s HTTP/%s" % (parser.get_method(), self._url, parser.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in self._headers if header[0].lower() != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def get_http_version(self) -> str:
        """See httptools."""
        return str(self._parser.get_http_version())

    def get_method(self) -> bytes:
        """See httptools."""
        return bytes(self._parser.get_method())

    def should_keep_alive(self) -> bool:
        """See httptools."""
        return bool(self._parser.should_keep_alive())

    def should_upgrade(self) -> bool:
        """See httptools."""
        return bool(self._parser.should_upgrade())

    # Called by httptools.

    def on_message_begin(self) -> None:
        """See `Callbacks`."""
        self._url, self._headers = b"", []
        self._callbacks.on_message_begin()

    def on_url(self, url: bytes) -> None:
        """See `Callbacks`."""
        self._url += url
        self._callbacks.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """See `Callbacks`."""
        self._headers.append((name, value))
        self._callbacks.on_header(name, value)

    def on_headers_complete(self) -> None:
        """See `Callbacks`. Of a head that will be parsed again, this is not announced."""
        self._declines = self.should_upgrade() and self.get_method() != b"CONNECT"
        if not self._declines:
            self._callbacks.on_headers_complete()

    def on_message_complete(self) -> None:
        """See `Callbacks`."""
        if not self._declines:
            self._callbacks.on_message_complete()
