"""Typed errors. Each message names the problem, the values, and what to do."""

WORKER_CHECKED = ("structured_outputs",)
"""Parameters that a worker may refuse; its reason then begins with the name and a colon."""


class SlipstreamError(Exception):
    """Base of every error Slipstream raises on purpose."""


class ConfigError(SlipstreamError, ValueError):
    """The engine cannot be built from these arguments."""


class ModelError(SlipstreamError, ValueError):
    """A checkpoint cannot be loaded or served."""


class InvalidRequestError(SlipstreamError, ValueError):
    """One request is invalid; it was not scheduled, and other requests are not affected.

    Args:
        message: names the value and the limit.
        param: the invalid request field, as the user spelled it.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """The prompt, or the prompt and its answer, are longer than the context."""


class EngineDeadError(SlipstreamError, RuntimeError):
    """The engine process is gone; requests in flight cannot be answered."""


class TargetLostError(SlipstreamError, RuntimeError):
    """A target rank died or hangs: the group must be rebuilt; requests continue from their committed tokens."""


class StepOutOfMemoryError(SlipstreamError, RuntimeError):
    """A step needs more memory than a device has left. None of it was committed; a smaller step may fit.

    Args:
        message: which rank, and what its device said.
        keeps_state: whether the workers hold what they held before the step; False: everything is to be computed again.
    """

    def __init__(self, message: str, *, keeps_state: bool = True) -> None:
        super().__init__(message)
        self.keeps_state = keeps_state


class TargetOutOfMemoryError(StepOutOfMemoryError, TargetLostError):
    """As above, while the ranks of the target exchanged tensors: the others wait for this one, so all begin anew."""

    def __init__(self, message: str) -> None:
        super().__init__(message, keeps_state=False)


class PlacementError(EngineDeadError):
    """The cluster cannot place the workers, or lost the node they need."""


class OverloadedError(SlipstreamError, RuntimeError):
    """The request was not scheduled, because too many are waiting; it may be accepted later.

    Args:
        message: names the limit and how much is waiting.
        retry_after_s: seconds after which to retry.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DrainingError(OverloadedError):
    """The server is shutting down: the request was not scheduled, or not ended in time. Another may accept it."""


class EngineStalledError(OverloadedError):
    """The controller has sent nothing for too long: it was stopped, or hangs. It may continue, or be replaced."""


class NoRoomError(OverloadedError):
    """The cluster has had no room for the lost target group for too long. The engine goes on looking for it."""


class DeadlineExceededError(SlipstreamError, RuntimeError):
    """A request was aborted because its deadline passed; its blocks are free."""


class SlowReaderError(DeadlineExceededError):
    """A request was aborted because the client did not read its answer."""


class RequestFailedError(SlipstreamError, RuntimeError):
    """One request failed for a reason outside the request."""


def failure(reason: str, retry_after_s: float | None = None) -> SlipstreamError:
    """Return the error for the client of a request that failed for *reason*, with a delay if it may be sent again."""
    if retry_after_s is not None:
        return NoRoomError(reason, retry_after_s)
    for param in WORKER_CHECKED:
        if reason.startswith(f"{param}: "):
            return InvalidRequestError(reason, param)
    return RequestFailedError(f"the request failed: {reason}")


def request_error(message: str, param: str | None) -> InvalidRequestError:
    """Make the error of a request type."""
    return InvalidRequestError(message, param)


def config_error(message: str, _param: str | None) -> ConfigError:
    """Make the error of a configuration type."""
    return ConfigError(message)
