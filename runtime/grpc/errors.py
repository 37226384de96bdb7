"""Errors as gRPC statuses with one line of details."""

import logging

from protos.errors import (
    DeadlineExceededError,
    DrainingError,
    EngineDeadError,
    EngineStalledError,
    InvalidRequestError,
    NoRoomError,
    OverloadedError,
    RequestFailedError,
    SlipstreamError,
)

log = logging.getLogger("slipstream")

LONGEST_DETAILS = 1000
"""Longest details, in characters: they are sent in a header."""

# The first match counts: `DrainingError`, `EngineStalledError` and `NoRoomError` are an `OverloadedError`.
CODES: dict[type[SlipstreamError], str] = {
    InvalidRequestError: "INVALID_ARGUMENT",
    DrainingError: "UNAVAILABLE",
    EngineStalledError: "UNAVAILABLE",
    NoRoomError: "UNAVAILABLE",
    OverloadedError: "RESOURCE_EXHAUSTED",
    DeadlineExceededError: "DEADLINE_EXCEEDED",
    RequestFailedError: "INTERNAL",
}


class StatusError(Exception):
    """A status other than OK.

    Args:
        code_name: a name of `grpc.StatusCode`.
        details: one line for the user; never a path, an address or a traceback.
        retry_after_s: seconds after which the call may be retried, if known.
    """

    def __init__(self, code_name: str, details: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{code_name}: {details}")
        self.code_name = code_name
        self.details = details.partition("\n")[0][:LONGEST_DETAILS]
        self.retry_after_s = retry_after_s

    @property
    def trailers(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata with the retry delay, by gRPC's convention."""
        if self.retry_after_s is None:
            return ()
        return (("grpc-retry-pushback-ms", str(round(1000 * self.retry_after_s))),)


def as_status(error: Exception) -> StatusError:
    """Return the `StatusError` for any exception. Internal details are logged, not sent."""
    if isinstance(error, StatusError):
        return error
    if isinstance(error, EngineDeadError):
        return StatusError("UNAVAILABLE", "the engine has stopped and cannot answer; see its log")
    for kind, code_name in CODES.items():
        if isinstance(error, kind):
            return StatusError(code_name, str(error), getattr(error, "retry_after_s", None))
    log.error("a request failed inside the server", exc_info=error)
    return StatusError("INTERNAL", "the server failed on this request; see its log")
