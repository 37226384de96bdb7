"""`batch_invariant`: are sequences the same however they are computed, what happens without it, and what it costs.

    python -m benchmarks.invariance --prompts 500 --tokens 256 --share 42 --output figures.json

Prompts are pieces of the held-out files of the standard library; each is continued greedily and with a seed. What one
process says to them without speculation and prefix cache, in the largest batches, is held against every proposer, batch
size and topology: each of these ways computes all of the prompts, or, with `--share`, so many of them, the ways taking
turns. `--turns` says which: with 500 prompts and a share of 42 the turns 0 to 11 are all prompts in every way, and may
be taken in runs of their own. A second part measures the slow-down, a third asks what `../shared/seeds/003.txt` did:
does the token behind a text depend on whether the text was generated or given?
"""

import argparse
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.shared import measure
from demo import corpus, head, pair
from slipstream import LLM, SamplingParams

Ids = list[int]
Config = dict[str, Any]

FEWEST, MOST = 16, 192
"""Tokens of a prompt."""
GREEDY, SEEDED = "greedy", "seeded"
TEMPERATURES = {GREEDY: 0.0, SEEDED: 1.0}
REFERENCE = "off"
UNI, RAY = "uni", "ray, T = 2"
CACHE_BYTES = 1 << 30
BARCELONA = (
    "I am at KDD conference in Barcelona. After the conference tutorial today I will be presenting a paper on "
    "the topic of “The role of the brain in the development"
)


def proposers(draft: Path) -> dict[str, Config | None]:
    """Return the `speculative_config` of everything that is held against the reference.

    No draft is compiled, and none is given up because of what guesses cost: this is not about speed.
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


def prompts(target: Path, count: int) -> list[Ids]:
    """Return *count* pieces of held-out files, of `FEWEST` to `MOST` tokens, the same in every run."""
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    texts = list(corpus.read(corpus.split(corpus.stdlib_root())[1]))
    files = [encoded.ids for encoded in tokenizer.encode_batch(texts, add_special_tokens=False)]
    files = [ids for ids in files if len(ids) > MOST]
    dice = random.Random(6)
    found = []
    for _ in range(count):
        ids, length = dice.choice(files), dice.randint(FEWEST, MOST)
        start = dice.randrange(len(ids) - length)
        found.append(ids[start : start + length])
    return found


class Engine:
    """An `LLM` on token ids."""

    def __init__(
        self,
        target: Path,
        speculative_config: Config | None = None,
        *,
        topology: str = UNI,
        threads: int = 2,
        **options: Any,
    ) -> None:
        if topology == RAY:
            options |= {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
        self.llm = LLM(
            model=str(target),
            speculative_config=speculative_config,
            kv_cache_memory_bytes=CACHE_BYTES,
            num_threads=1 if topology == RAY else threads,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            device="cpu",
            **options,
        )

    def say(self, asked: Sequence[Ids], seeds: Sequence[int], tokens: int, sampling: str, batch: int) -> list[Ids]:
        """Return the continuations of *asked*, *batch* at a time."""
        said: list[Ids] = []
        for at in range(0, len(asked), batch):
            some = [{"prompt_token_ids": ids} for ids in asked[at : at + batch]]
            params = [
                SamplingParams(
                    temperature=TEMPERATURES[sampling], seed=seed, max_tokens=tokens, ignore_eos=True, detokenize=False
                )
                for seed in seeds[at : at + batch]
            ]
            said += [list(result.outputs[0].token_ids) for result in self.llm.generate(some, params, use_tqdm=False)]
        return said


@dataclass(frozen=True)
class Cell:
    """One way to compute all sequences, against the reference."""

    batch_invariant: bool
    proposer: str
    topology: str
    batch: int
    sampling: str
    first: int
    """The first of the prompts; behind the last comes prompt 0."""
    sequences: int
    differing: int
    proposed: int
    accepted: int

    def __str__(self) -> str:
        mode = "batch_invariant" if self.batch_invariant else "default"
        return (
            f"  {mode:<16} {self.sampling:<7} {self.proposer:<12} {self.topology:<11} batch {self.batch:<3} "
            f"{self.differing:4} of {self.sequences} sequences from prompt {self.first} differ; {self.accepted} of "
            f"{self.proposed} guesses accepted"
        )


class Identity:
    """The first part: every way of computing, in one dtype, with or without the mode."""

    def __init__(self, args: argparse.Namespace, *, is_on: bool, count: int) -> None:
        self.args, self.is_on = args, is_on
        self.target, self.draft = args.model or pair()[0], args.draft or pair()[1]
        self.asked = prompts(self.target, count)
        self.share = min(args.share or count, count)
        self.options: Config = {"dtype": args.dtype, "batch_invariant": is_on}

    def cells(self, topologies: Sequence[str]) -> Iterator[Cell]:
        """Compute the reference, then everything else, an engine after the other."""
        expected = self._reference()
        for turn in self.args.turns:
            shares = itertools.count(turn)
            for topology, (name, config) in itertools.product(topologies, proposers(self.draft).items()):
                engine = Engine(self.target, config, topology=topology, threads=self.args.threads, **self.options)
                with engine.llm:
                    yield from self._compared(engine, name, topology, expected, shares)

    def _reference(self) -> dict[str, list[Ids]]:
        engine = Engine(self.target, threads=self.args.threads, enable_prefix_caching=False, **self.options)
        with engine.llm:
            return {
                kind: engine.say(self.asked, range(len(self.asked)), self.args.tokens, kind, max(self.args.batches))
                for kind in TEMPERATURES
            }

    def _compared(
        self, engine: Engine, name: str, topology: str, expected: dict[str, list[Ids]], shares: Iterator[int]
    ) -> Iterator[Cell]:
        for batch in self.args.batches:
            first = self.share * next(shares) % len(self.asked)
            some = [at % len(self.asked) for at in range(first, first + self.share)]
            for kind, all_wanted in expected.items():
                before, wanted = engine.llm.stats(), [all_wanted[at] for at in some]
                said = engine.say([self.asked[at] for at in some], some, self.args.tokens, kind, batch)
                after = engine.llm.stats()
                cell = Cell(
                    self.is_on,
                    name,
                    topology,
                    batch,
                    kind,
                    first,
                    len(said),
                    sum(a != b for a, b in zip(said, wanted, strict=True)),
                    after.proposed - before.proposed,
                    after.accepted - before.accepted,
                )
                print(cell, flush=True)
                yield cell


def slowdowns(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the time with the mode by the time without it, speculation off, prompt by prompt and 32 at once."""
    target = args.model or pair()[0]
    found = []
    for dtype in args.timed_dtypes:
        sides = {
            name: Engine(
                target,
                threads=args.threads,
                dtype=dtype,
                batch_invariant=name == "batch_invariant",
                enable_prefix_caching=False,
            )
            for name in ("default", "batch_invariant")
        }
        asked = prompts(target, 32 * args.blocks)
        for batch in (1, 32):
            blocks = [asked[at : at + batch] for at in range(0, batch * args.blocks, batch)]
            runs = {name: _timed(engine, args.timed_tokens, batch) for name, engine in sides.items()}
            for run in runs.values():
                run(blocks[0])  # warm
            timings = measure.alternate(runs, blocks)
            ratio = timings.slowdown("batch_invariant", "default")
            speeds = {name: timings.tokens_per_second(name) for name in sides}
            print(f"  {dtype:<9} batch {batch:<3} time by that of the default: {ratio}; tokens/s {speeds}", flush=True)
            found.append({"dtype": dtype, "batch": batch, "slowdown": asdict(ratio), "tokens_per_second": speeds})
        for engine in sides.values():
            engine.llm.shutdown()
    return found


def _timed(engine: Engine, tokens: int, batch: int) -> Any:
    def run(block: Sequence[Ids]) -> int:
        return sum(map(len, engine.say(block, range(len(block)), tokens, GREEDY, batch)))

    return run


def given_or_generated(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Ask for the token behind a text that was generated, and again behind the same text when it is given."""
    target = args.model or pair()[0]
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    asked = [tokenizer.encode(BARCELONA, add_special_tokens=False).ids, *prompts(target, args.pairs - 1)]
    found = []
    for dtype in ("float32", "float16", "bfloat16"):
        for is_on in (False, True):
            engine = Engine(
                target,
                threads=args.threads,
                dtype=dtype,
                batch_invariant=is_on,
                enforce_eager=True,
                enable_prefix_caching=False,
            )
            with engine.llm:
                said = engine.say(asked, range(len(asked)), args.pair_tokens, GREEDY, 8)
                texts = [ids + more[:at] for ids, more in zip(asked, said, strict=True) for at in range(1, len(more))]
                again = engine.say(texts, range(len(texts)), 1, GREEDY, 8)
            wanted = [[more[at]] for more in said for at in range(1, len(more))]
            differing = sum(a != b for a, b in zip(again, wanted, strict=True))
            line = {"dtype": dtype, "batch_invariant": is_on, "texts": len(texts), "differing": differing}
            print(f"  {line}", flush=True)
            found.append(line)
    return found


def arguments() -> argparse.Namespace:
    parser = measure.arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=16, help="prompts with batch_invariant; 0: none")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--share", type=int, help="prompts that each way of computing takes (default: all)")
    parser.add_argument("--turns", type=int, nargs="+", default=[0], help="which shares each way of computing takes")
    parser.add_argument("--plain-prompts", type=int, help="prompts without it (default: as many)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 7, 32])
    parser.add_argument("--topologies", nargs="+", choices=(UNI, RAY), default=[UNI, RAY])
    parser.add_argument("--timed-dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--timed-tokens", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=8, help="blocks that are timed")
    parser.add_argument("--pairs", type=int, default=16, help="prompts that are continued, and their texts given again")
    parser.add_argument("--pair-tokens", type=int, default=16)
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
        print("The price")
        report["slowdown"] = slowdowns(args)
    if "pairs" in wanted:
        print("Is the token behind a text the same, whether the text was generated or given?")
        report["pairs"] = given_or_generated(args)
    measure.write(args.output, report)


if __name__ == "__main__":
    main()
