"""Slipstream against itself and against `transformers`: same process, weights, prompts and numbers of tokens.

    python -m benchmarks.engine [--limit 8] [--only single] [--output figures.json]

Batch 1: each prompt of the workload is one block, in which every side runs, a different one first each time. Ratios are
of the time of all blocks, with bootstrap 95 % intervals over blocks. 32 concurrent requests: a round is one block.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.shared import measure, workload
from benchmarks.shared.peers import Assisted, Generate, GenerateBatch
from benchmarks.shared.sides import DemoEngine, share_outside
from benchmarks.shared.workload import Item, SamplingSettings, Workload
from demo import pair
from workers.model.loader import pick_dtype

ON, OFF = "speculation on", "speculation off"
GENERATE, ASSISTED, ASSISTED_K = "generate", "generate(assistant_model)", "generate(assistant_model), same K"
PADDED, CONTINUOUS = "generate, padded batch", "generate_batch"

Run = Callable[[Item], int]


@dataclass(frozen=True)
class Goal:
    """A ratio of speeds and its goal; printed, never enforced."""

    side: str
    over: str
    at_least: float


SINGLE_GOALS = (Goal(ON, OFF, 1.5), Goal(OFF, GENERATE, 1.1), Goal(ON, ASSISTED, 2.0), Goal(ON, ASSISTED_K, 2.0))
CONCURRENT_GOALS = (
    Goal(OFF, PADDED, 1.5),
    Goal(OFF, CONTINUOUS, 4.0),
    Goal(ON, PADDED, 1.5),
    Goal(ON, CONTINUOUS, 4.0),
    Goal(ON, OFF, 1.0),
)
OUTSIDE_AT_MOST = 0.15


class Bench:
    """Both engines and the peers, loaded once."""

    def __init__(self, args: argparse.Namespace) -> None:
        target, draft = args.model or pair()[0], args.draft or pair()[1]
        self.repeat, self.rounds = args.repeat, args.rounds
        self.work: Workload = workload.load(target, args.limit)
        self.target: Path = target
        self.off = DemoEngine(target, None, threads=args.threads)
        self.on = DemoEngine(
            target, {"model": str(draft), "num_speculative_tokens": args.num_speculative_tokens}, threads=args.threads
        )
        self.generate = Generate(target)
        self.assisted = Assisted(target, draft, None)
        self.assisted_k = Assisted(target, draft, args.num_speculative_tokens)

    def single(self, name: str, sampling: SamplingSettings) -> dict[str, Any]:
        """Measure batch 1, one prompt after the other."""
        sides: dict[str, DemoEngine | Generate] = {
            ON: self.on,
            OFF: self.off,
            GENERATE: self.generate,
            ASSISTED: self.assisted,
            ASSISTED_K: self.assisted_k,
        }
        runs: dict[str, Run] = {side: partial(peer.one, sampling=sampling) for side, peer in sides.items()}
        for run in runs.values():
            run(self.work.single[0])  # warm
        timings = measure.alternate(runs, self.work.single * self.repeat)
        return report(f"batch 1, {name}", timings, SINGLE_GOALS)

    def concurrent(self) -> dict[str, Any]:
        """Measure all concurrent requests at once, greedy.

        The peers use the dtype of our engines, which is fp32 on CPUs that emulate bf16: batches are faster in fp32
        there. At batch 1 bf16 is faster for the peers even there, so `single` loads them in the checkpoint's dtype.
        """
        items = self.work.concurrent
        dtype, _ = pick_dtype("auto", {}, self.target, torch.device("cpu"))
        continuous = GenerateBatch(self.target, items, dtype)
        runs = {
            ON: self.on.all,
            OFF: self.off.all,
            PADDED: Generate(self.target, dtype).padded,
            CONTINUOUS: continuous.all,
        }
        timed = partial(measure.alternate, runs, around={CONTINUOUS: continuous.running})
        timed([items])  # warm
        timings = timed([items] * self.rounds)
        return report(f"{len(items)} concurrent, greedy", timings, CONCURRENT_GOALS)

    def outside(self) -> dict[str, float]:
        """Return the share of `LLM.generate`'s time outside model forwards: scheduling, sampling, and the rest."""
        items = self.work.concurrent
        shares = {}
        for side, engine in ((ON, self.on), (OFF, self.off)):
            shares[f"batch 1, {side}"] = median_outside(engine, [[item] for item in self.work.single])
            shares[f"{len(items)} concurrent, {side}"] = median_outside(engine, [items] * self.rounds)
        print_outside(shares)
        return shares


def median_outside(engine: DemoEngine, batches: Sequence[Sequence[Item]]) -> float:
    return float(np.median([share_outside(partial(engine.all, batch)) for batch in batches]))


def report(title: str, timings: measure.Timings, goals: Sequence[Goal]) -> dict[str, Any]:
    """Print a table, and return the same as JSON values."""
    print(f"\n{title}: {len(timings.tokens_B)} blocks")
    speeds = {side: timings.tokens_per_second(side) for side in timings.seconds}
    for side, speed in speeds.items():
        print(f"  {side:<36} {speed:9.1f} tokens/s (median)")
    ratios = []
    for goal in goals:
        ratio = timings.speedup(goal.side, goal.over)
        print(f"  {goal.side + ' / ' + goal.over:<52} {ratio!s:<24} wanted >= {goal.at_least}")
        ratios.append({**asdict(goal), **asdict(ratio)})
    return {
        "title": title,
        "tokens_per_second": speeds,
        "ratios": ratios,
        "seconds": {side: values.tolist() for side, values in timings.seconds.items()},
        "tokens": timings.tokens_B.tolist(),
    }


def print_outside(shares: dict[str, float]) -> None:
    print("\nShare of the time outside model forwards (median)")
    for name, share in shares.items():
        print(f"  {name:<36} {share:9.1%}   wanted <= {OUTSIDE_AT_MOST:.0%}")


def arguments() -> argparse.Namespace:
    parser = measure.arguments(__doc__)
    parser.add_argument("--only", choices=("single", "concurrent", "outside_forward"), help="measure one part")
    parser.add_argument("--repeat", type=measure.COUNT, default=1, help="times that each batch-1 prompt is measured")
    parser.add_argument(
        "--rounds", type=measure.COUNT, default=8, help="times that the concurrent requests are measured"
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    bench = Bench(args)
    parts: dict[str, Callable[[], Any]] = {
        "single": lambda: {name: bench.single(name, sampling) for name, sampling in bench.work.sampling.items()},
        "concurrent": bench.concurrent,
        "outside_forward": bench.outside,
    }
    figures: dict[str, Any] = {
        "environment": measure.environment(args.threads),
        "num_speculative_tokens": args.num_speculative_tokens,
    }
    for name, part in parts.items():
        if args.only in (None, name):
            figures[name] = part()
    measure.write(args.output, figures)


if __name__ == "__main__":
    main()
