"""Whether outputs are the same for all batches, proposers and topologies, with and without `batch_invariant`; its cost.

    python -m benchmarks.invariance --prompts 500 --tokens 256 --share 42 --output figures.json

Prompts are pieces of the held-out files of the standard library; each is continued greedily and with a seed. The
outputs of one process without speculation and prefix cache, in the largest batches, are compared with those of every
proposer, batch size and topology. Each of these computes all prompts, or a share of them (`--share`), the next one each
time. `--turns` selects shares: with 500 prompts and a share of 42, turns 0 to 11 cover all prompts for every
combination, and may be run separately. A second part measures the slow-down. A third checks whether the token after a
text depends on whether the text was generated or given as the prompt.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.shared import measure
from benchmarks.shared.token_engine import GREEDY, RAY, TEMPERATURES, UNI, Config, Ids, TokenEngine, prompts
from demo import head, pair

REFERENCE = "off"
BARCELONA = (
    "I am at KDD conference in Barcelona. After the conference tutorial today I will be presenting a paper on "
    "the topic of “The role of the brain in the development"
)


def proposers(draft: Path) -> dict[str, Config | None]:
    """Return the `speculative_config` of everything that is compared with the reference.

    No draft is compiled, and none is disabled because of its cost: this does not measure speed.
    """
    always: Config = {"enforce_eager": True, "disable_by_batch_size": 64}
    return {
        REFERENCE: None,
        "ngram": {
            "method": "ngram",
            "num_speculative_tokens": 8,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 5,
            **always,
        },
        "draft_model": {"model": str(draft), "num_speculative_tokens": 3, **always},
        "eagle3 tree": {
            "method": "eagle3",
            "model": str(head("eagle3")),
            "num_speculative_tokens": 12,
            "draft_shape": "tree",
            **always,
        },
    }


@dataclass(frozen=True)
class Cell:
    """One way to compute all sequences, against the reference."""

    batch_invariant: bool
    proposer: str
    topology: str
    batch: int
    sampling: str
    first: int
    """Index of the first prompt; prompt 0 follows the last."""
    sequences: int
    differing: int
    proposed: int
    accepted: int

    def __str__(self) -> str:
        mode = "batch_invariant" if self.batch_invariant else "default"
        return (
            f"  {mode:<16} {self.sampling:<7} {self.proposer:<12} {self.topology:<11} batch {self.batch:<3} "
            f"{self.differing:4} of {self.sequences} sequences from prompt {self.first} differ; {self.accepted} of "
            f"{self.proposed} draft tokens accepted"
        )


class Identity:
    """The first part: every proposer, batch size and topology, in one dtype, with or without the mode."""

    def __init__(self, args: argparse.Namespace, *, is_on: bool, count: int) -> None:
        self.args, self.is_on = args, is_on
        self.target, self.draft = args.model or pair()[0], args.draft or pair()[1]
        self.prompts = prompts(self.target, count)
        self.share = min(args.share or count, count)
        self.options: Config = {"dtype": args.dtype, "batch_invariant": is_on}

    def cells(self, topologies: Sequence[str]) -> Iterator[Cell]:
        """Compute the reference, then everything else, one engine after another."""
        expected = self._reference()
        for turn in self.args.turns:
            shares = itertools.count(turn)
            for topology, (name, config) in itertools.product(topologies, proposers(self.draft).items()):
                engine = TokenEngine(self.target, config, topology=topology, threads=self.args.threads, **self.options)
                with engine.llm:
                    yield from self._compared(engine, name, topology, expected, shares)

    def _reference(self) -> dict[str, list[Ids]]:
        engine = TokenEngine(self.target, threads=self.args.threads, enable_prefix_caching=False, **self.options)
        with engine.llm:
            return {
                kind: engine.generate(
                    self.prompts, range(len(self.prompts)), self.args.tokens, kind, max(self.args.batches)
                )
                for kind in TEMPERATURES
            }

    def _compared(
        self, engine: TokenEngine, name: str, topology: str, expected: dict[str, list[Ids]], shares: Iterator[int]
    ) -> Iterator[Cell]:
        for batch in self.args.batches:
            first = self.share * next(shares) % len(self.prompts)
            some = [at % len(self.prompts) for at in range(first, first + self.share)]
            for kind, all_wanted in expected.items():
                before, wanted = engine.llm.stats(), [all_wanted[at] for at in some]
                outputs = engine.generate([self.prompts[at] for at in some], some, self.args.tokens, kind, batch)
                after = engine.llm.stats()
                cell = Cell(
                    self.is_on,
                    name,
                    topology,
                    batch,
                    kind,
                    first,
                    len(outputs),
                    sum(a != b for a, b in zip(outputs, wanted, strict=True)),
                    after.proposed - before.proposed,
                    after.accepted - before.accepted,
                )
                print(cell, flush=True)
                yield cell


def slowdowns(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the ratio of times with and without the mode, speculation off, for batches of 1 and 32."""
    target = args.model or pair()[0]
    found = []
    for dtype in args.timed_dtypes:
        sides = {
            name: TokenEngine(
                target,
                threads=args.threads,
                dtype=dtype,
                batch_invariant=name == "batch_invariant",
                enable_prefix_caching=False,
            )
            for name in ("default", "batch_invariant")
        }
        token_prompts = prompts(target, 32 * args.blocks)
        for batch in (1, 32):
            blocks = [token_prompts[at : at + batch] for at in range(0, batch * args.blocks, batch)]
            runs = {name: _timed(engine, args.timed_tokens, batch) for name, engine in sides.items()}
            for run in runs.values():
                run(blocks[0])  # warm
            timings = measure.alternate(runs, blocks)
            ratio = timings.slowdown("batch_invariant", "default")
            speeds = {name: timings.tokens_per_second(name) for name in sides}
            print(f"  {dtype:<9} batch {batch:<3} time / default's: {ratio}; tokens/s {speeds}", flush=True)
            found.append({"dtype": dtype, "batch": batch, "slowdown": asdict(ratio), "tokens_per_second": speeds})
        for engine in sides.values():
            engine.llm.shutdown()
    return found


def _timed(engine: TokenEngine, tokens: int, batch: int) -> Any:
    def run(block: Sequence[Ids]) -> int:
        return sum(map(len, engine.generate(block, range(len(block)), tokens, GREEDY, batch)))

    return run


def given_or_generated(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Generate the token after a generated text, and again after the same text as the prompt."""
    target = args.model or pair()[0]
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    starts = [tokenizer.encode(BARCELONA, add_special_tokens=False).ids, *prompts(target, args.pairs - 1)]
    found = []
    for dtype in ("float32", "float16", "bfloat16"):
        for is_on in (False, True):
            engine = TokenEngine(
                target,
                threads=args.threads,
                dtype=dtype,
                batch_invariant=is_on,
                enforce_eager=True,
                enable_prefix_caching=False,
            )
            with engine.llm:
                outputs = engine.generate(starts, range(len(starts)), args.pair_tokens, GREEDY, 8)
                texts = [
                    ids + more[:at] for ids, more in zip(starts, outputs, strict=True) for at in range(1, len(more))
                ]
                again = engine.generate(texts, range(len(texts)), 1, GREEDY, 8)
            wanted = [[more[at]] for more in outputs for at in range(1, len(more))]
            differing = sum(a != b for a, b in zip(again, wanted, strict=True))
            line = {"dtype": dtype, "batch_invariant": is_on, "texts": len(texts), "differing": differing}
            print(f"  {line}", flush=True)
            found.append(line)
    return found


def arguments() -> argparse.Namespace:
    parser = measure.arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=16, help="prompts with batch_invariant; 0: none")
    parser.add_argument("--tokens", type=measure.COUNT, default=64)
    parser.add_argument("--share", type=measure.COUNT, help="prompts per combination (default: all)")
    parser.add_argument("--turns", type=int, nargs="+", default=[0], help="which shares each combination computes")
    parser.add_argument("--plain-prompts", type=int, help="prompts without it (default: as many)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batches", type=measure.COUNT, nargs="+", default=[1, 7, 32])
    parser.add_argument("--topologies", nargs="+", choices=(UNI, RAY), default=[UNI, RAY])
    parser.add_argument("--timed-dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--timed-tokens", type=measure.COUNT, default=32)
    parser.add_argument("--blocks", type=measure.COUNT, default=8, help="blocks that are timed")
    parser.add_argument("--pairs", type=int, default=16, help="prompts for the third part")
    parser.add_argument("--pair-tokens", type=measure.COUNT, default=16)
    parser.add_argument("--only", nargs="+", choices=("identity", "slowdown", "pairs"))
    return parser.parse_args()


def main() -> None:
    args = arguments()
    report: dict[str, Any] = {"environment": measure.environment(args.threads)}
    wanted = args.only or ("identity", "slowdown", "pairs")
    if "identity" in wanted:
        print("Sequences that differ from those of one process without speculation")
        cells = [*Identity(args, is_on=True, count=args.prompts).cells(args.topologies)] if args.prompts else []
        plain = args.prompts if args.plain_prompts is None else args.plain_prompts
        if plain:
            cells += Identity(args, is_on=False, count=plain).cells([UNI])
        report["identity"] = [asdict(cell) for cell in cells]
    if "slowdown" in wanted:
        print("The cost")
        report["slowdown"] = slowdowns(args)
    if "pairs" in wanted:
        print("Is the token after a text the same, whether the text was generated or given?")
        report["pairs"] = given_or_generated(args)
    measure.write(args.output, report)


if __name__ == "__main__":
    main()
