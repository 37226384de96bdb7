"""The adaptive policy against no speculation, and against every fixed K: methods x texts x temperatures x batch sizes.

    python -m benchmarks.policies [--only "suffix;draft_model"] [--fixed 1 2 4] [--blocks 6] [--output figures.json]

All sides run in one process, block by block in turns, each block on other prompts. A block has several times as many
requests as run at once, so that a request that ends makes room for another: otherwise a block would end with its
slowest request alone, and what others gain by drafts would be lost. The figures are ratios of the time
of all blocks, with bootstrap 95 % intervals: how many times faster the adaptive policy is than plain decoding, and than
the best of the fixed K. The texts: the demo's held-out prompts; another language, of which the demo models saw nothing
(Python's own C headers); random tokens. "random draft" is a draft model with random weights.
"""

import argparse
import itertools
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.proposers import build_store, proposers
from benchmarks.shared import measure, workload
from benchmarks.shared.sides import DemoEngine
from benchmarks.shared.workload import Item, SamplingSettings
from demo import pair
from demo.train import new_draft

Config = dict[str, Any]
PLAIN, ADAPTIVE = "plain", "adaptive"
TEMPERATURES = (0.0, 1.0)
WAVES = {1: 1, 8: 4, 32: 3}
"""Requests of a block for each that runs at once, by batch size."""
TOKENS = {1: 128, 8: 64, 32: 48}
"""Tokens of each request, by batch size."""
PROMPT_TOKENS, WARM_BLOCKS, SEED = 48, 2, 0


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


def random_draft(folder: Path) -> Path:
    """Write a draft of the demo's shape with random weights, and its tokenizer, into *folder*."""
    torch.manual_seed(SEED)
    model = new_draft(pair()[0])
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((pair()[1] / name).read_bytes())
    return folder


def texts(target: Path) -> dict[str, list[tuple[int, ...]]]:
    """Return the prompts of each text, as ids."""
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    headers = sorted(Path(sysconfig.get_path("include")).rglob("*.h"))
    encoded = tokenizer.encode_batch([path.read_text(errors="replace") for path in headers], add_special_tokens=False)
    generator = torch.Generator().manual_seed(SEED)
    random = torch.randint(tokenizer.get_vocab_size(), (128, PROMPT_TOKENS), generator=generator).tolist()
    work = workload.load(target)
    return {
        "demo prompts": [item.prompt for item in (*work.single, *work.concurrent)],
        "C headers": [tuple(one.ids[:PROMPT_TOKENS]) for one in encoded if len(one.ids) >= PROMPT_TOKENS],
        "random tokens": [tuple(row) for row in random],
    }


def batches(prompts: list[tuple[int, ...]], size: int, count: int) -> list[list[Item]]:
    """Return the requests of *count* blocks; prompts come round again where there are not enough."""
    many = WAVES[size] * size
    return [
        [Item(prompts[(block * many + i) % len(prompts)], TOKENS[size]) for i in range(many)] for block in range(count)
    ]


def engine(target: Path, speculative_config: Config | None, batch: int, args: argparse.Namespace) -> DemoEngine:
    """Return an engine for the demo target that runs *batch* requests at once."""
    return DemoEngine(target, speculative_config, threads=args.threads, enforce_eager=args.eager, max_num_seqs=batch)


def measured(
    cell: PolicyCell, sides: Mapping[str, DemoEngine], prompts: list[tuple[int, ...]], blocks: int
) -> PolicyRow:
    """Measure *cell*; the first blocks warm up every side and are not counted."""
    sampling = SamplingSettings(cell.temperature)
    runs = {name: partial(engine.all, sampling=sampling) for name, engine in sides.items()}
    work = batches(prompts, cell.batch, blocks + WARM_BLOCKS)
    measure.alternate(runs, work[:WARM_BLOCKS])
    before = sides[ADAPTIVE].llm.stats()
    timings = measure.alternate(runs, work[WARM_BLOCKS:])
    drafted = sides[ADAPTIVE].llm.stats().proposed - before.proposed
    fixed = [name for name in sides if name not in (PLAIN, ADAPTIVE)]
    best = min(fixed, key=lambda name: timings.seconds[name].sum(), default=None)
    return PolicyRow(
        cell,
        timings.speedup(ADAPTIVE, PLAIN),
        None if best is None else int(best),
        None if best is None else timings.speedup(ADAPTIVE, best),
        drafted / timings.tokens_B.sum(),
    )


def rows(method: str, config: Config, batch: int, args: argparse.Namespace) -> Iterator[PolicyRow]:
    """Yield the rows of one method. Each text starts with new engines, since some methods draft from past answers."""
    target = args.model or pair()[0]
    configs = {PLAIN: None, ADAPTIVE: config | {"policy": "adaptive"}} | {
        str(k): config | {"policy": "fixed", "num_speculative_tokens": k} for k in args.fixed
    }
    for text, prompts in texts(target).items():
        if args.texts and text not in args.texts:
            continue
        sides = {name: engine(target, each, batch, args) for name, each in configs.items()}
        for temperature in TEMPERATURES:
            yield measured(PolicyCell(method, text, temperature, batch), sides, prompts, args.blocks)
        for each in sides.values():
            each.llm.shutdown()


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--only", help="names of methods, separated by semicolons")
    parser.add_argument("--texts", nargs="*", help="only these texts")
    parser.add_argument("--batches", nargs="*", type=int, default=list(TOKENS))
    parser.add_argument("--fixed", nargs="*", type=int, default=[], help="fixed K to compare with")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--eager", action="store_true", help="compile no model")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        target, draft = args.model or pair()[0], args.draft or pair()[1]
        store = Path(folder) / "store"
        methods = proposers(draft, store)
        methods["random draft"] = methods["draft_model"] | {"model": str(random_draft(Path(folder) / "random"))}
        if args.only:
            methods = {name.strip(): methods[name.strip()] for name in args.only.split(";")}
        if "rest" in methods:
            build_store(target, store)
        found: list[PolicyRow] = []
        print(TITLE)
        for name, batch in itertools.product(methods, args.batches):
            for row in rows(name, methods[name], batch, args):
                print(row, flush=True)
                found.append(row)
    figures = {"environment": measure.environment(args.threads), "rows": [asdict(row) for row in found]}
    measure.write(args.output, figures)


if __name__ == "__main__":
    main()
