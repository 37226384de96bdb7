"""The engine interface of the HTTP and gRPC frontends, implemented by `runtime.frontend.async_engine.AsyncEngine`."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal, Protocol

from protos.messages import Request, WorkerInfo
from protos.sampling import SamplingParams
from protos.stats import EngineStats
from runtime.frontend.stream_queue import Delta

Prompt = Any
"""Whatever `Preprocessor.requests` takes: text, token ids, or a dict of either."""


EngineState = Literal["starting", "live", "degraded", "draining", "dead"]
"""`degraded`: requests are taken, but the targets are being rebuilt or the draft is away. `draining`: none are."""


class EngineClient(Protocol):
    """How front ends speak to an engine, wherever it runs."""

    @property
    def is_alive(self) -> bool:
        """Whether requests can be answered."""
        ...

    @property
    def state(self) -> EngineState:
        """How the engine is now."""
        ...

    @property
    def silence_s(self) -> float:
        """Seconds since the controller was last heard. It speaks once a second, except in the middle of a step."""
        ...

    @property
    def info(self) -> WorkerInfo:
        """What the loaded engine said of itself."""
        ...

    async def prepare(self, prompt: Prompt, params: SamplingParams, request_id: str) -> list[Request]:
        """Validate and tokenise, without scheduling anything.

        Raises:
            InvalidRequestError: names the value and the limit.
            OverloadedError: too much waits already; found out before tokenising.
            DrainingError: the server is about to stop.
        """
        ...

    def check_open(self, num_requests: int = 1, num_tokens: int = 1) -> None:
        """Do nothing while so many requests, with so many tokens in their prompts, would be taken.

        Raises:
            EngineDeadError, DrainingError, OverloadedError: they would not now.
            InvalidRequestError: they never would.
        """
        ...

    async def render_chat(self, messages: Any, params: SamplingParams, **options: Any) -> Prompt:
        """Make a conversation a prompt. Raises `InvalidRequestError`."""
        ...

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the ids of *text*; none of an empty one. Raises `InvalidRequestError`."""
        ...

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of *token_ids*, special tokens as they are spelt. Raises `InvalidRequestError`."""
        ...

    def stream(self, requests: Sequence[Request], timeout_s: float | None = None) -> AsyncGenerator[Delta, None]:
        """Schedule prepared requests and yield what each gains, until all have finished.

        *timeout_s* counts from now on, while they wait and while they run; None is the server's own limit, if it has
        one.

        Raises:
            DeadlineExceededError: the time is over, or nobody read the answer; nothing of it runs any more.
            OverloadedError: too much waits already; nothing was scheduled.
            DrainingError: the server is about to stop and takes nothing new.
        """
        ...

    def stats(self) -> EngineStats:
        """Return the newest snapshot of the controller."""
        ...
