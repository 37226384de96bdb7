"""A server under overload: its goodput compared with its best, how fast it refuses requests, and its memory.

    python -m benchmarks.overload [--seconds 60] [--slots 16] [--factors 2 10] [--output figures.json]

`slipstream serve` runs in a process of its own, with the demo pair or the given model. Its best is measured in a closed
loop: twice as many clients as it has slots, each of which sends its next request as soon as the last one is answered.
Then requests are sent at a fixed rate, 2 and 10 times that of the best, whether or not earlier ones are answered. The
best is measured again after each of these phases, and its mean before and after is the reference, since the speed of
machines drifts. Goodput counts the tokens of answers that were completed in the measured time. Clients, in this
process, time the refusals.
"""

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

import demo
from benchmarks.shared import measure, workload
from benchmarks.shared.server import ServerProcess, served

GOODPUT_AT_LEAST, REFUSED_WITHIN_MS, MEMORY_AT_MOST = 0.95, 50.0, 1.05
CONTEXT, BLOCK = 512, 16
"""The cache holds the whole context of every slot and no more, so warm-up fills it before memory is measured."""

WARM_ROUNDS = 6
"""Towards the end of each, fewer requests run. So kernels for all batch sizes, which are never freed, are made here."""

WARM_S = 3.0
"""Answers in the first seconds of a phase are not counted: the queue is still filling."""


@dataclass
class Phase:
    """What clients observed in one phase. `other` counts answers that are neither complete nor refusals."""

    name: str
    seconds: float
    tokens: int = 0
    answered: int = 0
    other: int = 0
    refused_ms: list[float] = field(default_factory=list)
    server_mib: float = 0.0
    controller_mib: float = 0.0

    @property
    def goodput(self) -> float:
        """Tokens of completed answers per second."""
        return self.tokens / self.seconds

    @property
    def rate(self) -> float:
        """Completed answers per second."""
        return self.answered / self.seconds

    def refusal_ms(self, percentile: float) -> float:
        """Return a percentile of the time that refusals took, 0 if there were none."""
        return float(np.percentile(self.refused_ms, percentile)) if self.refused_ms else 0.0

    def line(self) -> str:
        """Return the line to print."""
        return (
            f"{self.name:>10}: {self.goodput:8.1f} tokens/s, {self.rate:6.2f} answers/s, {len(self.refused_ms):6d} "
            f"refused in {self.refusal_ms(50):5.1f} ms (median), {self.refusal_ms(99):5.1f} ms (99 %), "
            f"{max(self.refused_ms, default=0):5.1f} ms (most), {self.other} other, "
            f"{self.server_mib:.0f} + {self.controller_mib:.0f} MiB of server and controller"
        )

    def figures(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        fields = {key: value for key, value in asdict(self).items() if key != "refused_ms"}
        times = {f"refused_ms_{each}": self.refusal_ms(each) for each in (50, 99, 100)}
        return {**fields, "goodput": self.goodput, "rate": self.rate, "refused": len(self.refused_ms), **times}


class Clients:
    """All clients of one server."""

    def __init__(self, session: aiohttp.ClientSession, prompts: Sequence[list[int]], max_tokens: int) -> None:
        self._session = session
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._lengths = np.random.default_rng(0)
        self._num_sent = 0

    async def send(self, phase: Phase, since: float, until: float) -> None:
        """Send one request; count its answer in *phase* if it arrives between *since* and *until*."""
        prompt = self._prompts[self._num_sent % len(self._prompts)]
        self._num_sent += 1
        length, max_tokens = (
            int(self._lengths.integers(most // 4, most, endpoint=True)) for most in (len(prompt), self._max_tokens)
        )
        body = {
            "prompt": prompt[: length + 1],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "cache_salt": str(self._num_sent),
        }
        began = time.perf_counter()
        try:
            async with self._session.post("/v1/completions", json=body) as answer:
                status, content = answer.status, await answer.json()
        except aiohttp.ClientError:
            status, content = 0, {}
        now = time.perf_counter()
        if not since <= now <= until:
            return
        if status == 200:
            phase.answered += 1
            phase.tokens += content["usage"]["completion_tokens"]
        elif status == 429:
            phase.refused_ms.append(1000 * (now - began))
        else:
            phase.other += 1

    async def best(self, name: str, seconds: float, num_clients: int) -> Phase:
        """Let each client send its next request as soon as the last one is answered."""
        phase, since, until = self._phase(name, seconds)

        async def one() -> None:
            while time.perf_counter() < until:
                await self.send(phase, since, until)

        await asyncio.gather(*(one() for _ in range(num_clients)))
        return phase

    async def flood(self, name: str, seconds: float, rate: float) -> Phase:
        """Send *rate* requests per second, whether or not earlier ones are answered."""
        phase, since, until = self._phase(name, seconds)
        sent: list[asyncio.Future[None]] = []
        began = time.perf_counter()
        while (now := time.perf_counter()) < until:
            while len(sent) < (now - began) * rate:
                sent.append(asyncio.ensure_future(self.send(phase, since, until)))
            await asyncio.sleep(1 / rate)
        await asyncio.gather(*sent)
        return phase

    def _phase(self, name: str, seconds: float) -> tuple[Phase, float, float]:
        since = time.perf_counter() + WARM_S
        return Phase(name, seconds), since, since + seconds


class ServerUnderLoad:
    """`slipstream serve` and its child processes."""

    def __init__(self, server: ServerProcess) -> None:
        self.url = server.url
        self._pid = server.pid

    def record_memory(self, phase: Phase) -> None:
        """Record the memory that the server and its controller use now."""
        phase.server_mib = _memory_mib(self._pid)
        phase.controller_mib = sum(map(_memory_mib, _children(self._pid)))


def _children(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in children.read_text().split()] if children.exists() else []


def _memory_mib(pid: int) -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
    return 0.0


@contextlib.contextmanager
def under_load(args: argparse.Namespace) -> Iterator[ServerUnderLoad]:
    """Run the server until the block ends."""
    options = [
        f"--num-threads={args.threads}",
        f"--max-num-seqs={args.slots}",
        f"--max-waiting-requests={args.waiting}",
        f"--max-model-len={CONTEXT}",
        f"--num-gpu-blocks-override={args.slots * CONTEXT // BLOCK}",
        f"--block-size={BLOCK}",
    ]
    if args.model is not None:
        options.append(f"--model={args.model}")
    with served(options) as server:
        yield ServerUnderLoad(server)


async def phases(server: ServerUnderLoad, args: argparse.Namespace) -> AsyncIterator[Phase]:
    """Yield the best; then, for each factor, the phase at a fixed rate and the best after it."""
    prompts = [list(item.prompt) for item in workload.load(args.model or demo.pair()[0], args.limit).concurrent]
    endless = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.url, connector=connector, timeout=endless) as session:
        clients = Clients(session, prompts, args.max_tokens)
        for _ in range(WARM_ROUNDS):
            await clients.best("warm-up", args.seconds / 4, 2 * args.slots)
        best = await clients.best("best", args.seconds, 2 * args.slots)
        server.record_memory(best)
        yield best
        for factor in args.factors:
            flood = await clients.flood(f"{factor:g}x", args.seconds, factor * best.rate)
            server.record_memory(flood)
            yield flood
            best = await clients.best("best", args.seconds, 2 * args.slots)
            server.record_memory(best)
            yield best


async def run(args: argparse.Namespace) -> list[Phase]:
    """Run all phases; print a line for each."""
    found = []
    with under_load(args) as server:
        async for phase in phases(server, args):
            print(phase.line(), flush=True)
            found.append(phase)
    return found


def assessed(found: Sequence[Phase]) -> tuple[dict[str, Any], bool]:
    """Return the figures that have limits, and whether all are within them."""
    floods = range(1, len(found), 2)
    ratios = {found[i].name: found[i].goodput / np.mean([found[i - 1].goodput, found[i + 1].goodput]) for i in floods}
    refused = {found[i].name: found[i].refusal_ms(99) for i in floods}
    memory = {
        "server": found[-1].server_mib / found[0].server_mib,
        "controller": found[-1].controller_mib / max(found[0].controller_mib, 1e-9),
    }
    kept = (
        min(ratios.values()) >= GOODPUT_AT_LEAST
        and max(refused.values()) <= REFUSED_WITHIN_MS
        and max(memory.values()) <= MEMORY_AT_MOST
        and not any(phase.other for phase in found)
        and all(found[i].refused_ms for i in floods)
    )
    return {"goodput_of_best": ratios, "refused_ms_99": refused, "memory_after_by_before": memory}, bool(kept)


def main() -> None:
    """Run the benchmark; the exit status is 1 if a figure exceeds its limit."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each phase")
    parser.add_argument("--slots", type=measure.COUNT, default=16, help="requests that run at once")
    parser.add_argument(
        "--waiting", type=measure.COUNT, default=32, help="requests that may wait; at least twice the slots"
    )
    parser.add_argument(
        "--max-tokens", type=measure.COUNT, default=128, help="of an answer, at most; at least a quarter of it"
    )
    parser.add_argument(
        "--factors", type=float, nargs="+", default=[2.0, 10.0], help="request rates, as multiples of that of the best"
    )
    args = parser.parse_args()
    found = asyncio.run(run(args))
    figures, kept = assessed(found)
    for name, ratio in figures["goodput_of_best"].items():
        print(
            f"{name}: {ratio:.3f} of the best (at least {GOODPUT_AT_LEAST}), 99 % of refusals within "
            f"{figures['refused_ms_99'][name]:.1f} ms (at most {REFUSED_WITHIN_MS:g})"
        )
    for name, grown in figures["memory_after_by_before"].items():
        print(f"memory of the {name} at the end / after the first best: {grown:.3f} (at most {MEMORY_AT_MOST})")
    measure.write(
        args.output,
        {
            "environment": measure.environment(args.threads),
            **figures,
            "kept": kept,
            "phases": [phase.figures() for phase in found],
        },
    )
    sys.exit(not kept)


if __name__ == "__main__":
    main()
