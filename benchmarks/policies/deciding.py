"""What the adaptive policy itself takes: its share of the time of steps, by method and batch size.

    python -m benchmarks.policies.deciding [--batches 1 8 64] [--only "draft_model;ngram"] [--output figures.json]

Counted are deciding how many draft tokens there are, and learning acceptance and costs: all that the controller calls
of the policy before and after a step. Both are spread over steps so that they take a small share of the time, which is
what this checks. The temperature is 1.
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.proposers import proposers
from benchmarks.shared import measure
from benchmarks.shared.sides import DemoEngine
from benchmarks.shared.texts import DEMO, requests
from benchmarks.shared.workload import SamplingSettings
from demo import pair
from runtime.policy.adaptive import AdaptivePolicy

NUM_TOKENS, WAVES = 64, 8
METHODS = "draft_model;ngram"
TITLE = "| method | batch | a step, ms | policy, us | share | speculation on |\n|---|---|---|---|---|---|"


@dataclass(frozen=True)
class DecidingRow:
    """One method at one batch size: seconds of a step on average, those of the policy, and steps with draft tokens."""

    method: str
    batch: int
    step_s: float
    policy_s: float
    drafting_share: float

    def __str__(self) -> str:
        times = f"{1e3 * self.step_s:.2f} | {1e6 * self.policy_s:.0f} | {self.policy_s / self.step_s:.2%}"
        return f"| {self.method} | {self.batch} | {times} | {self.drafting_share:.0%} of steps |"


class PolicyClock:
    """Seconds spent in the policy, and the number of steps with draft tokens asked for."""

    def __init__(self) -> None:
        self.seconds, self.num_drafting = 0.0, 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count until the block ends."""
        begin, end = AdaptivePolicy.begin_step, AdaptivePolicy.end_step

        def timed_begin(policy: AdaptivePolicy, *args: Any) -> None:
            began = time.perf_counter()
            begin(policy, *args)
            self.seconds += time.perf_counter() - began
            self.num_drafting += policy.current > 0

        def timed_end(policy: AdaptivePolicy, *args: Any) -> None:
            began = time.perf_counter()
            end(policy, *args)
            self.seconds += time.perf_counter() - began

        with patch.multiple(AdaptivePolicy, begin_step=timed_begin, end_step=timed_end):
            yield


def measured(method: str, config: dict[str, Any], batch: int, args: argparse.Namespace) -> DecidingRow:
    """Run the demo prompts with *batch* requests at once, twice: first to warm up."""
    target = args.model or pair()[0]
    items = requests(target, NUM_TOKENS)[DEMO]
    work = [items[index % len(items)] for index in range(WAVES * batch)]
    engine = DemoEngine(target, config | {"policy": "adaptive"}, threads=args.threads, max_num_seqs=batch)
    engine.all(work, SamplingSettings(1.0))
    before, clock = engine.llm.stats(), PolicyClock()
    with clock.running():
        engine.all(work, SamplingSettings(1.0))
    after = engine.llm.stats()
    engine.llm.shutdown()
    steps = after.steps - before.steps
    step_s = (after.steps_s - before.steps_s) / steps
    return DecidingRow(method, batch, step_s, clock.seconds / steps, clock.num_drafting / steps)


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--batches", nargs="*", type=measure.COUNT, default=[1, 8, 64])
    parser.add_argument("--only", default=METHODS, help="names of methods, separated by semicolons")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        methods = proposers(args.draft or pair()[1], Path(folder))
        print(TITLE)
        found = []
        for name, batch in itertools.product(args.only.split(";"), args.batches):
            found.append(measured(name.strip(), methods[name.strip()], batch, args))
            print(found[-1], flush=True)
    figures = {"environment": measure.environment(args.threads), "rows": [asdict(row) for row in found]}
    measure.write(args.output, figures)


if __name__ == "__main__":
    main()
