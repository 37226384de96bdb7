"""A tiny pair on Ray, and an engine driven from a test's thread."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cluster import assemble
from cluster.ray.channel import RayChannel
from cluster.transport.process_workers import BODY
from protos.config.engine import EngineConfig
from protos.messages import WorkerInfo
from protos.sampling import SamplingParams
from runtime.frontend.async_engine import AsyncEngine
from runtime.text.preprocessor import Preprocessor
from runtime.text.tokenizer import load_tokenizer

PROMPTS = [f"{word} and then {number}" for number in range(4) for word in ("once", "def f(x):", "The cat", "zz")]
LENGTH = 120
PARAMS = [
    SamplingParams(temperature=0.0 if i % 2 else 0.8, seed=i, max_tokens=LENGTH, ignore_eos=True) for i in range(16)
]
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "num_gpu_blocks_override": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "spare_workers": 0,
}
RECOVERY_S = 90.0
Result = TypeVar("Result")
Texts = list[list[int]]


@dataclass(frozen=True)
class Pair:
    target: Path
    draft: Path

    def speculation(self, guesses: int = 3) -> dict[str, Any]:
        return {"model": str(self.draft), "num_speculative_tokens": guesses, "draft_tensor_parallel_size": 1}


class Running:
    """An engine on Ray and the event loop it lives on, driven from a test's thread."""

    def __init__(self, config: EngineConfig, body: str = BODY) -> None:
        self._config = config
        self.said: list[str] = []
        self._loop = asyncio.new_event_loop()
        self.channel = RayChannel(config, body)
        self.engine = AsyncEngine(self.channel, self._make_preprocessor)
        self.do(self.engine.start(self.said.append))

    def do(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self._loop.run_until_complete(work)

    async def _make_preprocessor(self, info: WorkerInfo) -> Preprocessor:
        return assemble.make_preprocessor(self._config, info, load_tokenizer(self._config.model))

    def close(self) -> None:
        self.do(self.engine.close())
        self._loop.close()

    def pid(self, who: str) -> int:
        """Return the process id of the worker *who*, or of the controller."""
        import ray

        return int(ray.get(self._actor(who).location.remote(), timeout=10).pid)

    def _actor(self, who: str) -> Any:
        """Return the actor with the name *who*, or the spare that has become that worker."""
        import ray

        assert self.channel.placement is not None
        prefix = self.channel.placement.name_of("")
        if prefix + who in ray.util.list_named_actors():
            return ray.get_actor(prefix + who)
        return next(spare for spare in self._spares() if ray.get(spare.role.remote(), timeout=30) == who)

    def _spares(self) -> list[Any]:
        """Return the actors that were started as spares."""
        import ray

        assert self.channel.placement is not None
        prefix = self.channel.placement.name_of("spare ")
        return [ray.get_actor(name) for name in ray.util.list_named_actors() if name.startswith(prefix)]

    def spares(self) -> list[int]:
        """Return the process ids of the spares that wait, once they have imported everything."""
        import ray

        waiting = [spare for spare in self._spares() if not ray.get(spare.role.remote(), timeout=60)]
        return [int(ray.get(spare.location.remote(), timeout=60).pid) for spare in waiting]

    def stream(self, at: dict[int, Callable[[], None]] | None = None) -> Texts:
        """Stream all prompts at once; run each action once that many tokens have arrived in total."""
        return self.do(self._stream(sorted((at or {}).items())))

    async def _stream(self, acts: list[tuple[int, Callable[[], None]]]) -> Texts:
        num_tokens = 0

        async def one(index: int) -> list[int]:
            nonlocal num_tokens
            ids: list[int] = []
            async for delta in self.engine.generate(PROMPTS[index], PARAMS[index], f"{time.monotonic_ns()}-{index}"):
                assert delta.output.error is None
                ids += delta.output.token_ids
                num_tokens += len(delta.output.token_ids)
                while acts and num_tokens >= acts[0][0]:
                    acts.pop(0)[1]()
            return ids

        return await asyncio.gather(*(one(index) for index in range(len(PROMPTS))))

    def until(self, condition: Callable[[], bool], seconds: float = RECOVERY_S) -> float:
        """Run the event loop until *condition*; return how long it took."""

        async def wait() -> None:
            async with asyncio.timeout(seconds):
                while not condition():  # noqa: ASYNC110 - snapshots come without an event
                    await asyncio.sleep(0.02)

        started = time.monotonic()
        self.do(wait())
        return time.monotonic() - started

    def changes(self, why: str) -> int:
        return self.engine.stats().draft_changes.get(why, 0)

    def proposed(self) -> int:
        """Return the number of draft tokens so far, once nothing runs."""
        self.until(lambda: self.engine.stats().num_running == 0)
        return self.engine.stats().proposed
