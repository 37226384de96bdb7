"""The bandit policy: Thompson sampling over the number of draft tokens, none included (Thompson 1933).

It knows nothing of costs or acceptance. Each K is an arm; what an arm earns is the tokens per second of a few rounds in
which all rows had up to K draft tokens. Batches of similar size share their arms: up to twice as many rows.
"""

import math
import random
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from protos.messages import StepCosts
from runtime.core.sequence import Sequence
from runtime.policy.base import FinishedStep
from runtime.policy.sizes import ladder

PLAY_ROUNDS = 8
"""Rounds of one play of an arm. In the first, a draft catches up with the sequences: it is not counted."""
DISCOUNT = 0.98
"""What older plays of the same batch size weigh, after each new one."""
SPREAD = 0.1
"""Standard deviation of the logarithm of tokens per second between plays of one arm."""


@dataclass
class Arm:
    """Plays of one K: their discounted number, and the discounted mean of the logarithm of tokens per second."""

    num_plays: float = 0.0
    mean: float = 0.0

    def add(self, log_rate: float) -> None:
        """Count a play."""
        self.num_plays += 1
        self.mean += (log_rate - self.mean) / self.num_plays

    def draw(self, rng: random.Random) -> float:
        """Draw from the posterior of the mean; infinite for an arm that was never played."""
        if not self.num_plays:
            return math.inf
        return rng.gauss(self.mean, SPREAD / math.sqrt(self.num_plays))


class BanditPolicy:
    """Plays arms: all rows of a step get up to the same number of draft tokens.

    Args:
        limit: most draft tokens of a row.
        may_branch: whether drafts may be trees.
    """

    least_survival = 0.0

    def __init__(self, limit: int, *, may_branch: bool = False) -> None:
        self._limit, self._may_branch = limit, may_branch
        self._ladder = (0, *ladder(limit))
        self._arms: dict[int, dict[int, Arm]] = {}  # by batch size, then by K
        self._batch = 0
        self._current = limit
        self._rounds_left = 0
        self._tokens, self._seconds = 0, 0.0
        self._random = random.Random(0)
        self.changes: Counter[str] = Counter()

    @property
    def limit(self) -> int:
        """The largest K there can be."""
        return self._limit

    @property
    def current(self) -> int:
        """K of this step."""
        return self._current

    @property
    def predicted_speedup(self) -> float | None:
        """The mean of the current arm over that of plain decoding; None until both were played."""
        arms = self._arms.get(self._batch, {})
        plain, now = arms.get(0), arms.get(self._current)
        if not (plain and now and plain.num_plays and now.num_plays):
            return None
        return math.exp(now.mean - plain.mean)

    @property
    def stays_plain(self) -> bool:
        """See `Policy`."""
        return self._current == 0 and self._rounds_left > 1

    def begin_step(self, running: Seq[Sequence]) -> None:
        """See `Policy`."""
        num_decoding = sum([sequence.is_decoding for sequence in running])
        if not num_decoding:
            return
        batch = num_decoding.bit_length()
        if self._rounds_left == 0 or batch != self._batch:
            self._play(batch)

    def _play(self, batch: int) -> None:
        """Choose an arm for the next rounds."""
        arms = self._arms.setdefault(batch, {k: Arm() for k in self._ladder})
        drawn = {k: arm.draw(self._random) for k, arm in arms.items()}
        k = max(drawn, key=drawn.__getitem__)
        if k != self._current:
            self.changes["rose" if k > self._current else "fell"] += 1
        self._batch, self._current = batch, k
        self._rounds_left, self._tokens, self._seconds = PLAY_ROUNDS, 0, 0.0

    def num_draft_tokens(self, sequence: Sequence, source: int | None = None) -> int:
        """See `Policy`."""
        return sequence.most_drafts(self._current, may_branch=self._may_branch)

    def end_step(self, step: FinishedStep) -> None:
        """See `Policy`. Steps with prompt chunks are not counted, nor those without the draft worker."""
        if not self._rounds_left or not step.plan.decodes or not step.worker_is_up:
            return
        if self._rounds_left < PLAY_ROUNDS:
            self._tokens += step.num_tokens
            self._seconds += step.seconds
        self._rounds_left -= 1
        if self._rounds_left == 0:
            self._earn(self._arms[self._batch], self._tokens / max(self._seconds, 1e-9))

    def revise(self, costs: StepCosts) -> None:
        """See `Policy`. All arms are played again: what they earned was at the speed before."""
        self._arms.clear()
        self._rounds_left = 0

    def _earn(self, arms: Mapping[int, Arm], tokens_per_s: float) -> None:
        for arm in arms.values():
            arm.num_plays *= DISCOUNT
        arms[self._current].add(math.log(max(tokens_per_s, 1e-9)))
