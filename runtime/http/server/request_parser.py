"""Parses requests that offer another protocol, and are answered in HTTP/1.1 nevertheless (RFC 9110, 7.8).

Java's client offers HTTP/2 with the first request on a connection (`Upgrade: h2c`). httptools takes what follows the
head of such a request for the other protocol, though it is the request's body.
"""

from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class RequestParser:
    """httptools' parser, except that it declines other protocols: it parses the head again, without the offer.

    The beginning of such a request, its target and its headers are announced twice.

    Args:
        protocol: has the callbacks, and what they took: the target and the headers of the last head.
    """

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._protocol = protocol
        self._declines = False
        # httptools calls these, and the two methods below.
        self.on_message_begin, self.on_body = protocol.on_message_begin, protocol.on_body
        self.on_url, self.on_header = protocol.on_url, protocol.on_header
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
        lines = [b"%s %s HTTP/%s" % (self.get_method(), self._protocol.url, self.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in self._protocol.headers if header[0] != b"upgrade"]
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

    def on_headers_complete(self) -> None:
        """See httptools. Of a head that will be parsed again, this is not announced."""
        self._declines = self.should_upgrade() and self.get_method() != b"CONNECT"
        if not self._declines:
            self._protocol.on_headers_complete()

    def on_message_complete(self) -> None:
        """See httptools."""
        if not self._declines:
            self._protocol.on_message_complete()
