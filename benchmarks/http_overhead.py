"""What HTTP streaming costs compared with the engine alone: the same requests, streamed over HTTP and without it.

    python -m benchmarks.http_overhead [--streams 32] [--blocks 12] [--max-tokens 64] [--output figures.json]

Both sides share one event loop and one engine, whose controller is in a child process as with `slipstream serve`. The
engine alone streams text for text prompts in this process. Over HTTP, requests are also parsed and validated, and
answers pass through JSON, server-sent events and a socket to another process, which reads them. A block is all streams
at once, on one side and then on the other, a different one first each time. The figure is the median over blocks of the
ratio of their times.
"""

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import uvicorn

from benchmarks.shared import measure, workload
from cluster import assemble
from cluster.settings import engine_config
from protos.config.engine import EngineConfig, to_json
from protos.sampling import SamplingParams
from runtime.frontend.async_engine import AsyncEngine
from runtime.frontend.process_channel import ProcessChannel
from runtime.http.app import create_app
from runtime.http.context import ServerOptions
from runtime.metrics.prometheus import Metrics
from runtime.subprocess import python_command
from runtime.text.tokenizer import load_tokenizer

ALONE, HTTP = "engine alone", "over HTTP"
AT_MOST = 1.15
HOST = "127.0.0.1"
Side = Callable[[Sequence[dict[str, Any]]], int]


class Served:
    """A server and its engine, on an event loop in a thread of its own."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._engine: AsyncEngine | None = None
        self._reader: subprocess.Popen[str] | None = None
        self.cpu_s: defaultdict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Serve until the block ends."""
        self._thread.start()
        serving = self._serving()
        port = self._wait(anext(serving))
        command = [sys.executable, "-m", "benchmarks.shared.http_streams", HOST, str(port)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as self._reader:
            yield
            assert self._reader.stdin is not None
            self._reader.stdin.close()
        self._wait(anext(serving, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _serving(self) -> AsyncIterator[int]:
        config = self._config
        tokenizer: Any = load_tokenizer(config.model)
        metrics = Metrics("bench")
        channel = ProcessChannel(python_command("cluster.transport.engine_process"), to_json(config))

        async def preprocessor(info: Any) -> Any:
            return assemble.make_preprocessor(config, info, tokenizer)

        self._engine = AsyncEngine(channel, preprocessor, metrics)
        metrics.use_stats(self._engine.stats)
        await self._engine.start()
        app = create_app(self._engine, tokenizer, metrics, ServerOptions(("bench",), "1"))
        server = uvicorn.Server(uvicorn.Config(app, host=HOST, port=0, log_config=None, lifespan="off"))
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        task = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.05)
        yield server.servers[0].sockets[0].getsockname()[1]
        server.should_exit = True
        await task
        await self._engine.close()

    def _wait(self, work: Any) -> Any:
        async def awaited() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(awaited(), self._loop).result()

    def clocked(self, name: str, side: Side, bodies: Sequence[dict[str, Any]]) -> int:
        """Run a side, and add up the CPU time of this process, which runs everything but controller and reader."""
        began = time.process_time()
        tokens = side(bodies)
        self.cpu_s[name] += time.process_time() - began
        return tokens

    def alone(self, bodies: Sequence[dict[str, Any]]) -> int:
        """Stream all from the engine; return the number of tokens."""
        return int(self._wait(self._all(bodies)))

    async def _all(self, bodies: Sequence[dict[str, Any]]) -> int:
        return sum(await asyncio.gather(*(self._one(number, body) for number, body in enumerate(bodies))))

    async def _one(self, number: int, body: dict[str, Any]) -> int:
        assert self._engine is not None
        params = SamplingParams(temperature=0.0, max_tokens=body["max_tokens"], ignore_eos=True)
        tokens = 0
        async for delta in self._engine.generate(body["prompt"], params, f"alone-{number}"):
            tokens += len(delta.output.token_ids)
        return tokens

    def over_http(self, bodies: Sequence[dict[str, Any]]) -> int:
        """Stream all over HTTP; return the number of tokens."""
        assert self._reader is not None
        assert self._reader.stdin is not None
        assert self._reader.stdout is not None
        self._reader.stdin.write(json.dumps(list(bodies)) + "\n")
        self._reader.stdin.flush()
        return int(self._reader.stdout.readline())


def bodies(streams: int, max_tokens: int | None) -> list[dict[str, Any]]:
    """Return the first requests of the workload as bodies of `/v1/completions`."""
    rows = json.loads(workload.PATH.read_text(encoding="utf-8"))["concurrent"][:streams]
    return [
        {
            "prompt": row["prompt"],
            "max_tokens": min(row["output_tokens"], max_tokens or row["output_tokens"]),
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for row in rows
    ]


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--streams", type=measure.COUNT, default=32)
    parser.add_argument("--blocks", type=measure.COUNT, default=12)
    parser.add_argument("--max-tokens", type=measure.COUNT, help="cut the workload's answers to this many tokens")
    args: argparse.Namespace = parser.parse_args()
    config = engine_config(
        {
            "num_threads": args.threads,
            "enable_prefix_caching": False,
            "max_num_seqs": args.streams,
            "max_model_len": 1024,
            "num_speculative_tokens": args.num_speculative_tokens,
            **({} if args.model is None else {"model": str(args.model)}),
        }
    )
    served = Served(config)
    requests = bodies(args.streams, args.max_tokens)
    with served.running():
        sides: dict[str, Side] = {ALONE: served.alone, HTTP: served.over_http}
        for side in sides.values():
            side(requests)  # warm
        served.cpu_s.clear()
        timings = measure.alternate(
            {name: partial(served.clocked, name, side) for name, side in sides.items()}, [requests] * args.blocks
        )
    ratio = timings.slowdown(HTTP, ALONE)
    tokens = float(timings.tokens_B.sum())
    cpu_us = {name: 1e6 * served.cpu_s[name] / tokens for name in sides}
    for name in sides:
        print(
            f"{name:<16} {timings.tokens_per_second(name):9.1f} tokens/s (median of {args.blocks} blocks), "
            f"{cpu_us[name]:.0f} us of this process's CPU time per token"
        )
    print(f"{HTTP} / {ALONE}, {args.streams} streams: {ratio}   wanted <= {AT_MOST}")
    measure.write(
        args.output,
        {
            **measure.environment(args.threads),
            "streams": args.streams,
            "blocks": args.blocks,
            "tokens_a_block": float(timings.tokens_B[0]),
            "cpu_us_a_token": cpu_us,
            "ratio": asdict(ratio),
            "seconds": {name: values.tolist() for name, values in timings.seconds.items()},
        },
    )


if __name__ == "__main__":
    main()
