"""Early stop: the demo pair with drafts of up to 8 tokens that end by the draft's confidence, or do not.

    python -m benchmarks.early_stop [--limit 4] [--rounds 3] [--thresholds 0.2 0.4 auto] [--output figures.json]

Batch 1, greedy and sampled. The engines take turns, prompt by prompt, so noise affects all alike: with drafts of the
whole length, with thresholds, and with one that is learnt ("auto"). The speed-up is over the first. All write the same
text. "Saved" is how much fewer draft tokens that took than with the whole length, "lost" how much fewer were accepted.
All but the speed-up, and what "auto" learns of costs, are counts, which do not depend on what else the machine does.
"""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.shared import measure, workload
from benchmarks.shared.sides import DemoEngine
from benchmarks.shared.workload import SamplingSettings, Workload
from demo import pair
from protos.stats import EngineStats

LONGEST = 8
WHOLE, AUTO = "whole", "auto"


@dataclass(frozen=True)
class EarlyStopRow:
    """One threshold with one way of sampling."""

    sampling: str
    threshold: str
    drafted_a_step: float
    tokens_a_step: float
    saved: float
    lost: float
    speedup: measure.Ratio

    def __str__(self) -> str:
        counts = f"{self.drafted_a_step:.2f} | {self.tokens_a_step:.2f} | {self.saved:.0%} | {self.lost:.0%}"
        return f"| {self.sampling} | {self.threshold} | {counts} | {self.speedup} |"


TITLE = (
    "| sampling | threshold | drafted per step | tokens per step | draft tokens saved | accepted lost | speed-up |\n"
    "|---|---|---|---|---|---|---|"
)


def started(threshold: str, args: argparse.Namespace) -> DemoEngine:
    """Return an engine that drafts up to `LONGEST` tokens, and stops by *threshold*."""
    config: dict[str, Any] = {"model": str(pair()[1]), "num_speculative_tokens": LONGEST, "policy": "fixed"}
    if threshold != WHOLE:
        config["assistant_confidence_threshold"] = threshold
    return DemoEngine(pair()[0], config, threads=args.threads, enforce_eager=args.eager)


def rows(
    engines: Mapping[str, DemoEngine], kind: str, sampling: SamplingSettings, work: Workload, rounds: int
) -> Iterator[EarlyStopRow]:
    """Measure all thresholds with one way of sampling."""
    sides = {name: partial(engine.one, sampling=sampling) for name, engine in engines.items()}
    for side in sides.values():
        side(work.single[0])
    before = {name: engine.llm.stats() for name, engine in engines.items()}
    timings = measure.alternate(sides, [*work.single] * rounds)
    counts = {name: _grown(before[name], engine.llm.stats()) for name, engine in engines.items()}
    _, all_drafted, all_accepted = counts[WHOLE]
    for name, (steps, drafted, accepted) in counts.items():
        yield EarlyStopRow(
            kind,
            name,
            drafted / steps,
            1 + accepted / steps,
            1 - drafted / all_drafted,
            1 - accepted / all_accepted,
            timings.speedup(name, WHOLE),
        )


def _grown(before: EngineStats, after: EngineStats) -> tuple[int, int, int]:
    """Return steps with drafts, draft tokens and accepted ones since *before*."""
    return (
        after.drafting_rounds - before.drafting_rounds,
        after.proposed - before.proposed,
        after.accepted - before.accepted,
    )


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--rounds", type=measure.COUNT, default=3, help="how often every prompt is answered")
    parser.add_argument("--thresholds", nargs="*", default=["0.2", AUTO])
    parser.add_argument("--eager", action="store_true", help="compile no model: enough for the counts")
    parser.set_defaults(limit=4)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    work = workload.load(pair()[0], args.limit)
    engines = {name: started(name, args) for name in (WHOLE, *args.thresholds)}
    found = []
    print(TITLE)
    for kind, sampling in work.sampling.items():
        for row in rows(engines, kind, sampling, work, args.rounds):
            print(row, flush=True)
            found.append(row)
    measure.write(
        args.output, {"environment": measure.environment(args.threads), "lines": [asdict(line) for line in found]}
    )


if __name__ == "__main__":
    main()
