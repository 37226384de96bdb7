"""The first rounds of an engine, in which drafts are tried whether they seem to pay or not."""

FIRST_ROUNDS, FIRST_PLAIN = 48, 6
"""So many first rounds decide nothing: the very first take longer than later ones. The last of them are plain."""
MOST_LOST_FIRST = 32.0
"""What the first rounds may lose against plain decoding, in plain rounds. After that, only the plain ones are left.

A draft that is 20 ms away would take seconds to show what a few rounds have shown.
"""


class FirstRounds:
    """Counts the first rounds.

    Args:
        limit: most draft tokens of a row. A round counts as having lost so many plain rounds at most: one that was
            disturbed shows nothing of later ones.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_left = FIRST_ROUNDS
        self._lost = 0.0  # plain rounds

    @property
    def are_over(self) -> bool:
        """Whether decisions are made."""
        return self._num_left == 0

    def start(self) -> bool:
        """Count a round; return whether it drafts."""
        self._num_left -= 1
        return self._num_left >= FIRST_PLAIN

    def end_round(self, lost_s: float, plain_s: float) -> None:
        """Count what a round lost, of whose shape a plain round takes *plain_s*."""
        if self._num_left <= FIRST_PLAIN or not plain_s:
            return
        self._lost += min(lost_s / plain_s, float(self._limit))
        if self._lost > MOST_LOST_FIRST:
            self._num_left = FIRST_PLAIN
