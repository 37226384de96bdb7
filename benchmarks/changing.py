"""The adaptive policy while the load and the text change, against no speculation and every fixed K.

    python -m benchmarks.changing [--sizes 1 64 1] [--batch 8] [--waves 4] [--tokens 64] [--fixed 1 2 3] [--blocks 6]

Two scenarios of three phases each. In "load" the text is predictable, and as many requests run at once as `--sizes`
says. In "text" `--batch` requests run at once, and the text is predictable, then random, then predictable again. In a
phase so many requests run `--waves` times, each of `--tokens` tokens.

A block is all phases of a scenario, on one engine that goes on from block to block. All sides run the same blocks in
one process, in slices of some 32 steps that take turns. The figures are ratios of the time of all blocks with bootstrap
95 % intervals, and how often the adaptive policy switched speculation on or off in each phase.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.shared import measure
from benchmarks.shared.sides import DemoEngine
from benchmarks.shared.texts import DEMO, RANDOM, requests, unpredictable
from benchmarks.shared.workload import Item
from demo import pair

ADAPTIVE, OFF = "adaptive", "off"
WARM_BLOCKS, SLICE_STEPS = 1, 32
METHODS: dict[str, dict[str, Any]] = {
    "draft_model": {"model": str(pair()[1])},
    "suffix": {"method": "suffix"},
    "ngram": {"method": "ngram", "prompt_lookup_min": 2},
    "cascade": {"method": ["suffix", "draft_model"], "model": str(pair()[1])},
}


@dataclass(frozen=True)
class ChangingPhase:
    """So many requests at once, and all requests of the phase."""

    size: int
    items: Sequence[Item]


@dataclass(frozen=True)
class ScenarioResult:
    """Of one scenario: how many times faster the adaptive policy is than each side, and its switches in each phase.

    `most_switches` and `mean_switches` are over blocks.
    """

    scenario: str
    over: dict[str, measure.Ratio]
    best_fixed: str
    most_switches: list[int]
    mean_switches: list[float]

    def __str__(self) -> str:
        ratios = " | ".join(str(ratio) for ratio in self.over.values())
        return f"| {self.scenario} | {ratios} | {self.best_fixed} | {self.most_switches} | {self.mean_switches} |"


class ChangingSide:
    """An engine that runs blocks of phases; `switches` has, for each block, the policy's switches in each phase."""

    def __init__(self, engine: DemoEngine) -> None:
        self.engine = engine
        self.switches: list[list[int]] = []

    def block(self, phases: Sequence[ChangingPhase]) -> Iterator[int]:
        """Run the phases one after another; yield the number of tokens of each output."""
        counts = [self._count()]
        for phase in phases:
            for start in range(0, len(phase.items), phase.size):
                yield from self.engine.stream(phase.items[start : start + phase.size])
            counts.append(self._count())
        self.switches.append(np.diff(counts).tolist())

    def _count(self) -> int:
        return sum(self.engine.llm.stats().speculation_changes.values())


def phases_of(scenario: str, block: int, args: argparse.Namespace) -> list[ChangingPhase]:
    """Return the phases of one block. Blocks have other prompts, as far as there are."""
    items = requests(args.model or pair()[0], args.tokens)
    predictable, random = items[DEMO], unpredictable(items[RANDOM])
    if scenario == "load":
        kinds = [(size, predictable) for size in args.sizes]
    else:
        kinds = [(args.batch, predictable), (args.batch, random), (args.batch, predictable)]
    phases, first = [], block
    for size, texts in kinds:
        many = args.waves * size
        phases.append(ChangingPhase(size, [texts[(first + i) % len(texts)] for i in range(many)]))
        first += many
    return phases


def sides(config: dict[str, Any], args: argparse.Namespace) -> dict[str, ChangingSide]:
    """Return the engines that are compared, by name."""
    most = max(*args.sizes, args.batch)
    adaptive = config | {"policy": "adaptive", "num_speculative_tokens": max(args.fixed)}
    configs: dict[str, dict[str, Any] | None] = {ADAPTIVE: adaptive, OFF: None} | {
        f"K = {k}": config | {"policy": "fixed", "num_speculative_tokens": k} for k in args.fixed
    }
    make = partial(DemoEngine, args.model or pair()[0], threads=args.threads, max_num_seqs=most)
    return {name: ChangingSide(make(each, enforce_eager=args.eager)) for name, each in configs.items()}


def measured(scenario: str, config: dict[str, Any], args: argparse.Namespace) -> ScenarioResult:
    """Run a scenario; the first blocks warm up every side and are not counted."""
    engines = sides(config, args)
    runs = {name: side.block for name, side in engines.items()}
    blocks = [phases_of(scenario, block, args) for block in range(WARM_BLOCKS + args.blocks)]
    slice_tokens = SLICE_STEPS * (args.batch if scenario == "text" else int(np.median(args.sizes)))
    measure.alternate_slices(runs, blocks[:WARM_BLOCKS], slice_tokens)
    timings = measure.alternate_slices(runs, blocks[WARM_BLOCKS:], slice_tokens)
    switches = np.array(engines[ADAPTIVE].switches[WARM_BLOCKS:])
    for side in engines.values():
        side.engine.llm.shutdown()
    others = [name for name in runs if name != ADAPTIVE]
    best = min(others, key=lambda name: timings.seconds[name].sum())
    return ScenarioResult(
        scenario,
        {name: timings.speedup(ADAPTIVE, name) for name in others},
        best,
        switches.max(axis=0).tolist(),
        switches.mean(axis=0).round(2).tolist(),
    )


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--method", choices=list(METHODS), default="draft_model")
    parser.add_argument("--scenarios", nargs="+", choices=["load", "text"], default=["load", "text"])
    parser.add_argument("--sizes", nargs=3, type=int, default=[1, 64, 1], help="requests at once in each phase of load")
    parser.add_argument("--batch", type=measure.COUNT, default=8, help="requests at once in the phases of text")
    parser.add_argument(
        "--waves", type=measure.COUNT, default=4, help="requests of a phase, for each that runs at once"
    )
    parser.add_argument("--tokens", type=measure.COUNT, default=64, help="of each request")
    parser.add_argument("--fixed", nargs="+", type=int, default=[1, 2, 3], help="fixed K to compare with")
    parser.add_argument("--blocks", type=measure.COUNT, default=6)
    parser.add_argument("--eager", action="store_true", help="compile no model")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config = METHODS[args.method]
    if args.draft and "model" in config:
        config = config | {"model": str(Path(args.draft))}
    over = " | ".join(f"adaptive / {name}" for name in (OFF, *(f"K = {k}" for k in args.fixed)))
    print(f"| scenario | {over} | fastest of these | most switches a phase | mean |")
    print("|---" * (5 + len(args.fixed)) + "|")
    found = []
    for scenario in args.scenarios:
        found.append(measured(scenario, config, args))
        print(found[-1], flush=True)
    figures = {"environment": measure.environment(args.threads), "rows": [asdict(one) for one in found]}
    measure.write(args.output, figures)


if __name__ == "__main__":
    main()
