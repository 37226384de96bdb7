"""Early stop: the demo pair with drafts of up to 8 tokens that end by the draft's confidence, or do not.

    python -m benchmarks.early_stop [--limit 4] [--output figures.json]

Batch 1, greedy and sampled. Three engines take turns, prompt by prompt, so noise affects all alike: with drafts of the
whole length, with a threshold, and with one that is learnt ("auto"). The speed-up is over the first.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.shared import measure, workload
from benchmarks.shared.sides import DemoEngine
from benchmarks.shared.workload import SamplingSettings, Workload
from demo import pair

LONGEST = 8
THRESHOLDS: Mapping[str, float | str | None] = {"whole": None, "0.2": 0.2, "auto": "auto"}
ROUNDS = 3


@dataclass(frozen=True)
class EarlyStopRow:
    """One threshold with one way of sampling."""

    sampling: str
    threshold: str
    drafted_a_step: float
    accepted_a_step: float
    speedup: measure.Ratio

    def __str__(self) -> str:
        counts = f"{self.drafted_a_step:.2f} | {self.accepted_a_step:.2f}"
        return f"| {self.sampling} | {self.threshold} | {counts} | {self.speedup} |"


TITLE = "| sampling | threshold | drafted per step | accepted per step | speed-up |\n|---|---|---|---|---|"


def started(threshold: float | str | None, threads: int) -> DemoEngine:
    """Return an engine that drafts up to `LONGEST` tokens."""
    config: dict[str, Any] = {"model": str(pair()[1]), "num_speculative_tokens": LONGEST, "policy": "fixed"}
    if threshold is not None:
        config["assistant_confidence_threshold"] = threshold
    return DemoEngine(pair()[0], config, threads=threads)


def rows(
    engines: Mapping[str, DemoEngine], kind: str, sampling: SamplingSettings, work: Workload
) -> Iterator[EarlyStopRow]:
    """Measure all thresholds with one way of sampling."""
    sides = {name: partial(engine.one, sampling=sampling) for name, engine in engines.items()}
    for side in sides.values():
        side(work.single[0])
    before = {name: engine.llm.stats() for name, engine in engines.items()}
    timings = measure.alternate(sides, [*work.single] * ROUNDS)
    for name, engine in engines.items():
        first, last = before[name], engine.llm.stats()
        steps = last.drafting_rounds - first.drafting_rounds
        counts = ((last.proposed - first.proposed) / steps, (last.accepted - first.accepted) / steps)
        yield EarlyStopRow(kind, name, *counts, timings.speedup(name, "whole"))


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.set_defaults(limit=4)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    work = workload.load(pair()[0], args.limit)
    engines = {name: started(threshold, args.threads) for name, threshold in THRESHOLDS.items()}
    found = []
    print(TITLE)
    for kind, sampling in work.sampling.items():
        for row in rows(engines, kind, sampling, work):
            print(row, flush=True)
            found.append(row)
    measure.write(
        args.output, {"environment": measure.environment(args.threads), "lines": [asdict(line) for line in found]}
    )


if __name__ == "__main__":
    main()
