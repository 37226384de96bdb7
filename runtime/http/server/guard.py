"""Middleware that checks the sender, the API key, room in the queue, and limits on the body."""

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protos.errors import SlipstreamError
from runtime.frontend.client import EngineClient
from runtime.frontend.keys import SCHEME, TENANT, Keys
from runtime.http import pages
from runtime.http.errors import ApiError, as_api_error, error_response
from runtime.http.server.limits import GuardOptions
from runtime.http.server.paths import routed_path
from runtime.http.server.sites import ForeignRequestError

OPEN_PATHS = frozenset({"/health"})
"""Paths that need no key: health probes have none."""

GENERATION_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})
BEARER = {"www-authenticate": "Bearer"}
BASIC = {"www-authenticate": 'Basic realm="Slipstream: an API key as password", charset="UTF-8"'}
"""Makes a browser prompt for the key before it shows a page."""
BUSY_RETRY = {"retry-after": "1"}


def credentials(scope: Scope, keys: Keys) -> str | None:
    """Return the `authorization` header, or one with the key of `x-api-key` if only that key is accepted."""
    given, key = _header(scope, b"authorization"), _header(scope, b"x-api-key")
    other = None if key is None else f"{SCHEME} {key}"
    return other if other is not None and not keys.accepts(given) and keys.accepts(other) else given


def _header(scope: Scope, wanted: bytes) -> str | None:
    """Return the first header of that name."""
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == wanted), None)


class Guard:
    """Refuses requests that must not reach the routes. Belongs to one event loop.

    Args:
        app: the guarded application.
        engine: its queue is checked before the body of a request is read.
        options: API keys, web pages and limits.
    """

    def __init__(self, app: ASGIApp, engine: EngineClient, options: GuardOptions) -> None:
        self._app = app
        self._engine = engine
        self._options = options
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] != "http":
            await self._app(scope, receive, send)
        else:
            await self._guarded(scope, receive, send)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(scope)
        except (ApiError, SlipstreamError) as error:
            await error_response(as_api_error(error), routed_path(scope))(scope, receive, send)
            return
        body = _Body(receive, self._options.body_timeout_s, self._take)
        try:
            await self._app(scope, body.receive, body.releasing(send))
        finally:
            body.release()

    def _check(self, scope: Scope) -> None:
        path, keys = routed_path(scope), self._options.keys
        try:
            self._options.sites.check(scope, path)
        except ForeignRequestError as error:
            raise ApiError(403, str(error), code=error.code) from None
        given = credentials(scope, keys)
        is_page = path in pages.PATHS and scope["method"] == "GET"
        # Browsers send passwords also with cross-site requests, so a password gives access to the page alone.
        if path not in OPEN_PATHS and not keys.accepts(given) and not (is_page and keys.accepts_password(given)):
            raise ApiError(
                401,
                "the API key is missing or wrong: send the header Authorization: Bearer KEY, or x-api-key: KEY",
                code="invalid_api_key",
                headers=BASIC if is_page else BEARER,
            )
        if self._options.salts_by_key:
            TENANT.set(keys.tenant(given))
        if path in GENERATION_PATHS:
            self._engine.check_open()

    def _take(self, num_bytes: int) -> None:
        """Count bytes of bodies in flight; negative to release them."""
        limit = self._options.max_body_bytes_in_flight
        if num_bytes > 0 and self._in_flight + num_bytes > limit:
            raise ApiError(
                429,
                f"the server is overloaded: bodies of {self._in_flight} bytes are being read; "
                f"the limit is {limit}; try again later",
                code="overloaded",
                headers=BUSY_RETRY,
            )
        self._in_flight += num_bytes


class _Body:
    """One request's body. It must arrive in time; its bytes count until the response begins."""

    def __init__(self, receive: Receive, timeout_s: float, take: Callable[[int], None]) -> None:
        self._receive = receive
        self._timeout_s = timeout_s
        self._take = take
        self._num_bytes = 0
        self._deadline: float | None = None
        self._is_whole = False

    async def receive(self) -> Message:
        if self._is_whole:  # only `http.disconnect` can follow, at any time
            return await self._receive()
        loop = asyncio.get_running_loop()
        if self._deadline is None:
            self._deadline = loop.time() + self._timeout_s
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not arrive within {self._timeout_s:g} s",
                code="body_timeout",
                headers={"connection": "close"},
            ) from None
        self._count(message)
        return message

    def _count(self, message: Message) -> None:
        self._is_whole = message["type"] != "http.request" or not message.get("more_body", False)
        num_bytes = len(message.get("body", b""))
        self._take(num_bytes)
        self._num_bytes += num_bytes

    def releasing(self, send: Send) -> Send:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.release()
            await send(message)

        return sending

    def release(self) -> None:
        self._take(-self._num_bytes)
        self._num_bytes = 0
