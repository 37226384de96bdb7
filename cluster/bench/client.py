"""One streamed request to an OpenAI server, and the timing of its answer."""

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
    """The server and how to send requests to it. `extra` is added to every body."""

    base_url: str
    endpoint: str
    model: str
    api_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request."""
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
    """One request: seconds since it was sent, and token counts from the server.

    `gaps` are the seconds between chunks of the answer, each of one or more tokens. `error` is set if the request
    failed. An empty answer has no chunks, and no `first_s`.
    """

    sent_at: float
    first_s: float | None = None
    last_s: float = 0.0
    gaps: list[float] = field(default_factory=list)
    num_chunks: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    has_ended: bool = False
    error: str | None = None

    @property
    def per_token_s(self) -> float | None:
        """Mean seconds per token after the first; None if there is only one."""
        if self.first_s is None or self.num_output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_output_tokens - 1)

    def add_chunk(self) -> None:
        """Record the arrival of a chunk."""
        now = time.perf_counter() - self.sent_at
        if self.first_s is None:
            self.first_s = now
        else:
            self.gaps.append(now - self.last_s)
        self.last_s = now
        self.num_chunks += 1

    def end(self) -> None:
        """Record the end of the answer."""
        self.has_ended = True
        if self.first_s is None:
            self.last_s = time.perf_counter() - self.sent_at


async def send(session: aiohttp.ClientSession, target: BenchTarget, prompt: BenchPrompt) -> RequestTiming:
    """Send a request and read its answer to the end; errors are recorded in the result."""
    timing = RequestTiming(time.perf_counter())
    try:
        async with session.post(
            target.base_url + target.endpoint, json=target.body(prompt), headers=target.headers
        ) as response:
            if response.status != 200:
                timing.error = f"{response.status}: {await _reason(response)}"
            else:
                await _read(response, timing)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        timing.error = f"{type(error).__name__}: {error}"
    if timing.error is None and not timing.has_ended:
        timing.error = "the answer broke off"
    if timing.error is None and not timing.num_output_tokens:
        timing.num_output_tokens = timing.num_chunks  # the server does not count tokens: take a chunk for a token
    return timing


async def _reason(response: aiohttp.ClientResponse) -> str:
    text = await response.text()
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]


async def _read(response: aiohttp.ClientResponse, timing: RequestTiming) -> None:
    async for data in _events(response):
        chunk = json.loads(data)
        if "error" in chunk:
            timing.error = str(chunk["error"]["message"])
            return
        if usage := chunk.get("usage"):
            timing.num_prompt_tokens = usage["prompt_tokens"]
            timing.num_output_tokens = usage["completion_tokens"]
        if any(_has_text(choice) for choice in chunk["choices"]):
            timing.add_chunk()
        if any(choice.get("finish_reason") for choice in chunk["choices"]):
            timing.end()


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"))


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event before `[DONE]`."""
    async for line in response.content:
        if line.startswith(FIELD):
            data = line[len(FIELD) :].strip()
            if data == DONE:
                return
            yield data
