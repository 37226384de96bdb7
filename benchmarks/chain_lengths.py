"""Chains of different lengths, drafted by the demo's heads: which length is fastest on this machine.

    python -m benchmarks.chain_lengths [--limit 6] [--only "eagle;eagle3"] [--output figures.json]

Batch 1, greedy and sampled. One engine per head drafts up to 0, 1, 2 ... tokens by turns, prompt by prompt, so noise
affects all lengths alike; 0 is the same engine without speculation. `protos/config/default_shape.py` has the lengths
that are chosen where a configuration states none.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from unittest.mock import patch

import torch

from benchmarks.shared import measure, workload
from benchmarks.shared.sides import DemoEngine
from benchmarks.shared.workload import Item, SamplingSettings
from demo import head, pair
from runtime.core.sequence import Sequence as EngineSequence
from runtime.policy.batch_size import BatchSizePolicy

METHODS = ("eagle", "eagle3", "recurrent")
LONGEST = 5
ROUNDS = 3
OFF = "0"


@dataclass(frozen=True)
class LengthRow:
    """One length of the chains of one head."""

    method: str
    sampling: str
    length: int
    speedup: measure.Ratio
    tokens_a_step: float

    def __str__(self) -> str:
        return f"| {self.method} | {self.sampling} | {self.length} | {self.tokens_a_step:.2f} | {self.speedup} |"


TITLE = "| method | sampling | draft tokens | tokens per step | speed-up |\n|---|---|---|---|---|"


class LimitedEngine:
    """An engine whose drafts can be shortened between requests; counts the steps of each length."""

    def __init__(self, method: str, threads: int) -> None:
        config = {
            "method": method,
            "model": str(head(method)),
            "num_speculative_tokens": LONGEST,
            "policy": "fixed",
            "draft_shape": "chain",
        }
        self._engine = DemoEngine(pair()[0], config, threads=threads)
        self.steps = [0] * (LONGEST + 1)

    def run(self, length: int, sampling: SamplingSettings) -> Callable[[Item], int]:
        """Return what runs a request with at most *length* draft tokens a step; it returns the number of tokens."""
        unlimited = BatchSizePolicy.num_draft_tokens

        def limited(policy: BatchSizePolicy, sequence: EngineSequence, source: int | None = None) -> int:
            return min(length, unlimited(policy, sequence, source))

        def one(item: Item) -> int:
            before = self._engine.llm.stats().steps
            with patch.object(BatchSizePolicy, "num_draft_tokens", limited):
                tokens = self._engine.one(item, sampling)
            self.steps[length] += self._engine.llm.stats().steps - before
            return tokens

        return one

    def rows(self, method: str, kind: str, sampling: SamplingSettings, items: Sequence[Item]) -> Iterator[LengthRow]:
        """Measure all lengths with one way of sampling."""
        sides = {str(length): self.run(length, sampling) for length in range(LONGEST + 1)}
        for side in sides.values():
            side(items[0])
        self.steps = [0] * (LONGEST + 1)
        timings = measure.alternate(sides, [*items] * ROUNDS)
        for length, steps in enumerate(self.steps):
            speedup = timings.speedup(str(length), OFF)
            yield LengthRow(method, kind, length, speedup, float(timings.tokens_B.sum()) / steps)


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--only", help="names of heads, separated by semicolons")
    parser.set_defaults(limit=6)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    work = workload.load(pair()[0], args.limit)
    found = []
    print(TITLE)
    for method in args.only.split(";") if args.only else METHODS:
        engine = LimitedEngine(method.strip(), args.threads)
        for kind, sampling in work.sampling.items():
            for row in engine.rows(method, kind, sampling, work.single):
                print(row, flush=True)
                found.append(row)
    measure.write(
        args.output, {"environment": measure.environment(args.threads), "lines": [asdict(line) for line in found]}
    )


if __name__ == "__main__":
    main()
