"""What `slipstream tune` chooses, against the best of a sweep over all drafts and numbers of draft tokens.

    python -m benchmarks.advice.tuning [--k 1,2,3,5] [--batches 1 8] [--blocks 8] [--eagle3] [--output figures.json]

`slipstream tune` runs as a user runs it. Then the configuration that it wrote, no speculation, and every draft with
every K (policy `fixed`) decode the same requests, block by block in turns, with compiled models. The figure is the
speed of what tune chose by that of the best side: wanted at least 0.97. The prompts are held-out ones that tune did not
see; with several requests at once, answers differ in length: were all of one length, plain decoding alone would end
them together. Where tune chose no speculation, its side is the one without.

Nothing else may run. Memory is needed for as many engines as there are sides.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.advice.predictions import prompts
from benchmarks.shared import measure
from benchmarks.shared.sides import DemoEngine
from benchmarks.shared.workload import Item
from cluster.cli import main as cli
from demo import head, pair

Config = dict[str, Any]
TUNED, PLAIN, GOAL = "tune's choice", "no speculation", 0.97
TOKENS, WAVES = 96, 4
LOOKUPS: dict[str, Config] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix"},
}
"""The drafts that tune always compares."""


@dataclass(frozen=True)
class TuningRow:
    """Tune's choice at one batch size: its K, the best side of the sweep, and the speed relative to that."""

    batch: int
    chosen: str
    best: str
    over_plain: measure.Ratio
    over_best: measure.Ratio

    def __str__(self) -> str:
        verdict = "" if self.over_best.value >= GOAL else " (below the goal)"
        return f"| {self.batch} | {self.chosen} | {self.over_plain} | {self.best} | {self.over_best}{verdict} |"


TITLE = "| batch | tune's choice | over no speculation | best of the sweep | choice / best |\n|---|---|---|---|---|"


def drafts(args: argparse.Namespace) -> dict[str, Config]:
    """Return the drafts that are compared, by name."""
    found: dict[str, Config] = {"draft_model": {"model": str(args.draft or pair()[1])}}
    if args.eagle3:
        found["eagle3"] = {"method": "eagle3", "model": str(head("eagle3")), "draft_shape": "chain"}
    return found


def tune(target: Path, learned: Mapping[str, Config], args: argparse.Namespace) -> Config | None:
    """Run `slipstream tune` and return the configuration that it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "speculative.json"
        options = [word for name, keys in learned.items() for word in ("--draft", json.dumps({"name": name, **keys}))]
        sizes = ["--k", args.k, "--batch-sizes", ",".join(map(str, args.batches)), "--contexts", "64,192"]
        sizes += ["--num-prompts", str(args.tune_prompts), "--num-threads", str(args.threads)]
        sizes += ["--max-num-seqs", str(max(args.batches))]
        sizes += ["--enforce-eager"] if args.eager else []
        words = ["tune", str(target), *options, *sizes, "--output", str(output)]
        cli.app(words, standalone_mode=False)
        found: Config | None = json.loads(output.read_text())
        return found


def sides_of(chosen: Config | None, learned: Mapping[str, Config], ks: Sequence[int]) -> dict[str, Config | None]:
    """Return `speculative_config` of every side."""
    swept: dict[str, Config | None] = {
        f"{name}, K = {k}": {**keys, "num_speculative_tokens": k, "policy": "fixed"}
        for name, keys in {**learned, **LOOKUPS}.items()
        for k in ks
    }
    return {PLAIN: None, **swept} | ({} if chosen is None else {TUNED: chosen})


def chosen_at(batch: int, chosen: Config | None) -> str:
    """Return what the written table has for a batch size."""
    if chosen is None:
        return "do not speculate"
    table = chosen["num_speculative_tokens_per_batch_size"]
    k = next((k for first, last, k in table if first <= batch <= last), 0)
    return f"{chosen.get('method') or Path(chosen['model']).name}, K = {k}"


def rows(chosen: Config | None, learned: Mapping[str, Config], args: argparse.Namespace) -> Iterator[TuningRow]:
    """Measure all sides at each batch size."""
    target = args.model or pair()[0]
    configs = sides_of(chosen, learned, sorted({int(k) for k in args.k.split(",")}))
    for batch in args.batches:
        engines = {
            name: DemoEngine(target, config, threads=args.threads, enforce_eager=args.eager, max_num_seqs=batch)
            for name, config in configs.items()
        }
        size = batch if batch == 1 else batch * WAVES
        drawn = prompts(target, (args.blocks + 1) * size)
        rng = random.Random(batch)
        items = [Item(ids, TOKENS) if batch == 1 else Item(ids, TOKENS).varied(rng) for ids in drawn]
        blocks = [items[i : i + size] for i in range(0, len(items), size)]
        runs = {name: partial(engine.all) for name, engine in engines.items()}
        measure.alternate(runs, blocks[:1])
        timings = measure.alternate(runs, blocks[1:])
        side = PLAIN if chosen is None else TUNED
        best = min((name for name in configs if name != TUNED), key=lambda name: timings.seconds[name].sum())
        found = chosen_at(batch, chosen)
        yield TuningRow(batch, found, best, timings.speedup(side, PLAIN), timings.speedup(side, best))
        for engine in engines.values():
            engine.llm.shutdown()


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--k", default="1,2,3,5", help="numbers of draft tokens")
    parser.add_argument("--batches", nargs="*", type=measure.COUNT, default=[1, 8])
    parser.add_argument("--blocks", type=measure.COUNT, default=8, help="how often every side decodes")
    parser.add_argument("--tune-prompts", type=measure.COUNT, default=16, help="prompts that tune generates answers to")
    parser.add_argument("--eagle3", action="store_true", help="compare the demo's EAGLE-3 head, too")
    parser.add_argument("--eager", action="store_true", help="compile no model")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    learned, target = drafts(args), args.model or pair()[0]
    chosen = tune(target, learned, args)
    found = []
    print(TITLE)
    for row in rows(chosen, learned, args):
        print(row, flush=True)
        found.append(row)
    figures = {"environment": measure.environment(args.threads), "chosen": chosen, "lines": [asdict(r) for r in found]}
    measure.write(args.output, figures)


if __name__ == "__main__":
    main()
