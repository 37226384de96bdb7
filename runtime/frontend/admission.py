"""How much may wait: requests are refused at once where the queue is full, instead of being answered too late.

What waits is what has been submitted and has not gained a token yet, as the front end sees it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from protos.errors import ConfigError, InvalidRequestError, OverloadedError
from protos.messages import Request

SHORTEST_RETRY_S, LONGEST_RETRY_S = 1.0, 30.0
PACE_MEMORY = 0.9
"""How much of the mean time between two starts is kept at each start."""


@dataclass(frozen=True)
class QueueLimits:
    """What may wait at most: requests, each of `n` samples counting as one, and tokens of their prompts."""

    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 1_048_576

    def __post_init__(self) -> None:
        for name, value in (("requests", self.max_waiting_requests), ("tokens", self.max_waiting_tokens)):
            if value < 1:
                raise ConfigError(f"max_waiting_{name} must be at least 1, got {value}")


ROOMY = QueueLimits()


def num_prompt_tokens(requests: Sequence[Request]) -> int:
    """Return the tokens of all prompts; of samples of one prompt, each counts."""
    return sum(len(request.prompt_token_ids) for request in requests)


class Admission:
    """Counts what waits. Belongs to one event loop."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._waiting: dict[str, int] = {}
        self._num_tokens = 0
        self._started_at = time.monotonic()
        self._pace_s = 0.0

    @property
    def num_waiting(self) -> int:
        """Requests that have not gained a token yet."""
        return len(self._waiting)

    def check(self, num_requests: int = 1, num_tokens: int = 1) -> None:
        """Do nothing while there is room for that much.

        One prompt is always taken where nothing waits, however long it is: it fits the context.

        Raises:
            OverloadedError: there is none now.
            InvalidRequestError: there never is.
        """
        limits, waiting = self._limits, len(self._waiting)
        if num_requests > limits.max_waiting_requests:
            raise InvalidRequestError(
                f"one call may ask for at most {limits.max_waiting_requests} answers, prompts "
                f"times n, got {num_requests}",
                "n",
            )
        if waiting + num_requests > limits.max_waiting_requests:
            raise self._full(f"{waiting} requests wait already; at most {limits.max_waiting_requests} may")
        if waiting and self._num_tokens + num_tokens > limits.max_waiting_tokens:
            raise self._full(
                f"prompts of {self._num_tokens} tokens wait already; at most {limits.max_waiting_tokens} "
                f"tokens may, and this would add {num_tokens}"
            )

    def _full(self, what: str) -> OverloadedError:
        return OverloadedError(f"the server is overloaded: {what}; try again later", self._retry_s())

    def _retry_s(self) -> float:
        """Return about how long it takes until half of what waits has started."""
        return min(max(self._pace_s * len(self._waiting) / 2, SHORTEST_RETRY_S), LONGEST_RETRY_S)

    def enter(self, requests: Sequence[Request]) -> None:
        """Count *requests* as waiting. Raises as `check`; then none of them counts."""
        self.check(len(requests), num_prompt_tokens(requests))
        for request in requests:
            self._waiting[request.request_id] = len(request.prompt_token_ids)
            self._num_tokens += len(request.prompt_token_ids)

    def start(self, request_id: str) -> None:
        """A request has gained a token, or ended before it did."""
        if request_id not in self._waiting:
            return
        self.leave(request_id)
        now = time.monotonic()
        self._pace_s = PACE_MEMORY * self._pace_s + (1 - PACE_MEMORY) * (now - self._started_at)
        self._started_at = now

    def leave(self, request_id: str) -> None:
        """Nobody waits for this request any more, or it has started."""
        self._num_tokens -= self._waiting.pop(request_id, 0)
