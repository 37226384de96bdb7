"""What model-free proposers cost in the controller process: time per round, and memory over many requests.

    python -m benchmarks.model_free [--rows 64] [--tokens 4096] [--rounds 200] [--output figures.json]

The rows are texts of the standard library in the demo target's tokens. In each round every row gets a draft. Its tokens
are accepted as far as they agree with the text, and one more token of the text is added. "Propose" is the time of the
drafts of all rows in one round; "update" is that of reporting the committed tokens to the proposer, and of a slice of
its indexing of prompts or past answers.
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
"""Tokens of a past answer: when time is measured, and when memory is; 10,000 of the latter exceed the index's limit."""
PAST_FILES, ROW_FILES = slice(0, 90), slice(90, 160)
"""Files of the past answers and the datastore, and those of the rows."""

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
    """Milliseconds, medians and 99th percentiles over rounds; draft tokens and accepted ones per row and round."""

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
    """Yield the tokens of each file of the standard library, in order, without end."""
    tokenizer = Tokenizer.from_file(str(pair()[0] / "tokenizer.json"))
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [file.read_text(encoding="utf-8") for file in files]
    for text in cycle(texts):
        yield tokenizer.encode(text, add_special_tokens=False).ids


def library_texts(number: int, tokens: int, files: slice) -> list[list[int]]:
    """Return *number* texts of *tokens* tokens each, from some of the library's files."""
    flat = [token for part in islice(library_tokens(), files.start, files.stop) for token in part]
    return [flat[i * tokens % (len(flat) - tokens) :][:tokens] for i in range(number)]


def request(prompt: Sequence[int]) -> Request:
    return Request("r", tuple(prompt), SamplingParams(), Sampling(seed=0), 1)


def num_accepted(draft: Draft, wanted: Sequence[int]) -> int:
    """Return the length of the longest path of *draft*, from the root, that *wanted* begins with."""
    parents = draft.parents or range(-1, len(draft) - 1)
    probes = draft.probes or [False] * len(draft)
    children = {
        (parent, token): node
        for node, (parent, token, probe) in enumerate(zip(parents, draft.tokens, probes, strict=True))
        if not probe
    }
    node, accepted = -1, 0
    while accepted < len(wanted) and (node, wanted[accepted]) in children:
        node = children[node, wanted[accepted]]
        accepted += 1
    return accepted


@dataclass
class ReplayedRows:
    """Sequences that grow along known texts. `texts` are their tokens so far; `wanted` the whole texts."""

    wanted: list[list[int]]
    texts: list[list[int]]
    k: int
    drafted: int = 0
    accepted: int = 0

    @property
    def rows(self) -> list[DraftRow]:
        return [DraftRow(i, self.k, text, i + 1) for i, text in enumerate(self.texts)]

    def verify(self, drafts: Sequence[Draft]) -> list[tuple[list[int], list[int]]]:
        """Return the tokens that every row gains, and those after its probes."""
        gains = []
        for wanted, text, draft in zip(self.wanted, self.texts, drafts, strict=True):
            rest = wanted[len(text) :]
            accepted = num_accepted(draft, rest)
            self.drafted += len(draft) - sum(draft.probes)
            self.accepted += accepted
            gains.append((rest[: accepted + 1], rest[: sum(draft.probes)]))
        return gains


def begin(proposer: Proposer, rows: ReplayedRows) -> None:
    """Report all prompts to the proposer, and let it index them, in slices."""
    if isinstance(proposer, SequenceListener):
        for i, text in enumerate(rows.texts):
            proposer.begin(i + 1, request(text))
        for _ in range(sum(map(len, rows.texts)) // 1024 + 1):
            proposer.prepare()


def add_past(listener: SequenceListener, answers: Sequence[Sequence[int]], keys: Iterator[int]) -> None:
    """Report these answers to earlier requests to the proposer."""
    for answer in answers:
        key = next(keys)
        listener.begin(key, request([0]))
        listener.end(key, [0, *answer])
        listener.prepare()


def run(name: str, proposer: Proposer, rows: ReplayedRows, rounds: int) -> Cost:
    """Return the cost of *rounds* rounds of one method."""
    propose_s, update_s = [], []
    for _ in range(rounds):
        draft_rows = rows.rows
        began = time.perf_counter()
        drafts = proposer.propose(draft_rows)
        propose_s.append(time.perf_counter() - began)
        gains = rows.verify(drafts)
        for text, (tokens, _) in zip(rows.texts, gains, strict=True):
            text.extend(tokens)
        began = time.perf_counter()
        update(proposer, gains)
        update_s.append(time.perf_counter() - began)
    each = rounds * len(rows.texts)
    (propose, propose_p99), (update_, update_p99) = (
        1e3 * np.quantile(times, (0.5, 0.99)) for times in (propose_s, update_s)
    )
    return Cost(name, propose, propose_p99, update_, update_p99, rows.drafted / each, rows.accepted / each)


def update(proposer: Proposer, gains: Sequence[tuple[list[int], list[int]]]) -> None:
    if isinstance(proposer, SequenceListener):
        for i, (tokens, probed) in enumerate(gains):
            proposer.grow(i + 1, tokens, probed)
        proposer.prepare()


def timed(name: str, config: SpeculativeConfig, args: argparse.Namespace) -> Cost:
    """Time one method on rows whose texts are long enough for all rounds."""
    k = config.num_speculative_tokens
    wanted = library_texts(args.rows, args.tokens + args.rounds * (k + 1), ROW_FILES)
    rows = ReplayedRows(wanted, [text[: args.tokens] for text in wanted], k)
    [proposer] = registry.controller_proposers(config)
    if isinstance(proposer, SequenceListener):
        add_past(proposer, library_texts(args.past, ANSWER, PAST_FILES), count(10**6))
    begin(proposer, rows)
    return run(name, proposer, rows, args.rounds)


def resident() -> float:
    """Return the resident memory of this process in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / MIB


def memory(requests: int) -> dict[str, float]:
    """Return by how many MiB the answers to *requests* requests make this process grow: at the end, and at most."""
    answers, keys = library_texts(min(1000, requests), REMEMBERED, PAST_FILES), count(1)
    before, held = resident(), []
    [proposer] = registry.controller_proposers(SpeculativeConfig(method="suffix", num_speculative_tokens=24))
    assert isinstance(proposer, SequenceListener)
    for _ in range(requests // len(answers)):
        add_past(proposer, answers, keys)
        held.append(resident() - before)
    return {"requests": requests, "held": held[-1], "peak": max(held)}


def configs(folder: Path) -> dict[str, SpeculativeConfig]:
    """Return the configuration of every method, with a datastore in *folder*."""
    texts = list(islice(library_tokens(), PAST_FILES.start, PAST_FILES.stop))
    datastore.write(folder / "store", texts, bytes(32))
    return {name: SpeculativeConfig(**keys, datastore=str(folder / "store")) for name, keys in METHODS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=measure.COUNT, default=64)
    parser.add_argument("--tokens", type=measure.COUNT, default=4096)
    parser.add_argument("--rounds", type=measure.COUNT, default=200)
    parser.add_argument("--past", type=int, default=2000, help="past answers that proposers may index")
    parser.add_argument("--requests", type=measure.COUNT, default=10_000, help="for the memory of suffix decoding")
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    args = parser.parse_args()
    print(
        f"{args.rows} rows of {args.tokens} tokens, milliseconds per round: median (99th percentile); wanted: propose "
        f"<= {PROPOSE_AT_MOST}, update <= {UPDATE_AT_MOST}"
    )
    print("| method | propose | update | draft tokens per row | accepted per row |\n|---|---|---|---|---|")
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
