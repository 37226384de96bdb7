"""What waiting costs if the draft is late in every round, compared with an engine without speculation.

    python -m benchmarks.late_draft [--blocks 20] [--delay-ms 200] [--output figures.json]

Both engines run on this machine's Ray with one target rank; the draft receives every plan late. The streams of a block
run at once, on one engine and then on the other, a different one first each time.
"""

import asyncio
import math
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.round_latency import cluster
from benchmarks.shared import measure, workload
from benchmarks.shared.workload import Item
from demo import pair
from protos.sampling import SamplingParams
from protos.worker_messages import FromWorker, Plan, Port, Setup, ToWorker

LATE, PLAIN = "late draft", "no speculation"
AT_MOST = 1.10
STREAMS = 16
DELAY = "SLIPSTREAM_BENCHMARK_DELAY_MS"
"""Environment variable with the delay; workers inherit it."""


class LatePort:
    """A port that delays every plan if its worker is a draft. Later messages stay behind earlier ones."""

    def __init__(self, port: Port, delay_s: float) -> None:
        self._port, self._delay_s = port, delay_s
        self._is_draft = False
        self._held: deque[tuple[float, ToWorker]] = deque()  # with the time at which it arrives

    def send(self, message: FromWorker) -> None:
        """See `Port`."""
        self._port.send(message)

    def receive(self, timeout_s: float | None) -> ToWorker | None:
        """See `Port`."""
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            if self._held and self._held[0][0] <= now:
                return self._held.popleft()[1]
            wait_s = min(until, self._held[0][0] if self._held else math.inf) - now
            message = self._port.receive(None if math.isinf(wait_s) else max(0.0, wait_s))
            if message is not None:
                self._hold(message)
            elif time.monotonic() >= until:
                return None

    def _hold(self, message: ToWorker) -> None:
        if isinstance(message, Setup):
            self._is_draft = message.worker.role == "draft"
        is_late = isinstance(message, Plan) and self._is_draft
        due = time.monotonic() + (self._delay_s if is_late else 0.0)
        self._held.append((max(due, self._held[-1][0]) if self._held else due, message))


def late(port: Port, host: str, node: str) -> None:
    """Run a worker; a draft receives its plans late."""
    from workers.process.main import serve  # noqa: PLC0415 - loaded in the worker's process alone

    serve(LatePort(port, float(os.environ[DELAY]) / 1000), host, node)


class Streams:
    """An engine on Ray whose streams are read on an event loop in this thread.

    Args:
        loop: the event loop.
        model: the target's folder.
        speculation: the engine's `speculative_config`.
        body: the function that runs a worker, as `module:name`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        model: Path,
        speculation: dict[str, Any] | None,
        body: str = f"{__spec__.name}:late",
    ) -> None:
        from cluster import assemble  # noqa: PLC0415 - Ray reads the environment when it is imported
        from cluster.ray.channel import RayChannel  # noqa: PLC0415
        from cluster.settings import engine_config  # noqa: PLC0415
        from runtime.frontend.async_engine import AsyncEngine  # noqa: PLC0415

        config = engine_config(
            {
                "model": str(model),
                "speculative_config": speculation,
                "distributed_executor_backend": "ray",
                "skip_tokenizer_init": True,
                "max_num_seqs": STREAMS,
                "enable_prefix_caching": False,
                "num_threads": 1,
            }
        )

        async def make_preprocessor(info: Any) -> Any:
            return assemble.make_preprocessor(config, info, None)

        self._loop, self._count = loop, 0
        self.engine = AsyncEngine(RayChannel(config, body), make_preprocessor)
        loop.run_until_complete(self.engine.start(lambda line: print(f"  {line}")))

    def run(self, items: Sequence[Item]) -> int:
        """Stream all *items* at once; return the number of tokens."""
        return self._loop.run_until_complete(self._all(items))

    async def _all(self, items: Sequence[Item]) -> int:
        return sum(await asyncio.gather(*(self._one(item) for item in items)))

    async def _one(self, item: Item) -> int:
        self._count += 1
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=64, detokenize=False)
        prompt = {"prompt_token_ids": list(item.prompt)}
        num_tokens = 0
        async for delta in self.engine.generate(prompt, params, f"late-{self._count}"):
            num_tokens += len(delta.output.token_ids)
        return num_tokens

    def close(self) -> None:
        """End the engine."""
        self._loop.run_until_complete(self.engine.close())


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--blocks", type=measure.COUNT, default=20)
    parser.add_argument("--delay-ms", type=float, default=200.0)
    args = parser.parse_args()
    os.environ[DELAY] = str(args.delay_ms)
    target, draft = args.model or pair()[0], args.draft or pair()[1]
    items = workload.load(target, args.limit or STREAMS).single[:STREAMS]
    loop = asyncio.new_event_loop()
    speculation = {
        "model": str(draft),
        "num_speculative_tokens": args.num_speculative_tokens,
        "placement": "dedicated",
        "disable_by_batch_size": STREAMS,
    }
    with cluster():
        engines = {LATE: Streams(loop, target, speculation), PLAIN: Streams(loop, target, None)}
        try:
            for engine in engines.values():
                engine.run(items)  # warm
            timings = measure.alternate({name: engine.run for name, engine in engines.items()}, [items] * args.blocks)
            stats = engines[LATE].engine.stats()
        finally:
            for engine in engines.values():
                engine.close()
            loop.close()
    ratio = timings.slowdown(LATE, PLAIN)
    print(f"{LATE} / {PLAIN}, time: {ratio}   wanted <= {AT_MOST}")
    print(f"{stats.steps} rounds, {stats.proposed} draft tokens scored; draft: {stats.draft_changes}")
    measure.write(
        args.output,
        {
            "environment": measure.environment(args.threads),
            "delay_ms": args.delay_ms,
            "streams": STREAMS,
            "slowdown": asdict(ratio),
            "steps": stats.steps,
            "proposed": stats.proposed,
            "changes": stats.draft_changes,
        },
    )


if __name__ == "__main__":
    main()
