"""Mixed load on a gang on Ray while its workers are killed and stopped; every stream is held to an undisturbed engine.

    python -m benchmarks.soak [--minutes 10] [--output figures.json]

Clients stream requests one after another: greedy and seeded, of many lengths, some left in the middle. Every 20 seconds
something recoverable befalls a worker: the draft or a target rank is killed or stopped, or the draft is frozen for ten
seconds. Wanted: no request fails, no token differs from `uni` without speculation, memory stays flat, nobody is left.
"""

import argparse
import asyncio
import contextlib
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
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
LEAVING = 0.1
"""Share of streams that are left in the middle."""
GONE_S = 10.0
STUCK_S = 180.0
"""A stream that takes longer has failed."""
SHOWN = 20
"""Most failures and differences that are written out."""


@dataclass(frozen=True)
class SoakRequest:
    """A request, and what the undisturbed engine says to it."""

    prompt: tuple[int, ...]
    params: SamplingParams
    wanted: tuple[int, ...] = ()


@dataclass
class Score:
    """What became of the requests."""

    counts: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    notes: list[str] = field(default_factory=list)

    def note(self, what: str, text: str) -> None:
        """Count *what*, and keep *text* if there are not too many already."""
        self.counts[what] += 1
        if len(self.notes) < SHOWN:
            self.notes.append(f"{what}: {text}")


class SoakLoad:
    """Clients of one engine."""

    def __init__(self, engine: AsyncEngine, asked: Sequence[SoakRequest], seed: int) -> None:
        self._engine, self._asked, self._seed = engine, asked, seed
        self._names = itertools.count()
        self.score = Score()

    async def run(self, until: float) -> None:
        """Ask until *until* on the monotonic clock; return when everything asked has been answered."""
        await asyncio.gather(*(self._client(number, until) for number in range(CLIENTS)))

    async def _client(self, number: int, until: float) -> None:
        rng = random.Random(self._seed * CLIENTS + number)
        while time.monotonic() < until and self._engine.is_alive:
            asked = rng.choice(self._asked)
            leave_after = rng.randrange(1, len(asked.wanted)) if rng.random() < LEAVING else None
            try:
                async with asyncio.timeout(STUCK_S):
                    await self._stream(asked, leave_after)
            except TimeoutError:
                self.score.note("failed", f"no end within {STUCK_S:.0f} s")
            except SlipstreamError as error:
                self.score.note("failed", f"{type(error).__name__}: {error}")

    async def _stream(self, asked: SoakRequest, leave_after: int | None) -> None:
        ids: list[int] = []
        prompt = {"prompt_token_ids": list(asked.prompt)}
        stream = self._engine.generate(prompt, asked.params, f"soak-{next(self._names)}")
        async with contextlib.aclosing(stream):
            async for delta in stream:
                if delta.output.error is not None:
                    self.score.note("failed", delta.output.error)
                    return
                ids += delta.output.token_ids
                if leave_after is not None and len(ids) >= leave_after:
                    break
        self._judge(asked, ids, is_left=leave_after is not None)

    def _judge(self, asked: SoakRequest, ids: list[int], *, is_left: bool) -> None:
        """Compare token by token what was heard of a stream."""
        wanted = list(asked.wanted[: len(ids)] if is_left else asked.wanted)
        self.score.tokens += len(ids)
        if ids == wanted:
            self.score.counts["left" if is_left else "finished"] += 1
            return
        same = sum(1 for _ in itertools.takewhile(lambda both: both[0] == both[1], zip(ids, wanted, strict=False)))
        params = asked.params
        self.score.note("different", f"temperature {params.temperature}, seed {params.seed}, from token {same} on")


def requests(items: Sequence[Item]) -> list[SoakRequest]:
    """Return the workload, greedy and seeded by turns."""
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


def undisturbed(asked: Sequence[SoakRequest], base: dict[str, Any]) -> list[SoakRequest]:
    """Return the requests with what one process without speculation says to them."""
    with LLM(**base, speculative_config=None, distributed_executor_backend="uni") as llm:
        prompts = [{"prompt_token_ids": list(one.prompt)} for one in asked]
        results = llm.generate(prompts, [one.params for one in asked], use_tqdm=False)
    return [
        SoakRequest(one.prompt, one.params, tuple(result.outputs[0].token_ids))
        for one, result in zip(asked, results, strict=True)
    ]


async def soak(config: EngineConfig, asked: Sequence[SoakRequest], args: argparse.Namespace) -> dict[str, Any]:
    """Serve the load and do the harm; return the figures."""
    channel = RayChannel(config)

    async def make_preprocessor(info: WorkerInfo) -> Preprocessor:
        return assemble.make_preprocessor(config, info, None)

    engine = AsyncEngine(channel, make_preprocessor)
    try:
        await engine.start(lambda line: print(f"  {line}"))
        assert channel.placement is not None
        actors = Actors(channel.placement)
        await asyncio.to_thread(actors.refresh)
        found = await _disturb(engine, SoakLoad(engine, asked, args.seed), actors, args)
    finally:
        await engine.close()
    return {**found, "orphans": await _left(actors)}


async def _disturb(engine: AsyncEngine, load: SoakLoad, actors: Actors, args: argparse.Namespace) -> dict[str, Any]:
    faults, memory = Faults(actors, engine.stats, random.Random(args.seed), args.every), Memory(actors)
    began = time.monotonic()
    until = began + 60 * args.minutes
    watching = asyncio.create_task(memory.run())
    harming = asyncio.create_task(faults.run(until))
    await load.run(until)
    took = time.monotonic() - began
    for task in (harming, watching):
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
    """End a task that would go on; raises what it failed with."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _left(actors: Actors) -> list[int]:
    """Return who still runs a while after the end."""
    deadline = time.monotonic() + GONE_S
    while (orphans := actors.orphans()) and time.monotonic() < deadline:  # noqa: ASYNC110 - deaths come unannounced
        await asyncio.sleep(0.1)
    return orphans


def shown(found: dict[str, Any]) -> bool:
    """Print the figures; return whether they are as wanted: nobody failed, nothing differs, nobody is left."""
    print(f"{found['seconds']:.0f} s, {found['steps']} rounds, {found['tokens']} tokens; requests: {found['requests']}")
    print(f"faults: {found['faults']}; draft: {found['draft_changes']}; target groups lost: {found['target_losses']}")
    print(f"guesses: {found['proposed']} proposed, {found['accepted']} accepted; left behind: {found['orphans']}")
    for name, held in found["memory"].items():
        print(f"  {name:14} {held}")
    for note in found["notes"]:
        print(f"  {note}")
    requests = found["requests"]
    return not (requests.get("failed") or requests.get("different") or found["orphans"] or not found["is_alive"])


def parser() -> argparse.ArgumentParser:
    """Return what the command line may say."""
    made = measure.arguments(__doc__)
    made.add_argument("--minutes", type=float, default=10.0)
    made.add_argument("--every", type=float, default=20.0, help="seconds between faults")
    made.add_argument("--tensor-parallel-size", type=int, default=2)
    made.add_argument("--seed", type=int, default=0)
    made.set_defaults(threads=1)
    return made


def main() -> None:
    args = parser().parse_args()
    target, draft = args.model or pair()[0], args.draft or pair()[1]
    base = {
        "model": str(target),
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "num_threads": args.threads,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 28,
        "device": "cpu",
    }
    items = workload.load(target, args.limit or 32)
    asked = undisturbed(requests([*items.single, *items.concurrent]), base)
    config = engine_config(
        {
            **base,
            "tensor_parallel_size": args.tensor_parallel_size,
            "distributed_executor_backend": "ray",
            "speculative_config": {
                "model": str(draft),
                "num_speculative_tokens": args.num_speculative_tokens,
                "draft_tensor_parallel_size": 1,
                "placement": "dedicated",
            },
        }
    )
    found = asyncio.run(soak(config, asked, args))
    is_well = shown(found)
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
    sys.exit(not is_well)


if __name__ == "__main__":
    main()
