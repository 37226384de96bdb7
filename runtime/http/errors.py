"""Errors in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`.

Errors on the paths of Anthropic's API have the format of `runtime.http.messages.errors`.
"""

import logging
import math
from collections.abc import Mapping

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from protos.errors import (
    ContextLengthError,
    DeadlineExceededError,
    DrainingError,
    EngineDeadError,
    EngineStalledError,
    InvalidRequestError,
    NoRoomError,
    OverloadedError,
    RequestFailedError,
    SlipstreamError,
    SlowReaderError,
)
from runtime.http.messages.errors import message_error_body, message_status
from runtime.http.server.paths import MESSAGES_PATHS, routed_path

log = logging.getLogger("slipstream")

TYPES = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error"}
NO_RETRY = {"x-should-retry": "false"}
"""Clients retry after 408 by default, but the request would take too long again."""


class ApiError(Exception):
    """A response other than 200.

    Args:
        status: the HTTP status.
        message: one line for the user; never a path, an address or a traceback.
        param: the invalid request field.
        code: identifies the error for programs.
        headers: additional response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers


class ErrorDetail(msgspec.Struct, frozen=True):
    """The content of an error body."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """An error body, also sent in the middle of a stream."""

    error: ErrorDetail


def as_api_error(error: Exception) -> ApiError:
    """Return the `ApiError` for any exception. Internal details are logged, not sent."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, SlipstreamError):
        return _from_slipstream(error)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    return _internal(error)


def _internal(error: Exception) -> ApiError:
    log.error("a request failed inside the server", exc_info=error)
    return ApiError(500, "the server failed on this request; see its log")


def _from_slipstream(error: SlipstreamError) -> ApiError:
    if isinstance(error, InvalidRequestError):
        code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
        return ApiError(400, str(error), error.param, code)
    if isinstance(error, OverloadedError):
        return _overloaded(error)
    if isinstance(error, DeadlineExceededError):
        code = "slow_reader" if isinstance(error, SlowReaderError) else "deadline_exceeded"
        return ApiError(408, str(error), code=code, headers=NO_RETRY)
    if isinstance(error, EngineDeadError):
        return ApiError(503, "the engine has stopped and cannot answer; see its log", code="engine_dead")
    if isinstance(error, RequestFailedError):
        return ApiError(500, str(error))
    return _internal(error)


def _overloaded(error: OverloadedError) -> ApiError:
    headers = {"retry-after": str(math.ceil(error.retry_after_s))}
    if isinstance(error, DrainingError):
        return ApiError(503, str(error), code="draining", headers=headers)
    if isinstance(error, EngineStalledError):
        return ApiError(503, str(error), code="engine_stalled", headers=headers)
    if isinstance(error, NoRoomError):
        return ApiError(503, str(error), code="no_room", headers=headers)
    return ApiError(429, str(error), code="overloaded", headers=headers)


def error_body(error: ApiError) -> bytes:
    """Return the JSON of *error*."""
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return msgspec.json.encode(ErrorBody(ErrorDetail(error.message, kind, error.param, error.code)))


async def answer(request: Request, error: Exception) -> Response:
    """The exception handler of every route, and of requests that have none."""
    path = routed_path(request.scope)
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        error = ApiError(error.status_code, _no_route(error.headers), headers=error.headers)
    return error_response(as_api_error(error), path)


def _no_route(headers: Mapping[str, str] | None) -> str:
    """Return the message; it does not repeat the path, which may be anything."""
    allowed = (headers or {}).get("Allow")
    return f"this route takes {allowed} alone" if allowed else "no such route; GET /openapi.json lists those there are"


def error_response(error: ApiError, path: str) -> Response:
    """Return the response for *error* to a request of *path*, in the format of its API."""
    if path in MESSAGES_PATHS:
        status = message_status(error.status, error.code)
        body = message_error_body(status, error.message, error.code)
        return Response(body, status, error.headers, media_type="application/json")
    return Response(error_body(error), error.status, error.headers, media_type="application/json")


def install(app: FastAPI) -> None:
    """Make *app* answer every error in these formats."""
    for kind in (ApiError, SlipstreamError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
