"""Sends requests to a server at a given rate and concurrency, and reads its acceptance counters."""

import asyncio
import random
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

import aiohttp

from cluster.bench.client import BenchTarget, RequestTiming, send
from cluster.bench.datasets import BenchPrompt
from protos.errors import ConfigError

TIMEOUT_S = 6 * 3600.0
POLL_S, MAX_POLLS = 0.75, 6
SAMPLE = re.compile(r'^vllm:spec_decode_num_(\w+?)_total\{(?:.*?position="(\d+)")?[^}]*\} (\S+)', re.MULTILINE)


@dataclass(frozen=True)
class Traffic:
    """When requests are sent: `request_rate` per second on average; infinite: all at once.

    Gaps are gamma-distributed: `burstiness` 1 is a Poisson process, less is burstier, more is more even. At most
    `max_concurrency` requests are in flight; None: any number.
    """

    request_rate: float = float("inf")
    burstiness: float = 1.0
    max_concurrency: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("request_rate", "burstiness", "max_concurrency"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be more than 0, got {value}")

    def delays(self, count: int) -> list[float]:
        """Return the seconds to wait before each request."""
        if self.request_rate == float("inf"):
            return [0.0] * count
        rng = random.Random(self.seed)
        scale = 1.0 / (self.request_rate * self.burstiness)
        return [rng.gammavariate(self.burstiness, scale) for _ in range(count)]


@dataclass(frozen=True)
class AcceptanceCounts:
    """The server's speculation counters, by vLLM's names; `per_position` maps draft position, from 0, to a count."""

    drafts: float = 0.0
    draft_tokens: float = 0.0
    accepted_tokens: float = 0.0
    per_position: dict[int, float] = field(default_factory=dict)

    def since(self, before: "AcceptanceCounts") -> "AcceptanceCounts":
        """Return the counts since *before*."""
        per_position = {
            position: count - before.per_position.get(position, 0.0) for position, count in self.per_position.items()
        }
        return AcceptanceCounts(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted_tokens - before.accepted_tokens,
            per_position,
        )


@dataclass(frozen=True)
class LoadRun:
    """The result: all requests, the duration, and acceptance if the server publishes it."""

    requests: Sequence[RequestTiming]
    seconds: float
    acceptance: AcceptanceCounts | None


async def run(
    target: BenchTarget, prompts: Sequence[BenchPrompt], traffic: Traffic, on_done: Callable[[RequestTiming], None]
) -> LoadRun:
    """Send one request to warm up and then all *prompts*; call *on_done* after each.

    Raises:
        ConfigError: the server does not answer the first.
    """
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20) as session:
        first = await send(session, target, prompts[0])
        if first.error is not None:
            raise ConfigError(f"{target.base_url}{target.endpoint} does not answer: {first.error}")
        before = await settled_acceptance(session, target)
        started = time.perf_counter()
        requests = await _all(session, target, prompts, traffic, on_done)
        seconds = time.perf_counter() - started
        after = await settled_acceptance(session, target)
    return LoadRun(requests, seconds, None if before is None or after is None else after.since(before))


async def _all(
    session: aiohttp.ClientSession,
    target: BenchTarget,
    prompts: Sequence[BenchPrompt],
    traffic: Traffic,
    on_done: Callable[[RequestTiming], None],
) -> list[RequestTiming]:
    gate: AbstractAsyncContextManager[None] = nullcontext()
    if traffic.max_concurrency is not None:
        gate = asyncio.Semaphore(traffic.max_concurrency)

    async def one(prompt: BenchPrompt) -> RequestTiming:
        async with gate:
            timing = await send(session, target, prompt)
        on_done(timing)
        return timing

    tasks = []
    for prompt, delay in zip(prompts, traffic.delays(len(prompts)), strict=True):
        if delay:
            await asyncio.sleep(delay)
        tasks.append(asyncio.create_task(one(prompt)))
    return await asyncio.gather(*tasks)


async def settled_acceptance(session: aiohttp.ClientSession, target: BenchTarget) -> AcceptanceCounts | None:
    """Return the server's counters once they stop changing: they may be published with a delay."""
    found = await acceptance(session, target)
    for _ in range(MAX_POLLS):
        await asyncio.sleep(POLL_S)
        before, found = found, await acceptance(session, target)
        if found == before:
            break
    return found


async def acceptance(session: aiohttp.ClientSession, target: BenchTarget) -> AcceptanceCounts | None:
    """Return the server's counters; None if it publishes none."""
    try:
        async with session.get(f"{target.base_url}/metrics", headers=target.headers) as response:
            return read_acceptance(await response.text()) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError):
        return None


def read_acceptance(text: str) -> AcceptanceCounts | None:
    """Return the counters in *text* (Prometheus format); None if there are none."""
    totals: dict[str, float] = {}
    per_position: dict[int, float] = {}
    for name, position, value in SAMPLE.findall(text):
        if position:
            per_position[int(position)] = per_position.get(int(position), 0.0) + float(value)
        else:
            totals[name] = totals.get(name, 0.0) + float(value)
    if "drafts" not in totals:
        return None
    return AcceptanceCounts(
        totals["drafts"], totals.get("draft_tokens", 0.0), totals.get("accepted_tokens", 0.0), per_position
    )
