"""An engine on machines made of namespaces, which streams answers without a pause until it is told to stop.

    python -m tests.support.distributed.machine_engine ORDER.json

Runs on one of the machines, with RAY_ADDRESS set. In the folder of ORDER it writes `placed` (the address of the machine
of each worker), `arrivals` (the time of every output), `answers` (prompt, token ids or error) and `stats`, and it stops
when there is a file `stop`. Times are seconds of the computer's monotonic clock, which all machines share.
"""

import asyncio
import json
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import assemble
from cluster.ray import cluster as ray_cluster
from cluster.ray.channel import RayChannel
from cluster.settings import engine_config
from protos.errors import NoRoomError, SlipstreamError
from protos.messages import WorkerInfo
from protos.sampling import SamplingParams
from runtime.frontend.async_engine import AsyncEngine
from runtime.metrics.logs import log_to_stderr
from runtime.text.preprocessor import Preprocessor
from tests.support.distributed.ray_nodes import PROMPTS, SMALL
from tests.support.policies import always

LENGTH = 60
PARAMS = [
    SamplingParams(temperature=0.0 if i % 2 else 0.8, seed=i, max_tokens=LENGTH, ignore_eos=True)
    for i in range(len(PROMPTS))
]
REFUSED_PAUSE_S = 0.5


def settings(order: dict[str, Any]) -> dict[str, Any]:
    """Return the engine's arguments."""
    draft = order.get("draft")
    speculative = {"model": draft, "num_speculative_tokens": 3, "placement": "dedicated"}
    return {"model": order["model"], "speculative_config": always(speculative) if draft else None, **SMALL}


@dataclass
class Streams:
    """Streams every prompt again and again, and writes down what arrives and when."""

    engine: AsyncEngine
    folder: Path
    answers: list[dict[str, Any]] = field(default_factory=list)

    async def run(self) -> None:
        with (self.folder / "arrivals").open("w", buffering=1) as arrivals:
            await asyncio.gather(*(self._repeat(index, arrivals) for index in range(len(PROMPTS))), self._observe())

    async def _repeat(self, index: int, arrivals: Any) -> None:
        turn = 0
        while not self._must_stop:
            turn += 1
            answer = await self._one(index, f"{index}-{turn}", arrivals)
            self.answers.append(answer)
            if "error" in answer:
                await asyncio.sleep(REFUSED_PAUSE_S)

    async def _one(self, index: int, name: str, arrivals: Any) -> dict[str, Any]:
        ids: list[int] = []
        try:
            async for delta in self.engine.generate({"prompt_token_ids": PROMPTS[index]}, PARAMS[index], name):
                if delta.output.error is not None:
                    raise NoRoomError(delta.output.error, delta.output.retry_after_s or 0.0)
                ids += delta.output.token_ids
                arrivals.write(f"{time.monotonic()}\n")
        except SlipstreamError as error:
            return {"prompt": index, "error": type(error).__name__, "text": str(error), "tokens": len(ids)}
        return {"prompt": index, "ids": ids}

    @property
    def _must_stop(self) -> bool:
        return (self.folder / "stop").exists() or not self.engine.is_alive

    async def _observe(self) -> None:
        """Write a line whenever the state of the target changes."""
        before: tuple[object, ...] = ()
        with (self.folder / "states").open("w", buffering=1) as states:
            while not self._must_stop:
                stats = self.engine.stats()
                now = (stats.target_is_lost, stats.draft_is_down, str(stats.outage or ""))
                if now != before:
                    before = now
                    states.write(json.dumps([time.monotonic(), *now]) + "\n")
                await asyncio.sleep(0.05)


def written(line: str) -> dict[str, str]:
    """Return the address of the machine of each worker in the engine's report of its placement."""
    addresses = {node["NodeID"][:8]: node["NodeManagerAddress"] for node in ray_cluster.nodes()}
    where = {}
    for part in line.removeprefix("placed: ").split("; "):
        found = re.fullmatch(r"(.*) on node (\w+)", part)
        assert found is not None, line
        where.update(dict.fromkeys(found[1].split(", "), addresses[found[2]]))
    return where


async def serve(order: dict[str, Any], folder: Path) -> None:
    """Stream until told to stop, then write the answers."""
    config = engine_config({**settings(order), "distributed_executor_backend": "ray", **order["arguments"]})

    async def make_preprocessor(info: WorkerInfo) -> Preprocessor:
        return assemble.make_preprocessor(config, info, None)

    engine = AsyncEngine(RayChannel(config), make_preprocessor)

    def report(line: str) -> None:
        sys.stderr.write(f"{time.monotonic():.2f} {line}\n")
        sys.stderr.flush()
        if line.startswith("placed: "):
            (folder / "placed").write_text(json.dumps(written(line)))

    streams = Streams(engine, folder)
    try:
        await engine.start(report)
        await streams.run()
    finally:
        (folder / "answers").write_text(json.dumps(streams.answers))
        await engine.close()


def main() -> None:
    log_to_stderr()
    path = Path(sys.argv[1])
    asyncio.run(serve(json.loads(path.read_text()), path.parent))


if __name__ == "__main__":
    main()
