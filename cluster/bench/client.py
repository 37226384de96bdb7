"""One streamed request to any OpenAI server, and when its tokens came."""

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from cluster.bench.datasets import BenchPrompt

CHAT = "/chat/completions"
FIELD = b"data:"
DONE = b"[DONE]"


@dataclass(frozen=True)
class BenchTarget:
    """Where to ask, and how. `extra` goes into every body as it is."""

    base_url: str
    endpoint: str
    model: str
    api_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        """What goes with every request."""
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}

    def body(self, prompt: BenchPrompt) -> dict[str, Any]:
        """Return the request for *prompt*."""
        body = {
            "model": self.model,
            "max_tokens": prompt.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        content = prompt.content
        if self.endpoint.endswith(CHAT):
            messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
            return {**body, "messages": messages}
        return {**body, "prompt": content if isinstance(content, str) else _as_text(content)}


def _as_text(messages: list[dict[str, str]]) -> str:
    return "\n".join(message["content"] for message in messages)


@dataclass
class RequestTiming:
    """One request: seconds from when it was sent, and tokens as the server counted them.

    `gaps` are those between pieces of the answer, each of one token or several; `error` says why there is no answer.
    One that ends at once has no pieces, and no `first_s`.
    """

    sent_at: float
    first_s: float | None = None
    last_s: float = 0.0
    gaps: list[float] = field(default_factory=list)
    num_pieces: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    has_ended: bool = False
    error: str | None = None

    @property
    def per_token_s(self) -> float | None:
        """Mean seconds of the tokens behind the first, None where there are none."""
        if self.first_s is None or self.num_output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_output_tokens - 1)

    def piece(self) -> None:
        """A piece of the answer came."""
        now = time.perf_counter() - self.sent_at
        if self.first_s is None:
            self.first_s = now
        else:
            self.gaps.append(now - self.last_s)
        self.last_s = now
        self.num_pieces += 1

    def end(self) -> None:
        """The server said why the answer ends."""
        self.has_ended = True
        if self.first_s is None:
            self.last_s = time.perf_counter() - self.sent_at


async def ask(session: aiohttp.ClientSession, target: BenchTarget, prompt: BenchPrompt) -> RequestTiming:
    """Ask for an answer and read it to its end; whatever goes wrong is in what is returned."""
    measured = RequestTiming(time.perf_counter())
    try:
        async with session.post(
            target.base_url + target.endpoint, json=target.body(prompt), headers=target.headers
        ) as response:
            if response.status != 200:
                measured.error = f"{response.status}: {await _reason(response)}"
            else:
                await _read(response, measured)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        measured.error = f"{type(error).__name__}: {error}"
    if measured.error is None and not measured.has_ended:
        measured.error = "the answer broke off"
    if measured.error is None and not measured.num_output_tokens:
        measured.num_output_tokens = measured.num_pieces  # the server does not count: a piece is taken for a token
    return measured


async def _reason(response: aiohttp.ClientResponse) -> str:
    text = await response.text()
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]


async def _read(response: aiohttp.ClientResponse, measured: RequestTiming) -> None:
    async for data in _events(response):
        chunk = json.loads(data)
        if "error" in chunk:
            measured.error = str(chunk["error"]["message"])
            return
        if usage := chunk.get("usage"):
            measured.num_prompt_tokens = usage["prompt_tokens"]
            measured.num_output_tokens = usage["completion_tokens"]
        if any(_has_text(choice) for choice in chunk["choices"]):
            measured.piece()
        if any(choice.get("finish_reason") for choice in chunk["choices"]):
            measured.end()


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"))


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event, up to the last."""
    async for line in response.content:
        if line.startswith(FIELD):
            data = line[len(FIELD) :].strip()
            if data == DONE:
                return
            yield data
