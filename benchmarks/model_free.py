"""What model-free proposers cost beside the controller: time a round, and memory over many requests.

    python -m benchmarks.model_free [--rows 64] [--tokens 4096] [--rounds 200] [--output figures.json]

The rows are texts of the standard library in the demo target's tokens. Each round every row asks for guesses, which are
accepted as far as the text goes on like that, with one more token of the text. "Propose" is the time of one round's
guesses for all rows; "update" that of taking note of what was committed, with a slice of prompts or of past answers.
"""

import argparse
import resource
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.shared import measure
from demo import pair
from proposers import registry
from proposers.shared import datastore
from protos.config.engine import SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.interfaces import Proposer, SequenceListener
from protos.messages import Request, Sampling
from protos.sampling import SamplingParams

PROPOSE_AT_MOST, UPDATE_AT_MOST, MEMORY_AT_MOST = 2.0, 5.0, 256
MIB = 1 << 20
ANSWER, REMEMBERED = 500, 1000
"""Tokens of an answer: for time, and for memory, where 10,000 of them are more than there is room for."""
SAID_BEFORE, SAID_NOW = slice(0, 90), slice(90, 160)
"""Files that earlier answers and the datastore are made of, and those that the rows are."""

METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 5},
    "ngram 1 to 4": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 24},
    "suffix, trees": {"method": "suffix", "num_speculative_tokens": 24, "draft_shape": "tree"},
    "rest": {"method": "rest", "num_speculative_tokens": 16},
    "lookahead": {"method": "lookahead", "num_speculative_tokens": 56},
}


@dataclass(frozen=True)
class Cost:
    """Milliseconds, medians and 99th percentiles over rounds; guesses and accepted tokens a row and round."""

    method: str
    propose_ms: float
    propose_p99_ms: float
    update_ms: float
    update_p99_ms: float
    guessed: float
    accepted: float

    def __str__(self) -> str:
        return (
            f"| {self.method} | {self.propose_ms:.2f} ({self.propose_p99_ms:.2f}) | {self.update_ms:.2f} "
            f"({self.update_p99_ms:.2f}) | {self.guessed:.1f} | {self.accepted:.2f} |"
        )


def library_tokens() -> Iterator[list[int]]:
    """Yield the tokens of the standard library's files, in order, again and again."""
    tokenizer = Tokenizer.from_file(str(pair()[0] / "tokenizer.json"))
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [file.read_text(encoding="utf-8") for file in files]
    for text in cycle(texts):
        yield tokenizer.encode(text, add_special_tokens=False).ids


def library_texts(number: int, tokens: int, files: slice) -> list[list[int]]:
    """Return *number* texts of this many tokens out of some of the library's files."""
    flat = [token for part in islice(library_tokens(), files.start, files.stop) for token in part]
    return [flat[i * tokens % (len(flat) - tokens) :][:tokens] for i in range(number)]


def request(prompt: Sequence[int]) -> Request:
    return Request("r", tuple(prompt), SamplingParams(), Sampling(seed=0), 1)


def num_accepted(draft: Draft, truth: Sequence[int]) -> int:
    """Return how many nodes of *draft* the text *truth* walks through."""
    parents = draft.parents or range(-1, len(draft) - 1)
    probes = draft.probes or [False] * len(draft)
    children = {
        (parent, token): node
        for node, (parent, token, probe) in enumerate(zip(parents, draft.tokens, probes, strict=True))
        if not probe
    }
    node, accepted = -1, 0
    while accepted < len(truth) and (node, truth[accepted]) in children:
        node = children[node, truth[accepted]]
        accepted += 1
    return accepted


@dataclass
class ReplayedRows:
    """Sequences that are being said, as the controller has them."""

    truths: list[list[int]]
    texts: list[list[int]]
    k: int
    guessed: int = 0
    accepted: int = 0

    @property
    def rows(self) -> list[DraftRow]:
        return [DraftRow(i, self.k, text, i + 1) for i, text in enumerate(self.texts)]

    def judge(self, drafts: Sequence[Draft]) -> list[tuple[list[int], list[int]]]:
        """Return what every row gains, and what is said behind its probes."""
        gains = []
        for truth, text, draft in zip(self.truths, self.texts, drafts, strict=True):
            rest = truth[len(text) :]
            accepted = num_accepted(draft, rest)
            self.guessed += len(draft) - sum(draft.probes)
            self.accepted += accepted
            gains.append((rest[: accepted + 1], rest[: sum(draft.probes)]))
        return gains


def begin(proposer: Proposer, rows: ReplayedRows) -> None:
    """Let the proposer know all prompts, in slices."""
    if isinstance(proposer, SequenceListener):
        for i, text in enumerate(rows.texts):
            proposer.begin(i + 1, request(text))
        for _ in range(sum(map(len, rows.texts)) // 1024 + 1):
            proposer.prepare()


def remember(follower: SequenceListener, answers: Sequence[Sequence[int]], keys: Iterator[int]) -> None:
    """Let the proposer see these answers to earlier requests."""
    for answer in answers:
        key = next(keys)
        follower.begin(key, request([0]))
        follower.end(key, [0, *answer])
        follower.prepare()


def run(name: str, proposer: Proposer, rows: ReplayedRows, rounds: int) -> Cost:
    """Time rounds."""
    propose_s, update_s = [], []
    for _ in range(rounds):
        asked = rows.rows
        began = time.perf_counter()
        drafts = proposer.propose(asked)
        propose_s.append(time.perf_counter() - began)
        gains = rows.judge(drafts)
        for text, (tokens, _) in zip(rows.texts, gains, strict=True):
            text.extend(tokens)
        began = time.perf_counter()
        update(proposer, gains)
        update_s.append(time.perf_counter() - began)
    each = rounds * len(rows.texts)
    (propose, propose_p99), (update_, update_p99) = (
        1e3 * np.quantile(times, (0.5, 0.99)) for times in (propose_s, update_s)
    )
    return Cost(name, propose, propose_p99, update_, update_p99, rows.guessed / each, rows.accepted / each)


def update(proposer: Proposer, gains: Sequence[tuple[list[int], list[int]]]) -> None:
    if isinstance(proposer, SequenceListener):
        for i, (tokens, probed) in enumerate(gains):
            proposer.grow(i + 1, tokens, probed)
        proposer.prepare()


def timed(name: str, config: SpeculativeConfig, args: argparse.Namespace) -> Cost:
    """Time one method on rows whose texts go on for as long as the rounds need."""
    k = config.num_speculative_tokens
    truths = library_texts(args.rows, args.tokens + args.rounds * (k + 1), SAID_NOW)
    rows = ReplayedRows(truths, [truth[: args.tokens] for truth in truths], k)
    [proposer] = registry.controller_proposers(config)
    if isinstance(proposer, SequenceListener):
        remember(proposer, library_texts(args.past, ANSWER, SAID_BEFORE), count(10**6))
    begin(proposer, rows)
    return run(name, proposer, rows, args.rounds)


def resident() -> float:
    """Return how many MiB of memory this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / MIB


def memory(requests: int) -> dict[str, float]:
    """Return MiB by which this process grows by the answers to so many requests, after them and at most."""
    answers, keys = library_texts(min(1000, requests), REMEMBERED, SAID_BEFORE), count(1)
    before, held = resident(), []
    [proposer] = registry.controller_proposers(SpeculativeConfig(method="suffix", num_speculative_tokens=24))
    assert isinstance(proposer, SequenceListener)
    for _ in range(requests // len(answers)):
        remember(proposer, answers, keys)
        held.append(resident() - before)
    return {"requests": requests, "held": held[-1], "peak": max(held)}


def configs(folder: Path) -> dict[str, SpeculativeConfig]:
    """Return the configuration of every method, with a datastore in *folder*."""
    texts = list(islice(library_tokens(), SAID_BEFORE.start, SAID_BEFORE.stop))
    datastore.write(folder / "store", texts, bytes(32))
    return {name: SpeculativeConfig(**keys, datastore=str(folder / "store")) for name, keys in METHODS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--past", type=int, default=2000, help="answers that suffix decoding remembers")
    parser.add_argument("--requests", type=int, default=10_000, help="for the memory of suffix decoding")
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    args = parser.parse_args()
    print(
        f"{args.rows} rows of {args.tokens} tokens, milliseconds a round: median (99th percentile); wanted: propose "
        f"<= {PROPOSE_AT_MOST}, update <= {UPDATE_AT_MOST}"
    )
    print("| method | propose | update | guesses a row | accepted a row |\n|---|---|---|---|---|")
    costs = []
    with tempfile.TemporaryDirectory() as folder:
        for name, config in configs(Path(folder)).items():
            costs.append(timed(name, config, args))
            print(costs[-1])
    held = memory(args.requests)
    print(
        f"suffix decoding after {args.requests} requests of {REMEMBERED} tokens: {held['held']:.0f} MiB held, "
        f"{held['peak']:.0f} at most; wanted: <= {MEMORY_AT_MOST}"
    )
    measure.write(
        args.output,
        {"costs": [asdict(cost) for cost in costs], "memory_mib": held, "rows": args.rows, "tokens": args.tokens},
    )


if __name__ == "__main__":
    main()
