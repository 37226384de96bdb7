"""Mixed load on Ray while workers are killed and stopped; every stream is compared with an undisturbed engine's.

    python -m benchmarks.soak [--minutes 10] [--output figures.json]

Clients stream requests one after another: greedy and seeded, of many lengths, some closed early. Every 20 seconds a
recoverable fault hits a worker: the draft or a target rank is killed or stopped, or the draft is stopped for ten
seconds. Wanted: no request fails, no token differs from the executor `uni` without speculation, memory does not grow,
and no process is left over.
"""

import argparse
import asyncio
import contextlib
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.shared import measure, workload
from benchmarks.shared.faults import Actors, Faults, Memory
from benchmarks.shared.workload import Item
from cluster import assemble
from cluster.ray.channel import RayChannel
from cluster.settings import engine_config
from demo import pair
from protos.config.engine import EngineConfig
from protos.errors import SlipstreamError
from protos.messages import WorkerInfo
from runtime.frontend.async_engine import AsyncEngine
from runtime.text.preprocessor import Preprocessor
from slipstream import LLM, SamplingParams

CLIENTS = 16
MOST_TOKENS = 96
CLOSED_EARLY = 0.1
"""Share of streams that the client closes before their end."""
GONE_S = 10.0
"""Processes must have ended this long after the engine was closed."""
STUCK_S = 180.0
"""A stream that takes longer has failed."""
SHOWN = 20
"""Most failures and differences that are printed."""


@dataclass(frozen=True)
class SoakRequest:
    """A request, and the tokens that the undisturbed engine returns for it."""

    prompt: tuple[int, ...]
    params: SamplingParams
    wanted: tuple[int, ...] = ()


@dataclass
class Score:
    """Counts of requests by outcome, and notes about the first failures."""

    counts: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    notes: list[str] = field(default_factory=list)

    def note(self, what: str, text: str) -> None:
        """Count *what*, and keep *text* among the first notes."""
        self.counts[what] += 1
        if len(self.notes) < SHOWN:
            self.notes.append(f"{what}: {text}")


class SoakLoad:
    """Clients of one engine. *on_tokens* is called whenever tokens of a stream arrive."""

    def __init__(
        self,
        engine: AsyncEngine,
        requests: Sequence[SoakRequest],
        seed: int,
        on_tokens: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine, self._requests, self._seed, self._on_tokens = engine, requests, seed, on_tokens
        self._names = itertools.count()
        self.score = Score()
        self._is_stopped = False

    def stop(self) -> None:
        """Send no more requests; `run` returns when those that run have been answered."""
        self._is_stopped = True

    async def run(self, until: float) -> None:
        """Send requests until *until* on the monotonic clock; return when all have been answered."""
        await asyncio.gather(*(self._client(number, until) for number in range(CLIENTS)))

    async def _client(self, number: int, until: float) -> None:
        rng = random.Random(self._seed * CLIENTS + number)
        while time.monotonic() < until and self._engine.is_alive and not self._is_stopped:
            request = rng.choice(self._requests)
            close_after = rng.randrange(1, len(request.wanted)) if rng.random() < CLOSED_EARLY else None
            try:
                async with asyncio.timeout(STUCK_S):
                    await self._stream(request, close_after)
            except TimeoutError:
                self.score.note("failed", f"no end within {STUCK_S:.0f} s")
            except SlipstreamError as error:
                self.score.note("failed", f"{type(error).__name__}: {error}")

    async def _stream(self, request: SoakRequest, close_after: int | None) -> None:
        ids: list[int] = []
        prompt = {"prompt_token_ids": list(request.prompt)}
        stream = self._engine.generate(prompt, request.params, f"soak-{next(self._names)}")
        async with contextlib.aclosing(stream):
            async for delta in stream:
                if delta.output.error is not None:
                    self.score.note("failed", delta.output.error)
                    return
                ids += delta.output.token_ids
                self._on_tokens()
                if close_after is not None and len(ids) >= close_after:
                    break
        self._compare(request, ids, is_closed=close_after is not None)

    def _compare(self, request: SoakRequest, ids: list[int], *, is_closed: bool) -> None:
        """Compare the tokens of a stream with those of the undisturbed engine."""
        wanted = list(request.wanted[: len(ids)] if is_closed else request.wanted)
        self.score.tokens += len(ids)
        if ids == wanted:
            self.score.counts["left" if is_closed else "finished"] += 1
            return
        same = sum(1 for _ in itertools.takewhile(lambda both: both[0] == both[1], zip(ids, wanted, strict=False)))
        params = request.params
        self.score.note("different", f"temperature {params.temperature}, seed {params.seed}, from token {same} on")


def requests(items: Sequence[Item]) -> list[SoakRequest]:
    """Return the workload, alternately greedy and seeded."""
    return [
        SoakRequest(
            item.prompt,
            SamplingParams(
                temperature=0.8 * (index % 2),
                top_p=0.95 if index % 4 == 1 else 1.0,
                seed=index,
                ignore_eos=True,
                max_tokens=min(MOST_TOKENS, max(8, item.max_tokens)),
                detokenize=False,
            ),
        )
        for index, item in enumerate(items)
    ]


def with_wanted(requests: Sequence[SoakRequest], base: dict[str, Any]) -> list[SoakRequest]:
    """Return the requests with the tokens that one process without speculation returns for them."""
    with LLM(**base, speculative_config=None, distributed_executor_backend="uni") as llm:
        prompts = [{"prompt_token_ids": list(one.prompt)} for one in requests]
        results = llm.generate(prompts, [one.params for one in requests], use_tqdm=False)
    return [
        SoakRequest(one.prompt, one.params, tuple(result.outputs[0].token_ids))
        for one, result in zip(requests, results, strict=True)
    ]


async def soak(config: EngineConfig, requests: Sequence[SoakRequest], args: argparse.Namespace) -> dict[str, Any]:
    """Serve the load and inject the faults; return the figures."""
    channel = RayChannel(config)

    async def make_preprocessor(info: WorkerInfo) -> Preprocessor:
        return assemble.make_preprocessor(config, info, None)

    engine = AsyncEngine(channel, make_preprocessor)
    try:
        await engine.start(lambda line: print(f"  {line}"))
        assert channel.placement is not None
        actors = Actors(channel.placement)
        await asyncio.to_thread(actors.refresh)
        found = await _disturb(engine, SoakLoad(engine, requests, args.seed), actors, args)
    finally:
        await engine.close()
    return {**found, "orphans": await _remaining(actors)}


async def _disturb(engine: AsyncEngine, load: SoakLoad, actors: Actors, args: argparse.Namespace) -> dict[str, Any]:
    faults, memory = Faults(actors, engine.stats, random.Random(args.seed), args.every), Memory(actors)
    began = time.monotonic()
    until = began + 60 * args.minutes
    sampling = asyncio.create_task(memory.run())
    injecting = asyncio.create_task(faults.run(until))
    await load.run(until)
    took = time.monotonic() - began
    for task in (injecting, sampling):
        await _end(task)
    stats = engine.stats()
    return {
        "seconds": took,
        "requests": dict(load.score.counts),
        "tokens": load.score.tokens,
        "notes": load.score.notes,
        "faults": dict(faults.done),
        "log": faults.log,
        "is_alive": engine.is_alive,
        "draft_changes": stats.draft_changes,
        "target_losses": stats.target_losses,
        "steps": stats.steps,
        "proposed": stats.proposed,
        "accepted": stats.accepted,
        "preemptions": stats.preemptions,
        "memory": memory.report(),
        "memory_series": memory.series,
    }


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel a task; raise its error if it failed."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _remaining(actors: Actors) -> list[int]:
    """Return the ids of processes that still run `GONE_S` after the end."""
    deadline = time.monotonic() + GONE_S
    while (orphans := actors.orphans()) and time.monotonic() < deadline:  # noqa: ASYNC110 - there is no event for the end of these processes
        await asyncio.sleep(0.1)
    return orphans


def shown(found: dict[str, Any]) -> bool:
    """Print the figures; return whether nothing failed, no token differs and no process is left over."""
    print(f"{found['seconds']:.0f} s, {found['steps']} rounds, {found['tokens']} tokens; requests: {found['requests']}")
    print(f"faults: {found['faults']}; draft: {found['draft_changes']}; target groups lost: {found['target_losses']}")
    print(f"draft tokens: {found['proposed']} proposed, {found['accepted']} accepted; left over: {found['orphans']}")
    for name, held in found["memory"].items():
        print(f"  {name:14} {held}")
    for note in found["notes"]:
        print(f"  {note}")
    requests = found["requests"]
    return not (requests.get("failed") or requests.get("different") or found["orphans"] or not found["is_alive"])


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = measure.arguments(__doc__)
    made.add_argument("--minutes", type=float, default=10.0)
    made.add_argument("--every", type=float, default=20.0, help="seconds between faults")
    made.add_argument("--tensor-parallel-size", type=measure.COUNT, default=2)
    made.add_argument("--seed", type=int, default=0)
    made.set_defaults(threads=1)
    return made


def base_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine arguments that the disturbed and the undisturbed engine have in common."""
    return {
        "model": str(args.model or pair()[0]),
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "num_threads": args.threads,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 28,
        "device": "cpu",
    }


def disturbed_config(args: argparse.Namespace, **arguments: Any) -> EngineConfig:
    """Return the configuration of the engine on Ray that the faults hit."""
    return engine_config(
        {
            **base_arguments(args),
            "tensor_parallel_size": args.tensor_parallel_size,
            "distributed_executor_backend": "ray",
            "speculative_config": {
                "model": str(args.draft or pair()[1]),
                "num_speculative_tokens": args.num_speculative_tokens,
                "draft_tensor_parallel_size": 1,
                "placement": "dedicated",
                "policy": "fixed",
            },
            **arguments,
        }
    )


def wanted_requests(args: argparse.Namespace) -> list[SoakRequest]:
    """Return the workload's requests with the tokens of the undisturbed engine."""
    items = workload.load(args.model or pair()[0], args.limit or 32)
    return with_wanted(requests([*items.single, *items.concurrent]), base_arguments(args))


def main() -> None:
    args = parser().parse_args()
    found = asyncio.run(soak(disturbed_config(args), wanted_requests(args), args))
    has_passed = shown(found)
    measure.write(
        args.output,
        {
            "environment": measure.environment(args.threads),
            "seed": args.seed,
            "minutes": args.minutes,
            "every_s": args.every,
            **found,
        },
    )
    sys.exit(not has_passed)


if __name__ == "__main__":
    main()
