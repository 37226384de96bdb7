"""Trying other numbers of draft tokens than the one that pays, while speculation is on."""

import math
import random

from runtime.policy.allocation import RoundCosts

EXPLORE_EVERY, DOUBT_EVERY = 100, 16
"""While speculation is on, other numbers of draft tokens are tried after so many rounds, and after so many at least."""
EXPLORED_ROUNDS = 3
"""Each is tried for so many rounds in a row. The first shows nothing: after one of another size it takes longer."""
CLEAR_GAIN, PLAIN_SHARE, CLEAR_SHARE = 1.25, 0.5, 0.1
"""The share of the times in which none is tried, with gains up to this one and above: there, what plain rounds cost
decides nothing."""
NEAR = 1.5
"""Of the other numbers, two of three are larger or smaller by this factor: what these cost decides between them."""


def loss(k: int, usual: int, num_rows: int, costs: RoundCosts, *, gain: float, read_s: float) -> float:
    """Return the seconds that a round with *k* draft tokens for each row loses against one with the *usual* number.

    *gain* is that of the usual number over plain decoding. The draft reads tokens of plain rounds later, in *read_s*.
    """
    if k:
        return max(0.0, costs.uniform(k, num_rows) - costs.uniform(usual, num_rows))
    return max(0.0, (gain - 1) * costs.plain() + read_s)


class Exploration:
    """In which rounds another number of draft tokens is tried than the one that pays, so that its cost stays known.

    It is one up to *limit*, or none, for several rounds now and then; none earlier if its cost is in doubt.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._random = random.Random(0)
        self._num_rounds = 0  # since the last time
        self._is_on = self._is_in_doubt = False
        self._k = self._num_left = 0

    @property
    def is_running(self) -> bool:
        """Whether this round has the number of draft tokens that is tried in the one before."""
        return self._num_left > 0

    @property
    def is_first(self) -> bool:
        """Whether this round is the first with that number."""
        return self._num_left == EXPLORED_ROUNDS - 1

    @property
    def is_busy(self) -> bool:
        """Whether it is due or running."""
        return self.is_due or self.is_running

    @property
    def is_overdue(self) -> bool:
        """Whether it is time for it, doubt or not."""
        return self._num_rounds >= EXPLORE_EVERY

    @property
    def is_due(self) -> bool:
        """Whether it should begin in this round."""
        return self._is_on and self._num_rounds >= (DOUBT_EVERY if self._is_in_doubt else EXPLORE_EVERY)

    def count(self, num_rounds: int, *, is_on: bool) -> None:
        """Count rounds, if speculation is on in them."""
        self._is_on = is_on
        self._num_rounds += num_rounds * is_on

    def doubt(self, gain: float) -> None:
        """Note that the cost of plain rounds is in doubt, if it decides anything at this *gain*."""
        self._is_in_doubt |= gain <= CLEAR_GAIN

    def choose(self, k: int, gain: float) -> int:
        """Return the number of draft tokens to try instead of *k*; it is not due again for a while, tried or not."""
        plain_share = PLAIN_SHARE if gain <= CLEAR_GAIN else CLEAR_SHARE
        is_plain = self._is_in_doubt or self._random.random() < plain_share
        self._num_rounds, self._is_in_doubt = 0, False
        less, more = max(1, int(k / NEAR)), min(self._limit, math.ceil(k * NEAR))
        others = [one for one in (less, more, self._random.randint(1, self._limit)) if one != k]
        return 0 if is_plain or not others else self._random.choice(others)

    def start(self, k: int) -> int:
        """Begin with a round of *k* draft tokens; return *k*."""
        self._k, self._num_left = k, EXPLORED_ROUNDS - 1
        return k

    def go_on(self) -> int:
        """Count a further round; return its number of draft tokens."""
        self._num_left -= 1
        return self._k
