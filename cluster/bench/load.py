"""Load on a server: when requests are sent, how many at once, and what the server's own figures say of it."""

import asyncio
import random
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

import aiohttp

from cluster.bench.client import BenchTarget, RequestTiming, ask
from cluster.bench.datasets import BenchPrompt
from protos.errors import ConfigError

TIMEOUT_S = 6 * 3600.0
LOOK_EVERY_S, LOOKS = 0.75, 6
SAMPLE = re.compile(r'^vllm:spec_decode_num_(\w+?)_total\{(?:.*?position="(\d+)")?[^}]*\} (\S+)', re.MULTILINE)


@dataclass(frozen=True)
class Load:
    """How requests come: *request_rate* a second at times drawn anew for each, infinite for all at once.

    `burstiness` 1 draws them as a Poisson process does, less in bursts, more evenly. At most `max_concurrency` are in
    flight, None for any number.
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
    """The server's counters of speculation, under vLLM's names; per position of the draft, from 0 on."""

    drafts: float = 0.0
    draft_tokens: float = 0.0
    accepted_tokens: float = 0.0
    per_position: dict[int, float] = field(default_factory=dict)

    def since(self, before: "AcceptanceCounts") -> "AcceptanceCounts":
        """Return what was counted after *before*."""
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
    """What came of a load: every request, the seconds it took, and acceptance where the server tells."""

    requests: Sequence[RequestTiming]
    seconds: float
    acceptance: AcceptanceCounts | None


async def put(
    target: BenchTarget, prompts: Sequence[BenchPrompt], load: Load, tell: Callable[[RequestTiming], None]
) -> LoadRun:
    """Ask one request to warm up and then all *prompts*; *tell* hears of each that is over.

    Raises:
        ConfigError: the server cannot be asked at all.
    """
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20) as session:
        first = await ask(session, target, prompts[0])
        if first.error is not None:
            raise ConfigError(f"{target.base_url}{target.endpoint} does not answer: {first.error}")
        before = await settled(session, target)
        began = time.perf_counter()
        requests = await _all(session, target, prompts, load, tell)
        seconds = time.perf_counter() - began
        after = await settled(session, target)
    return LoadRun(requests, seconds, None if before is None or after is None else after.since(before))


async def _all(
    session: aiohttp.ClientSession,
    target: BenchTarget,
    prompts: Sequence[BenchPrompt],
    load: Load,
    tell: Callable[[RequestTiming], None],
) -> list[RequestTiming]:
    gate: AbstractAsyncContextManager[None] = nullcontext()
    if load.max_concurrency is not None:
        gate = asyncio.Semaphore(load.max_concurrency)

    async def one(prompt: BenchPrompt) -> RequestTiming:
        async with gate:
            measured = await ask(session, target, prompt)
        tell(measured)
        return measured

    tasks = []
    for prompt, delay in zip(prompts, load.delays(len(prompts)), strict=True):
        if delay:
            await asyncio.sleep(delay)
        tasks.append(asyncio.create_task(one(prompt)))
    return await asyncio.gather(*tasks)


async def settled(session: aiohttp.ClientSession, target: BenchTarget) -> AcceptanceCounts | None:
    """Return the server's counters once they rest: they may be published well after what they count."""
    found = await acceptance(session, target)
    for _ in range(LOOKS):
        await asyncio.sleep(LOOK_EVERY_S)
        before, found = found, await acceptance(session, target)
        if found == before:
            break
    return found


async def acceptance(session: aiohttp.ClientSession, target: BenchTarget) -> AcceptanceCounts | None:
    """Return what the server has counted so far; None where it does not tell."""
    try:
        async with session.get(f"{target.base_url}/metrics", headers=target.headers) as response:
            return read_acceptance(await response.text()) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError):
        return None


def read_acceptance(text: str) -> AcceptanceCounts | None:
    """Return the counters in *text*, Prometheus' format; None where there are none."""
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
