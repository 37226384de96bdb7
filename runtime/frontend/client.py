"""The engine interface of the HTTP and gRPC frontends, implemented by `runtime.frontend.async_engine.AsyncEngine`."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from protos.messages import Request, WorkerInfo
from protos.sampling import SamplingParams
from protos.stats import EngineStats
from runtime.frontend.stream_queue import Deltas

Prompt = Any
"""Text, token ids, a dict of either, or a `runtime.text.prompts.Prompt`."""


EngineState = Literal["starting", "live", "degraded", "stalled", "draining", "dead"]
"""`degraded`: requests are accepted, but the target is being rebuilt or the draft worker is down.
`stalled`: the controller was stopped, or hangs; no requests are accepted until it continues.
`draining`: no requests are accepted.
"""


class EngineClient(Protocol):
    """The engine as HTTP and gRPC servers use it."""

    @property
    def is_alive(self) -> bool:
        """Whether requests can be answered."""
        ...

    @property
    def state(self) -> EngineState:
        """The state of the engine."""
        ...

    @property
    def silence_s(self) -> float:
        """Seconds since the controller's last report. It sends one every second, except during a step."""
        ...

    @property
    def info(self) -> WorkerInfo:
        """The loaded model."""
        ...

    def check_running(self) -> None:
        """Check that requests can be answered. Raises `EngineDeadError`, `EngineStalledError` or `NoRoomError`."""
        ...

    async def prepare(self, prompt: Prompt, params: SamplingParams, request_id: str) -> list[Request]:
        """Validate and tokenise, without scheduling anything.

        Raises:
            InvalidRequestError: names the value and the limit.
            OverloadedError: too much waits already; checked before tokenising.
            DrainingError: the server is about to stop.
        """
        ...

    def check_open(self, num_requests: int = 1, num_tokens: int = 1) -> None:
        """Check that *num_requests* with *num_tokens* prompt tokens are accepted.

        Raises:
            EngineDeadError, EngineStalledError, NoRoomError, DrainingError, OverloadedError: they are not accepted now.
            InvalidRequestError: they are never accepted.
        """
        ...

    async def render_chat(self, messages: Any, params: SamplingParams, **options: Any) -> Prompt:
        """Render a conversation to a prompt. Raises `InvalidRequestError`."""
        ...

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, is_truncated: bool = False
    ) -> tuple[int, ...]:
        """Return the ids of *text*, which may be empty, or longer than the context if the ids are truncated later.

        Raises `InvalidRequestError`.
        """
        ...

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of *token_ids*, with special tokens. Raises `InvalidRequestError`."""
        ...

    def stream(self, requests: Sequence[Request], timeout_s: float | None = None) -> Deltas:
        """Schedule prepared requests; return their outputs until all have finished. The caller must close these.

        *timeout_s* includes waiting and running; None is the server's limit, if it has one.

        Raises, or the outputs do:
            DeadlineExceededError: the time is over, or the answer was not read; its requests are aborted.
            EngineStalledError: the controller is silent; its requests are aborted.
            NoRoomError: the cluster has had no room for the lost target group for too long; its requests are aborted.
            OverloadedError: too much waits already; nothing was scheduled.
            DrainingError: the server is about to stop.
        """
        ...

    def stats(self) -> EngineStats:
        """Return the controller's latest snapshot."""
        ...
