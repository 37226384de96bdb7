"""The adaptive policy against no speculation, and against every fixed K: methods x texts x temperatures x batch sizes.

    python -m benchmarks.policies [--only "suffix;draft_model"] [--fixed] [--blocks 6] [--output figures.json]

All sides run in one process, in slices of some 0.1 s that take turns, each block on other prompts. A block has
several times as many requests as run at once, so that a request that ends makes room for another: otherwise a block
would end with its slowest request alone, and what others gain by drafts would be lost. Answers differ in length: were
all of one length, plain decoding alone would end them together, and read the prompts that follow in one large step.

The figures are ratios of the time of all blocks, with bootstrap 95 % intervals: how many times faster the adaptive
policy is than plain decoding, and than the best of the fixed K. The first blocks, of some 1,000 tokens, are not
counted: in them the policy learns what rounds cost. The texts: the demo's held-out prompts; another
language, of which the demo models saw nothing (Python's own C headers); random tokens; "mixed", of which every other
request is a demo prompt, and the others are random tokens that go on at random. "random draft" is a draft model with
random weights. Plain decoding is the mean of two engines: equal ones in one process differ by 1 to 4 %, by where their
weights lie in memory. "control" is one more. With `--engines 3` the blocks are shared by three groups of engines, which
are built one after the other.

`--fixed` adds engines with a fixed K, 0 among them, which is plain decoding, to the same blocks. The best K is chosen
by every other block, and compared in the blocks between: chosen by the same blocks, it would have the luck of the draw.

Of some hundred cells a few are low by chance. `--again figures.json` measures those of an earlier run anew whose ratio
is below 0.97: each method alone beside plain decoding, with `--blocks` of this run.
"""

import argparse
import itertools
import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.proposers import build_store, proposers
from benchmarks.shared import measure
from benchmarks.shared.measure import Timings
from benchmarks.shared.sides import GREEDY, DemoEngine
from benchmarks.shared.texts import random_draft, requests
from benchmarks.shared.workload import Item, SamplingSettings
from demo import pair

Config = dict[str, Any]
Blocks = Sequence[list[Item]]
Drafted = Counter[str]
"""Draft tokens by method."""
PLAIN, CONTROL, BEST = "plain", "control", "best"
PLAINS = (PLAIN, "plain 2")
SLICE_STEPS = {1: 32, 8: 16, 32: 8}
"""Steps of plain decoding in a slice of a block, by batch size: about 0.1 s. With 8 steps of one request, drafts are
3 % slower, since caches are cold more often."""
TEMPERATURES = (0.0, 1.0)
WAVES = {1: 1, 8: 3, 32: 2}
"""Requests of a block for each that runs at once, by batch size."""
TOKENS = {1: 128, 8: 64, 32: 48}
"""Tokens of a request on average, by batch size."""
WARM_BLOCKS = {1: 8, 8: 2, 32: 2}
"""First blocks, which are not counted, by batch size: some 1,000 tokens, in which the policy learns costs and text."""
TOGETHER = 6
"""Methods that are compared with the same engines without speculation, unless each is compared with fixed K, too."""
FIXED = [0, 1, 2, 3, 5, 8]
LEAST = 0.97
"""Of plain decoding, that a cell should have."""


@dataclass(frozen=True)
class PolicyCell:
    """One method on one text, at one temperature and batch size."""

    method: str
    text: str
    temperature: float
    batch: int


@dataclass(frozen=True)
class PolicyRow:
    """What was measured in a cell: speed-ups over plain decoding, and over the best fixed K."""

    cell: PolicyCell
    over_plain: measure.Ratio
    best_k: int | None
    over_best: measure.Ratio | None
    draft_tokens_per_row: float

    def __str__(self) -> str:
        best = f"{self.over_best} (K = {self.best_k})" if self.over_best else ""
        cell = self.cell
        return (
            f"| {cell.method} | {cell.text} | {cell.temperature:g} | {cell.batch} | {self.over_plain} | {best} | "
            f"{self.draft_tokens_per_row:.2f} |"
        )


TITLE = (
    "| method | text | temperature | batch | adaptive / plain | adaptive / best fixed K | draft tokens per token |\n"
    "|---|---|---|---|---|---|---|"
)


def batches(items: list[Item], size: int, count: int) -> list[list[Item]]:
    """Return the requests of *count* blocks; prompts come round again where there are not enough."""
    many = WAVES[size] * size
    rng = random.Random(0)

    def request(index: int) -> Item:
        item = items[index % len(items)]
        return item.varied(rng) if size > 1 else item

    return [[request(block * many + i) for i in range(many)] for block in range(count)]


def engine(target: Path, speculative_config: Config | None, batch: int, args: argparse.Namespace) -> DemoEngine:
    """Return an engine for the demo target that runs *batch* requests at once."""
    return DemoEngine(target, speculative_config, threads=args.threads, enforce_eager=args.eager, max_num_seqs=batch)


@dataclass(frozen=True)
class EngineGroup:
    """Engines that take turns: some for plain decoding, and for each method one with the adaptive policy.

    Attributes:
        sides: all engines by name.
        fixed: by method, the names of its engines with a fixed K.
    """

    sides: Mapping[str, DemoEngine]
    fixed: Mapping[str, Mapping[int, str]]

    @staticmethod
    def of(target: Path, methods: Mapping[str, Config], batch: int, args: argparse.Namespace) -> "EngineGroup":
        """Build engines that run *batch* requests at once; *methods* are configurations, that of the control empty."""
        configs: dict[str, Config | None] = dict.fromkeys(PLAINS)
        fixed: dict[str, dict[int, str]] = {}
        for name, config in methods.items():
            most = config.get("num_speculative_tokens", 0)
            fixed[name] = {k: f"{name}, K = {k}" if k else PLAIN for k in args.fixed if k <= most}
            configs[name] = config | {"policy": "adaptive"} if config else None
            configs |= {
                side: config | {"policy": "fixed", "num_speculative_tokens": k} for k, side in fixed[name].items() if k
            }
        return EngineGroup({name: engine(target, each, batch, args) for name, each in configs.items()}, fixed)

    def read(self, items: list[Item]) -> None:
        """Let an engine with a fixed K of each method, if there is one, read the prompts of *items*.

        The first engine that reads one of some length prepares kernels which others of the process then find: 3 ms for
        the demo draft. The adaptive policy would learn from such short answers.
        """
        for sides in self.fixed.values():
            for item in items if sides else ():
                self.sides[sides[max(sides)]].one(replace(item, max_tokens=2), GREEDY)

    def measured(self, temperature: float, warm: Blocks, blocks: Blocks, slice_tokens: int) -> tuple[Timings, Drafted]:
        """Return the timings of all sides, and how many draft tokens each method had; *warm* is not counted."""
        sampling = SamplingSettings(temperature)
        runs = {name: partial(each.stream, sampling=sampling) for name, each in self.sides.items()}
        measure.alternate_slices(runs, warm, slice_tokens)
        before = self._num_drafted()
        timings = _with_mean(measure.alternate_slices(runs, blocks, slice_tokens))
        return timings, self._num_drafted() - before

    def _num_drafted(self) -> Drafted:
        return Counter({name: self.sides[name].llm.stats().proposed for name in self.fixed})

    def shutdown(self) -> None:
        """Shut all engines down."""
        for each in self.sides.values():
            each.llm.shutdown()


def _with_mean(timings: Timings) -> Timings:
    """Return *timings* with the mean of all engines without speculation as those of one."""
    plain_B = np.mean([timings.seconds[name] for name in PLAINS], axis=0)
    return replace(timings, seconds={**timings.seconds, PLAIN: plain_B})


def _row(cell: PolicyCell, timings: Timings, fixed: Mapping[int, str], num_drafted: int) -> PolicyRow:
    over_plain, drafted = timings.speedup(cell.method, PLAIN), num_drafted / timings.tokens_B.sum()
    if not fixed:
        return PolicyRow(cell, over_plain, None, None, drafted)
    seconds_KB = np.stack([timings.seconds[side] for side in fixed.values()])
    best_s_B = np.empty_like(timings.tokens_B)
    for half in (0, 1):
        best_s_B[half::2] = seconds_KB[seconds_KB[:, 1 - half :: 2].sum(axis=1).argmin(), half::2]
    best = list(fixed)[int(seconds_KB.sum(axis=1).argmin())]
    with_best = replace(timings, seconds={**timings.seconds, BEST: best_s_B})
    return PolicyRow(cell, over_plain, best, with_best.speedup(cell.method, BEST), drafted)


def rows(methods: Mapping[str, Config], batch: int, args: argparse.Namespace) -> Iterator[PolicyRow]:
    """Yield the rows of *methods*, whose engines take turns."""
    target = args.model or pair()[0]
    for text, items in requests(target, TOKENS[batch]).items():
        if args.texts and text not in args.texts:
            continue
        yield from text_rows(text, items, partial(EngineGroup.of, target, methods, batch, args), batch, args)


def text_rows(
    text: str, items: list[Item], engine_group: Callable[[], EngineGroup], batch: int, args: argparse.Namespace
) -> Iterator[PolicyRow]:
    """Yield the rows of one text, of several groups of engines one after the other, each with its part of the blocks.

    Some methods draft from past answers, so no group knows another text's.
    """
    num_warm, slice_tokens = WARM_BLOCKS[batch], SLICE_STEPS[batch] * batch
    work = batches(items, batch, num_warm + args.blocks)
    warm, blocks = work[:num_warm], work[num_warm:]
    found: dict[float, list[tuple[Timings, Drafted]]] = {temperature: [] for temperature in args.temperatures}
    for part in range(args.engines):
        group = engine_group()
        group.read(items[: sum(map(len, work))])
        for temperature, parts in found.items():
            parts.append(group.measured(temperature, warm, blocks[part :: args.engines], slice_tokens))
        group.shutdown()
    for temperature, parts in found.items():
        timings, drafted = measure.joined([each for each, _ in parts]), sum((each for _, each in parts), Counter())
        for name, fixed in group.fixed.items():
            yield _row(PolicyCell(name, text, temperature, batch), timings, fixed, drafted[name])


def all_rows(methods: Mapping[str, Config], args: argparse.Namespace) -> Iterator[PolicyRow]:
    """Yield the rows of *methods* at all batch sizes."""
    for batch, some in itertools.product(args.batches, groups(methods, 1 if args.fixed else TOGETHER)):
        yield from rows(some, batch, args)


def rows_again(methods: Mapping[str, Config], figures: Path, args: argparse.Namespace) -> Iterator[PolicyRow]:
    """Yield the rows of the methods and texts of which *figures* have a cell that is low."""
    found = json.loads(figures.read_text())["rows"]
    low = [row["cell"] for row in found if row["over_plain"]["value"] < LEAST]
    for method, text, batch in dict.fromkeys((cell["method"], cell["text"], cell["batch"]) for cell in low):
        if method in methods:
            options = argparse.Namespace(**{**vars(args), "texts": [text]})
            yield from rows({method: methods[method]}, batch, options)


def groups(methods: Mapping[str, Config], size: int) -> Iterator[dict[str, Config]]:
    """Yield *methods*, *size* together."""
    names = iter(methods)
    while some := list(itertools.islice(names, size)):
        yield {name: methods[name] for name in some}


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--only", help="names of methods, separated by semicolons")
    parser.add_argument("--texts", nargs="*", help="only these texts")
    parser.add_argument("--batches", nargs="*", type=measure.COUNT, default=list(TOKENS))
    parser.add_argument("--temperatures", nargs="*", type=float, default=list(TEMPERATURES))
    parser.add_argument(
        "--fixed",
        nargs="*",
        type=int,
        help=f"fixed K to compare with, up to the method's own; without values: {FIXED}",
    )
    parser.add_argument("--blocks", type=measure.at_least(2), default=6, help="at least 2")
    parser.add_argument("--engines", type=measure.COUNT, default=1, help="groups of engines, which share the blocks")
    parser.add_argument("--again", type=Path, help="figures of an earlier run, whose low cells are measured again")
    parser.add_argument("--eager", action="store_true", help="compile no model")
    args = parser.parse_args()
    args.fixed = [] if args.fixed is None else args.fixed or FIXED
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        target, draft = args.model or pair()[0], args.draft or pair()[1]
        store = Path(folder) / "store"
        methods = proposers(draft, store)
        methods["random draft"] = methods["draft_model"] | {"model": str(random_draft(Path(folder) / "random"))}
        methods[CONTROL] = {}
        if args.only:
            methods = {name.strip(): methods[name.strip()] for name in args.only.split(";")}
        if "rest" in methods:
            build_store(target, store)
        found: list[PolicyRow] = []
        print(TITLE)
        for row in rows_again(methods, args.again, args) if args.again else all_rows(methods, args):
            print(row, flush=True)
            found.append(row)
    figures = {"environment": measure.environment(args.threads), "rows": [asdict(row) for row in found]}
    measure.write(args.output, figures)
