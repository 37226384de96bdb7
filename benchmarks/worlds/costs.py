"""What the rounds of simulated engines cost: curves shaped like those of GPUs and of CPUs."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist

from protos.messages import StepCosts

Seconds = Callable[[int], float]
"""Of a forward, by its size."""
LARGEST_MEASURED = 512
"""Warm-up measures sizes up to this, as in `workers.step_costs`."""
NOISE_ROUNDS = 200
"""The noise of so many rounds in a row has the same values in each world, in another order each time."""


@dataclass(frozen=True)
class EngineCosts:
    """Seconds of an engine's work, without noise.

    Attributes:
        target: of the target's forward, by tokens fed.
        draft: of a further level of the draft, by rows. The first level takes `first` times as long.
        first: see `draft`.
        context_s: what the target takes longer for each token in the KV cache.
        draft_context_s: the same for each level of the draft.
        read_s: of the draft, for each token that it had not read.
        way_s: plan and drafts are under way for so long.
        is_dedicated: whether the draft has a device of its own: it reads while the target computes.
        host_s: of the host between two rounds, while the device waits. Plain rounds that the policy foresees, in which
            no row comes, are begun before their plan: the device does not wait. One that is not asked for is lost.
    """

    target: Seconds
    draft: Seconds
    first: float = 2.0
    context_s: float = 0.0
    draft_context_s: float = 0.0
    read_s: float = 0.0
    way_s: float = 0.0
    is_dedicated: bool = False
    host_s: float = 0.0

    def drafting_s(self, depth: int, num_rows: int, context: int) -> float:
        """Return the seconds for drafts of *depth* levels for rows with so many tokens in the draft's KV cache."""
        return (
            (self.first - 1 + depth) * self.draft(num_rows) + depth * self.draft_context_s * context if depth else 0.0
        )

    def warm_up(self, most_tokens: int, most_rows: int, target_error: float, draft_error: float) -> StepCosts:
        """Return what warm-up measures: sizes 1, 2, 4 ... without contexts, wrong by these factors."""
        target_s = {size: target_error * self.target(size) for size in _powers(min(LARGEST_MEASURED, most_tokens))}
        draft_s = {size: draft_error * self.draft(size) for size in _powers(min(LARGEST_MEASURED, most_rows))}
        return StepCosts(target_s, draft_s)


def _powers(largest: int) -> list[int]:
    return [1 << power for power in range((largest - 1).bit_length() + 1)]


@dataclass(frozen=True)
class Noise:
    """Factors of the seconds of rounds, 1 on average but for outliers.

    Attributes:
        spread: standard deviation.
        outliers: share of the rounds that take `outlier` times as long.
        outlier: see `outliers`.
    """

    spread: float = 0.0
    outliers: float = 0.0
    outlier: float = 10.0

    def factors(self, seed: int) -> Iterator[float]:
        """Yield the factor of each round, without end."""
        if not (self.spread or self.outliers):
            while True:
                yield 1.0
        dice, normal = random.Random(seed), NormalDist()
        values = [1 + self.spread * normal.inv_cdf((i + 0.5) / NOISE_ROUNDS) for i in range(NOISE_ROUNDS)]
        values = [max(0.3, value) for value in values]
        while True:
            dice.shuffle(values)
            slow = set(dice.sample(range(NOISE_ROUNDS), round(self.outliers * NOISE_ROUNDS)))
            for index, value in enumerate(values):
                yield value * self.outlier if index in slow else value


QUIET = Noise()


def memory_bound(least_s: float, knee: int, token_s: float) -> Seconds:
    """Return a forward that reads weights in *least_s*, and computes for *token_s* for each token above *knee*."""
    return lambda tokens: least_s + token_s * max(0, tokens - knee)


def gpu(knee: int = 192, *, is_dedicated: bool = False, host_s: float = 0.0) -> EngineCosts:
    """Return the costs of a GPU: a target of 8 ms, a draft of 1 ms, both bound by launches and weights at first."""
    return EngineCosts(
        memory_bound(0.008, knee, 4e-5),
        memory_bound(0.001, knee, 5e-6),
        context_s=2e-8,
        draft_context_s=2e-9,
        read_s=8e-6,
        way_s=0.0003 if is_dedicated else 0.0,
        is_dedicated=is_dedicated,
        host_s=host_s,
    )


def cpu() -> EngineCosts:
    """Return the costs of a CPU: weights are read for up to 16 tokens, then each token costs."""
    return EngineCosts(
        lambda tokens: 0.003 * max(1.0, tokens / 16) + 2e-5 * tokens,
        lambda rows: 0.0003 + 1e-5 * rows,
        context_s=1e-8,
        draft_context_s=1e-9,
        read_s=2e-5,
    )


def slow_cpu() -> EngineCosts:
    """Return the costs of a CPU on which each token costs from the first on."""
    return EngineCosts(
        lambda tokens: 0.0012 + 6e-4 * tokens,
        lambda rows: 0.0002 + 2e-5 * rows,
        context_s=2e-8,
        draft_context_s=2e-9,
        read_s=2e-5,
    )
