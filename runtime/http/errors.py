"""Errors as OpenAI clients expect them: `{"error": {"message", "type", "param", "code"}}`, always."""

import logging

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from protos.errors import EngineDeadError, InvalidRequestError

log = logging.getLogger("slipstream")


class ApiError(Exception):
    """An answer other than 200.

    Args:
        status: the HTTP status.
        message: one line for the user; never a path, an address or a traceback.
        param: the request field at fault.
        code: what programs test for.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code


class ErrorDetail(msgspec.Struct, frozen=True):
    """The inside of an error body."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """An error body, also sent in the middle of a stream."""

    error: ErrorDetail


def as_api_error(error: Exception) -> ApiError:
    """Turn any exception into what a client may know of it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        return ApiError(400, str(error), error.param)
    if isinstance(error, EngineDeadError):
        return ApiError(503, "the engine has stopped and cannot answer; its log says why", code="engine_dead")
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail))
    log.error("a request failed inside the server", exc_info=error)
    return ApiError(500, "the server failed on this request; its log says more")


def error_body(error: ApiError) -> bytes:
    """Return the JSON of *error*."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return msgspec.json.encode(ErrorBody(ErrorDetail(error.message, kind, error.param, error.code)))


async def answer(request: Request, error: Exception) -> Response:
    """The exception handler of every route."""
    known = as_api_error(error)
    headers = getattr(error, "headers", None)
    return Response(error_body(known), known.status, headers, media_type="application/json")


def install(app: FastAPI) -> None:
    """Let *app* answer every error in this form."""
    for kind in (ApiError, InvalidRequestError, EngineDeadError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
