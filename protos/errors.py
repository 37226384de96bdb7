"""Typed errors. Each message says what was wrong, the numbers, and the way out."""

BLAMED = ("structured_outputs",)
"""Parameters that a worker may find impossible; its reason then begins with the name and a colon."""


class SlipstreamError(Exception):
    """Base of every error Slipstream raises on purpose."""


class ConfigError(SlipstreamError, ValueError):
    """The engine cannot be built from these arguments."""


class ModelError(SlipstreamError, ValueError):
    """A checkpoint cannot be loaded or served."""


class InvalidRequestError(SlipstreamError, ValueError):
    """One request is not acceptable; nothing was scheduled and nobody else is disturbed.

    Args:
        message: names the value and the limit.
        param: the request field at fault, as the user spelt it.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class EngineDeadError(SlipstreamError, RuntimeError):
    """The engine process is gone; requests in flight cannot be answered."""


class TargetLostError(SlipstreamError, RuntimeError):
    """A target rank died or hangs: the group must be rebuilt; requests go on from their committed tokens."""


class PlacementError(EngineDeadError):
    """The cluster cannot place the workers, or lost the node they need."""


class OverloadedError(SlipstreamError, RuntimeError):
    """Nothing was scheduled, because too much waits already; the same request may be taken later.

    Args:
        message: names what waits and the limit.
        retry_after_s: seconds after which another try makes sense.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DrainingError(OverloadedError):
    """Nothing was scheduled, because the server is about to stop; another one may take the request."""


class DeadlineExceededError(SlipstreamError, RuntimeError):
    """A request was given up because its time was over; its blocks are free."""


class SlowReaderError(DeadlineExceededError):
    """A request was given up because nobody read its answer."""


class RequestFailedError(SlipstreamError, RuntimeError):
    """One request could not go on, by no fault of its own."""


def failure(reason: str) -> SlipstreamError:
    """Return what is said to the client of a request that failed in a worker for *reason*."""
    for param in BLAMED:
        if reason.startswith(f"{param}: "):
            return InvalidRequestError(reason, param)
    return RequestFailedError(f"the request failed: {reason}")


def request_error(message: str, param: str | None) -> InvalidRequestError:
    """Make the error of a request type."""
    return InvalidRequestError(message, param)


def config_error(message: str, _param: str | None) -> ConfigError:
    """Make the error of a configuration type."""
    return ConfigError(message)
