"""A simulated engine for policies, whose costs and acceptance are known."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from protos.messages import RoundPlan, Row, StepCosts, Verdict
from runtime.policy.base import FinishedStep, Policy
from tests.support.scheduling import decoding

LIMIT = 8
Seconds = Callable[[int], float]
"""Of a step, by tokens."""


@dataclass
class Simulation:
    """Rows with an acceptance rate each, on an engine whose rounds cost what *target* and *draft* return.

    A draft is *found* with this probability; a look-up finds nothing in many rounds.
    """

    policy: Policy
    target: Seconds
    draft: Seconds
    noise: float = 0.1
    found: float = 1.0
    seed: int = 0
    seconds: float = 0.0
    num_tokens: int = 0
    ks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def run(self, rates: Sequence[float], rounds: int) -> float:
        """Run rounds with one row for each rate; return tokens per second."""
        seconds, tokens = self.seconds, self.num_tokens
        for _ in range(rounds):
            self._round(rates)
        return (self.num_tokens - tokens) / (self.seconds - seconds)

    def _round(self, rates: Sequence[float]) -> None:
        sequences = [decoding(key) for key in range(len(rates))]
        self.policy.begin_step(sequences)
        ks = [self.policy.num_draft_tokens(sequence) for sequence in sequences]
        drafted = [k if self.random.random() < self.found else 0 for k in ks]
        rows = [Row(key, 1, 1, 2, k) for key, k in enumerate(drafted)]
        verdicts = [self._verdict(key, k, rate) for key, (k, rate) in enumerate(zip(drafted, rates, strict=True))]
        gained = sum(len(verdict.path) + 1 for verdict in verdicts)
        noise = 1 + self.noise * self.random.random()
        draft_s = max(ks) * self.draft(sum(k > 0 for k in ks)) * noise
        seconds = draft_s + self.target(len(rows) + sum(drafted)) * noise
        self.policy.end_step(FinishedStep(RoundPlan(0, rows), verdicts, gained, draft_s, seconds))
        self.seconds += seconds
        self.num_tokens += gained
        self.ks = ks

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
