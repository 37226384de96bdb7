"""Every proposer for the demo target, on held-out prompts and on functions that are repeated.

    python -m benchmarks.proposers [--limit 8] [--only "eagle3;suffix"] [--output figures.json]

Batch 1, greedy and sampled. Each proposer's engine alternates with one without speculation, prompt by prompt, so noise
affects both alike; speed-ups have bootstrap 95 % intervals over prompts. "Tokens per step" are those per forward of the
target. The acceptance length, 1 + accepted draft tokens, is over the forwards that had draft tokens. The datastore of
`rest` is the part of the standard library that the demo models were trained on.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.shared import measure, workload
from benchmarks.shared.sides import DemoEngine
from benchmarks.shared.workload import Item, SamplingSettings
from demo import corpus, head, pair
from proposers.shared import datastore
from protos.stats import EngineStats

ON, OFF = "on", "off"
HELDOUT, EDITING = "held-out prompts", "repeated functions"
Config = dict[str, Any]


@dataclass(frozen=True)
class ProposerRow:
    """One proposer on one task."""

    proposer: str
    task: str
    sampling: str
    speedup: measure.Ratio
    tokens_a_step: float
    acceptance_length: float
    accepted_share: float

    def __str__(self) -> str:
        return (
            f"| {self.proposer} | {self.task} | {self.sampling} | {self.tokens_a_step:.2f} | "
            f"{self.acceptance_length:.2f} | {self.accepted_share:.0%} | {self.speedup} |"
        )


TITLE = (
    "| proposer | task | sampling | tokens per step | acceptance length | draft tokens accepted | speed-up |\n"
    "|---|---|---|---|---|---|---|"
)


CHAINS = {"medusa": 4, "hydra": 1, "mlp_speculator": 4, "recurrent": 4, "eagle": 3, "eagle3": 2}
TREES = {"medusa": 16, "recurrent": 16, "eagle": 12, "eagle3": 12}
CASCADE = "suffix, then draft_model"
REMEMBERING = frozenset({"suffix", CASCADE})
"""They draft from past answers. Each way of sampling gets an engine of its own, so that the second cannot profit."""
PROMPTS = 8
"""Prompts of each task by default. All proposers together then take about a quarter of an hour."""


def proposers(draft: Path, store: Path) -> dict[str, Config]:
    """Return the `speculative_config` of every proposer, each with a suitable number of draft tokens."""
    return {
        "draft_model": {"model": str(draft), "num_speculative_tokens": 3},
        "ngram": {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
        "suffix": {"method": "suffix", "num_speculative_tokens": 16},
        "rest": {"method": "rest", "num_speculative_tokens": 16, "datastore": str(store)},
        "lookahead": {"method": "lookahead", "num_speculative_tokens": 56},
        CASCADE: {"method": ["suffix", "draft_model"], "model": str(draft), "num_speculative_tokens": 3},
        **{name: _trained(name, k, "chain") for name, k in CHAINS.items()},
        **{f"{name}, tree": _trained(name, k, "tree") for name, k in TREES.items()},
    }


def _trained(name: str, k: int, shape: str) -> Config:
    return {"method": name, "model": str(head(name)), "num_speculative_tokens": k, "draft_shape": shape}


def build_store(target: Path, path: Path) -> None:
    """Write the datastore of `rest`: the standard library without the held-out files, in the target's tokens."""
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    texts = list(corpus.read(corpus.split(corpus.stdlib_root())[0]))
    datastore.write(
        path,
        [encoded.ids for encoded in tokenizer.encode_batch(texts, add_special_tokens=False)],
        datastore.fingerprint(tokenizer.get_vocab()),
    )


def ways(name: str, sampling: Mapping[str, SamplingSettings]) -> list[Mapping[str, SamplingSettings]]:
    """Return groups of ways of sampling; those of a group share an engine of this proposer."""
    return [{kind: one} for kind, one in sampling.items()] if name in REMEMBERING else [sampling]


def lines(
    name: str, on: DemoEngine, off: DemoEngine, work: workload.Workload, kinds: Mapping[str, SamplingSettings]
) -> Iterator[ProposerRow]:
    """Measure one proposer on all tasks, in these *kinds* of sampling."""
    tasks: dict[str, Sequence[Item]] = {HELDOUT: work.single, EDITING: work.editing}
    for sampling in kinds.values():
        on.one(work.concurrent[0], sampling)  # warm, with a prompt that is not measured: some proposers index answers
        off.one(work.concurrent[0], sampling)
    for task, items in tasks.items():
        for kind, sampling in kinds.items():
            yield _line(name, task, kind, on, off, items, sampling)


def _line(  # noqa: PLR0917
    name: str,
    task: str,
    kind: str,
    on: DemoEngine,
    off: DemoEngine,
    items: Sequence[Item],
    sampling: SamplingSettings,
) -> ProposerRow:
    sides = {ON: partial(on.one, sampling=sampling), OFF: partial(off.one, sampling=sampling)}
    before = on.llm.stats()
    timings = measure.alternate(sides, items)
    steps, rounds, proposed, accepted = _grown(before, on.llm.stats())
    return ProposerRow(
        name,
        task,
        kind,
        timings.speedup(ON, OFF),
        float(timings.tokens_B.sum()) / steps,
        1 + accepted / max(1, rounds),
        accepted / max(1, proposed),
    )


def _grown(before: EngineStats, after: EngineStats) -> tuple[int, int, int, int]:
    """Return steps, those of prompts included; rounds with drafts; draft tokens; accepted ones: since *before*."""
    return (
        after.steps - before.steps,
        after.drafting_rounds - before.drafting_rounds,
        after.proposed - before.proposed,
        after.accepted - before.accepted,
    )


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--only", help="names of proposers, separated by semicolons")
    parser.add_argument("--policy", default="fixed", help="of the number of draft tokens (default: always as many)")
    parser.set_defaults(limit=PROMPTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        chosen = proposers(args.draft or pair()[1], Path(folder) / "store")
        if args.only:
            chosen = {name.strip(): chosen[name.strip()] for name in args.only.split(";")}
        target = args.model or pair()[0]
        if "rest" in chosen:
            build_store(target, Path(folder) / "store")
        found = list(measured(target, chosen, args))
    measure.write(
        args.output,
        {
            "environment": measure.environment(args.threads),
            "configs": chosen,
            "lines": [asdict(line) for line in found],
        },
    )


def measured(target: Path, chosen: Mapping[str, Config], args: argparse.Namespace) -> Iterator[ProposerRow]:
    """Print and yield every row of the table."""
    work, off = workload.load(target, args.limit), DemoEngine(target, None, threads=args.threads)
    print(TITLE)
    for name, config in chosen.items():
        for kinds in ways(name, work.sampling):
            on = DemoEngine(target, config | {"policy": args.policy}, threads=args.threads)
            for line in lines(name, on, off, work, kinds):
                print(line, flush=True)
                yield line
            on.llm.shutdown()


if __name__ == "__main__":
    main()
