"""What a draft on another machine gains or costs, by the time between the machines.

    python -m benchmarks.fleet.split_gang [--blocks 20] [--streams 1] [--output figures.json]

Engines on this machine's Ray, with one target rank and the default policy. The drafts of three get every plan as late
as if it were 1, 5 and 20 ms under way, and the table as long again; one draft is beside the target, and one engine has
none. The streams of a block run at once on each engine in turn, another one first each time.
"""

import asyncio
import gc
from dataclasses import asdict
from typing import Any

from benchmarks.late_draft import LatePort, Streams
from benchmarks.round_latency import cluster
from benchmarks.shared import measure, workload
from demo import pair
from protos.worker_messages import Port

PLAIN = "no draft"
AT_LEAST = 0.97
NUM_CPUS = 24
"""Logical ones: three for each engine, and room."""


def _serve(port: Port, host: str, node: str, way_ms: float) -> None:
    from workers.process.main import serve  # noqa: PLC0415 - loaded in the worker's process alone

    serve(LatePort(port, 2 * way_ms / 1000), host, node)


def near(port: Port, host: str, node: str) -> None:
    """Run a worker beside the others."""
    _serve(port, host, node, 0.0)


def one_ms(port: Port, host: str, node: str) -> None:
    """Run a worker; 1 ms between a draft and the others."""
    _serve(port, host, node, 1.0)


def five_ms(port: Port, host: str, node: str) -> None:
    """Run a worker; 5 ms between a draft and the others."""
    _serve(port, host, node, 5.0)


def twenty_ms(port: Port, host: str, node: str) -> None:
    """Run a worker; 20 ms between a draft and the others."""
    _serve(port, host, node, 20.0)


SIDES = {"0 ms": near, "1 ms": one_ms, "5 ms": five_ms, "20 ms": twenty_ms}


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--blocks", type=measure.COUNT, default=20)
    parser.add_argument("--streams", type=measure.COUNT, default=1)
    args = parser.parse_args()
    target, draft = args.model or pair()[0], args.draft or pair()[1]
    items = workload.load(target, args.streams).single[: args.streams]
    speculation: dict[str, Any] = {
        "model": str(draft),
        "num_speculative_tokens": args.num_speculative_tokens,
        "placement": "dedicated",
    }
    loop = asyncio.new_event_loop()
    with cluster(NUM_CPUS):
        engines: dict[str, Streams] = {}
        try:
            for name, body in SIDES.items():
                engines[name] = Streams(loop, target, speculation, f"{__spec__.name}:{body.__name__}")
            engines[PLAIN] = Streams(loop, target, None, f"{__spec__.name}:{near.__name__}")
            for engine in engines.values():
                for _ in range(3):  # the policy's first rounds, which decide nothing
                    engine.run(items)
            gc.collect()
            timings = measure.alternate({name: engine.run for name, engine in engines.items()}, [items] * args.blocks)
            stats = {name: engines[name].engine.stats() for name in SIDES}
        finally:
            for engine in engines.values():
                engine.close()
            loop.close()
    ratios = {name: timings.speedup(name, PLAIN) for name in SIDES}
    for name, ratio in ratios.items():
        of = stats[name]
        print(f"{name}: {ratio} times as fast as without a draft   wanted >= {AT_LEAST}")
        print(f"  {of.steps} rounds, {of.drafting_rounds} with drafts, {of.phases.late_drafts} late; {of.speculation}")
    report = {"environment": measure.environment(args.threads), "streams": args.streams, "blocks": args.blocks}
    measure.write(args.output, {**report, "speedup": {name: asdict(ratio) for name, ratio in ratios.items()}})


if __name__ == "__main__":
    main()
