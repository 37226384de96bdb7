"""Trying other numbers of draft tokens than the one that pays, while speculation is on."""

import math
import random

from runtime.policy.cost_model import RoundCosts

EXPLORE_EVERY, DOUBT_EVERY = 50, 16
"""While speculation is on, other numbers of draft tokens are tried after so many rounds, and after so many at least."""
MOST_DOUBLED = 3
"""How often that is doubled at most: once whenever another was tried, until what pays is another."""
LOST = 0.5
"""Of the seconds by which more draft tokens make a round longer, the share that trying more or fewer is taken to cost:
the tokens that they bring or that are missing are not known beforehand. Against plain rounds all of it is."""
EXPLORED_ROUNDS, EXPLORED_PLAIN = 8, 4
"""Each is tried for so many rounds in a row, and none for so many. The last of them show what it costs: after rounds of
another size the first ones take longer."""
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
        return (LOST if usual else 1.0) * abs(costs.uniform(k, num_rows) - costs.uniform(usual, num_rows))
    return max(0.0, (gain - 1) * costs.plain() + read_s)


def num_explored(k: int) -> int:
    """Return for how many rounds *k* draft tokens are tried."""
    return EXPLORED_ROUNDS if k else EXPLORED_PLAIN


class Exploration:
    """In which rounds another number of draft tokens is tried than the one that pays, so that its cost stays known.

    It is one up to *limit*, or none, for several rounds now and then; none earlier if its cost is in doubt.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._random = random.Random(0)
        self._num_rounds = 0  # since the last time
        self._is_on = self._is_in_doubt = False
        self._usual = self._num_alike = 0  # what pays, and how often others were tried since it does
        self._last = 0  # what was tried last, but for none
        self._next: int | None = None

    @property
    def _every(self) -> int:
        return EXPLORE_EVERY << min(MOST_DOUBLED, self._num_alike)

    @property
    def is_due(self) -> bool:
        """Whether it should begin in this round."""
        return self._is_on and self._num_rounds >= (DOUBT_EVERY if self._is_in_doubt else self._every)

    def count(self, num_rounds: int, *, is_on: bool) -> None:
        """Count rounds, if speculation is on in them."""
        self._is_on = is_on
        self._num_rounds += num_rounds * is_on

    def doubt(self, gain: float) -> None:
        """Note that the cost of plain rounds is in doubt, if it decides anything at this *gain*."""
        self._is_in_doubt |= gain <= CLEAR_GAIN

    def choose(self, usual: int, gain: float) -> int:
        """Return the number of draft tokens to try instead of the *usual*: the same one until it begins.

        If it does not begin in this round, since it costs too much, it is due again a little later.
        """
        if usual != self._usual:
            self._usual, self._num_alike, self._next = usual, 0, None
        if self._is_in_doubt:
            self._num_rounds, self._is_in_doubt = 0, False
            return 0
        self._num_rounds -= DOUBT_EVERY
        if self._next is None:
            self._next = self._draw(usual, gain)
        return self._next

    def _draw(self, usual: int, gain: float) -> int:
        less, more = max(1, int(usual / NEAR)), min(self._limit, math.ceil(usual * NEAR))
        others = {less, more, self._random.randint(1, self._limit)} - {usual}
        others = others - {self._last} or others
        is_plain = self._random.random() < (PLAIN_SHARE if gain <= CLEAR_GAIN else CLEAR_SHARE)
        return 0 if is_plain or not others else self._random.choice(sorted(others))

    def begin(self, k: int) -> int:
        """Begin to try *k* draft tokens, and return that."""
        self._num_rounds, self._next = 0, None
        if k:
            self._num_alike, self._last = self._num_alike + 1, k
        return k
