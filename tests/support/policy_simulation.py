"""A simulated engine for policies, whose costs and acceptance are known. It shares parts with `benchmarks.worlds`."""

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.worlds.costs import Seconds
from benchmarks.worlds.engine import EndedRounds
from protos.draft import PREDICTION
from protos.messages import Row, StepCosts, Verdict
from runtime.core.sequence import Sequence as EngineSequence
from runtime.policy.acceptance import WORKER_ALONE, Sources
from tests.support.scheduling import decoding

LIMIT = 8
CHUNK, READ_S = 2048, 0.00002
"""Tokens that a draft reads in a round, and the seconds for each."""


@dataclass
class Simulation(EndedRounds):
    """Rows with an acceptance rate each, on an engine whose rounds cost what *target* and *draft* return.

    A draft is *found* with this probability; a look-up finds nothing in many rounds. Rows with a number in *predicted*
    have a prediction. With more than the draft worker as a source, the drafts of each other source are right at its own
    rate, whatever the row's, and *looked_up* gives this rate and how often such a draft is found. Looking up takes
    *lookup* seconds a row. In rounds in which the draft worker is asked, plan and table are *way* seconds under way. In
    the share *skipped* of those it is behind, and target rank 0 goes on without drafts; while it *is_down*, in all.
    """

    target: Seconds
    draft: Seconds
    noise: float = 0.1
    found: float = 1.0
    sources: Sources = WORKER_ALONE
    predicted: Collection[int] = ()
    looked_up: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    lookup: float = 0.00002
    way: float = 0.0
    skipped: float = 0.0
    is_down: bool = False
    unread: int = 0
    seed: int = 0
    ks: list[int] = field(default_factory=list)
    used: Counter[int] = field(default_factory=Counter)
    """Drafts from each source."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def run(self, rates: Sequence[float], rounds: int) -> float:
        """Run rounds with one row for each rate; return tokens per second."""
        seconds, tokens = self.seconds, self.num_tokens
        for _ in range(rounds):
            self._round(rates)
        return (self.num_tokens - tokens) / (self.seconds - seconds)

    def _round(self, rates: Sequence[float]) -> None:
        sequences = [
            decoding(key, prediction_token_ids=(1,) if key in self.predicted else ()) for key in range(len(rates))
        ]
        self.policy.begin_step(sequences)
        self.ks = [self.policy.num_draft_tokens(sequence) for sequence in sequences]
        is_behind = self.is_down or (self.random.random() < self.skipped if self.skipped else False)
        drafts = [self._draft(sequence, rate) for sequence, rate in zip(sequences, rates, strict=True)]
        num_read = min(CHUNK, self.unread) if any(k for _, k, _ in drafts) else 0
        self.unread -= num_read
        if is_behind:
            drafts = [(source, 0 if source == self.sources.worker else k, rate) for source, k, rate in drafts]
        rows = [Row(key, 1, 1, 2, k, source=source) for key, (source, k, _) in enumerate(drafts)]
        verdicts = [self._verdict(key, 0 if self.unread else k, rate) for key, (_, k, rate) in enumerate(drafts)]
        noise = 1 + self.noise * self.random.random()
        of_worker = [row.slot for row in rows if row.source == self.sources.worker and not is_behind]
        worker = [self._most(sequences[slot], self.sources.worker) for slot in of_worker]
        lookup_s = self.lookup * noise * sum(self._looks_up(one) for one in sequences)
        draft_s = lookup_s + max(worker, default=0) * self.draft(sum(k > 0 for k in worker)) * noise
        draft_s += (self.way if any(worker) else 0.0) + num_read * READ_S
        seconds = draft_s + self.target(len(rows) + sum(verdict.proposed for verdict in verdicts)) * noise
        self.end_round(rows, verdicts, draft_s, seconds, lookup_s, worker_is_up=not self.is_down)

    def _most(self, sequence: EngineSequence, source: int) -> int:
        may_draft = source < len(self.sources) and self.sources.may_draft(source, sequence.request)
        return self.policy.num_draft_tokens(sequence, source) if may_draft else 0

    def _looks_up(self, sequence: EngineSequence) -> bool:
        return any(self._most(sequence, source) for source in range(PREDICTION + 1, self.sources.worker))

    def _draft(self, sequence: EngineSequence, rate: float) -> tuple[int, int, float]:
        """Return the source of a row's draft, its tokens, and the rate at which they are right."""
        for source in range(self.sources.worker):
            lookup_rate, found = self.looked_up[source]
            k = self._most(sequence, source)
            if k and self.random.random() < found:
                self.used[source] += 1
                return source, k, lookup_rate
        k = self._most(sequence, self.sources.worker)
        self.used[self.sources.worker] += k > 0
        return self.sources.worker, k if self.random.random() < self.found else 0, rate

    def _verdict(self, slot: int, k: int, rate: float) -> Verdict:
        accepted = next((depth for depth in range(k) if self.random.random() >= rate), k)
        return Verdict(slot, (1,) * (accepted + 1), k, range(accepted))


def flat(tokens: int) -> float:
    """A step that reads weights: up to 16 tokens cost about the same."""
    return 0.003 * max(1.0, tokens / 16) + 0.00002 * tokens


def steep(tokens: int) -> float:
    return 0.0004 + 0.0006 * tokens


def cheap(rows: int) -> float:
    return 0.0003 + 0.00001 * rows


def fixed_rate(k: int, rates: Sequence[float], target: Seconds, draft: Seconds) -> float:
    """Return the tokens per second with *k* draft tokens for all rows in all rounds."""
    tokens = sum(sum(rate**i for i in range(k + 1)) for rate in rates)
    return tokens / (target(len(rates) * (k + 1)) + k * draft(len(rates))) / 1.05  # the mean of the noise


def best_fixed(rates: Sequence[float], target: Seconds, draft: Seconds) -> float:
    """Return the highest tokens per second of any K that is the same for all rows in all rounds."""
    return max(fixed_rate(k, rates, target, draft) for k in range(LIMIT + 1))


SIZES = [1 << power for power in range(11)]


def warmed_up(target: Seconds) -> StepCosts:
    """Return the costs as measured before serving: at a few sizes, without the noise."""
    return StepCosts({size: target(size) for size in SIZES}, {size: cheap(size) for size in SIZES[:7]})
