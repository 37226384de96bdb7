"""Admission control: requests are refused at once if the queue is full.

A request waits from its submission until its first token.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from protos.errors import ConfigError, InvalidRequestError, OverloadedError
from protos.messages import Request

SHORTEST_RETRY_S, LONGEST_RETRY_S = 1.0, 30.0
PACE_DECAY = 0.9
"""Decay of the moving average of the time between two starts."""


@dataclass(frozen=True)
class QueueLimits:
    """Limits on waiting requests, where each of `n` samples counts, and on the tokens of their prompts."""

    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 1_048_576

    def __post_init__(self) -> None:
        for name, value in (("requests", self.max_waiting_requests), ("tokens", self.max_waiting_tokens)):
            if value < 1:
                raise ConfigError(f"max_waiting_{name} must be at least 1, got {value}")


DEFAULT_QUEUE_LIMITS = QueueLimits()


def num_prompt_tokens(requests: Sequence[Request]) -> int:
    """Return the number of prompt tokens; the prompt counts once per sample."""
    return sum(len(request.prompt_token_ids) for request in requests)


class Admission:
    """Counts waiting requests. Belongs to one event loop."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._waiting: dict[str, int] = {}
        self._num_tokens = 0
        self._started_at = time.monotonic()
        self._pace_s = 0.0

    def check(self, num_requests: int = 1, num_tokens: int = 1) -> None:
        """Check that the queue has room. If nothing waits, a prompt of any length is accepted.

        Raises:
            OverloadedError: there is no room now.
            InvalidRequestError: the queue is too small for the call.
        """
        limits, waiting = self._limits, len(self._waiting)
        if num_requests > limits.max_waiting_requests:
            raise InvalidRequestError(
                f"one call may request at most {limits.max_waiting_requests} answers (prompts times n), "
                f"got {num_requests}",
                "n",
            )
        if waiting + num_requests > limits.max_waiting_requests:
            raise self._full(f"{waiting} requests are waiting; the limit is {limits.max_waiting_requests}")
        if waiting and self._num_tokens + num_tokens > limits.max_waiting_tokens:
            raise self._full(
                f"prompts of {self._num_tokens} tokens are waiting; the limit is {limits.max_waiting_tokens} "
                f"tokens, and this request adds {num_tokens}"
            )

    def _full(self, what: str) -> OverloadedError:
        return OverloadedError(f"the server is overloaded: {what}; try again later", self._retry_s())

    def _retry_s(self) -> float:
        """Estimate the seconds until half of the waiting requests have started."""
        return min(max(self._pace_s * len(self._waiting) / 2, SHORTEST_RETRY_S), LONGEST_RETRY_S)

    def enter(self, requests: Sequence[Request]) -> None:
        """Count *requests* as waiting. Raises as `check`."""
        self.check(len(requests), num_prompt_tokens(requests))
        for request in requests:
            self._waiting[request.request_id] = len(request.prompt_token_ids)
            self._num_tokens += len(request.prompt_token_ids)

    def start(self, request_id: str) -> None:
        """The request has its first token, or has ended without one. Updates the retry estimate."""
        if request_id not in self._waiting:
            return
        self.leave(request_id)
        now = time.monotonic()
        self._pace_s = PACE_DECAY * self._pace_s + (1 - PACE_DECAY) * (now - self._started_at)
        self._started_at = now

    def leave(self, request_id: str) -> None:
        """Stop counting the request."""
        self._num_tokens -= self._waiting.pop(request_id, 0)
