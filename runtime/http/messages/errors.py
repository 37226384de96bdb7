"""Errors in Anthropic's format: `{"type": "error", "error": {"type", "message"}, "request_id"}`."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from runtime.metrics.logs import HTTP_REQUEST_ID

OVERLOADED = 529
"""Anthropic's own status for a server that takes no requests for a while."""
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


NO_THREADS = "thread_unsupported_request"
"""The client's own code of a refused `thread`: its tool runner then sends the whole conversation instead."""


class ErrorCode(msgspec.Struct, frozen=True):
    """Identifies an error for Anthropic's client."""

    error_code: str


class MessageErrorDetail(msgspec.Struct, frozen=True):
    """The content of an error body. `type` depends on the status."""

    type: str
    message: str
    details: ErrorCode | UnsetType = UNSET


class MessageErrorBody(msgspec.Struct, frozen=True):
    """An error body, also sent in the middle of a stream."""

    error: MessageErrorDetail
    request_id: str | None = None
    type: Literal["error"] = "error"


def message_status(status: int, code: str | None) -> int:
    """Return the HTTP status of an error that has *status* and *code* in OpenAI's format."""
    return OVERLOADED if code == "draining" else status


def message_error_body(status: int, message: str, code: str | None) -> bytes:
    """Return the JSON of an error; *status* is the one of `message_status`."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    detail = MessageErrorDetail(kind, message, ErrorCode(code) if code == NO_THREADS else UNSET)
    return msgspec.json.encode(MessageErrorBody(detail, HTTP_REQUEST_ID.get() or None))
