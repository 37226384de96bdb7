"""Spreads work over rounds, so that it takes a small share of their time."""

from typing import NamedTuple


class Share(NamedTuple):
    """How often work is done: in one round of so many that it takes *of_time* of the time, of *rounds* at most."""

    of_time: float
    rounds: int


class Pace:
    """In which rounds work is done that takes too long for every round. It is due in the first one."""

    def __init__(self) -> None:
        self._num_left = 0

    @property
    def is_due(self) -> bool:
        """Whether it is done in this round."""
        return self._num_left <= 0

    def skip(self) -> None:
        """Count a round without it."""
        self._num_left -= 1

    def advance(self) -> None:
        """Let it be due at once."""
        self._num_left = 0

    def done(self, seconds: float, round_s: float, share: Share) -> None:
        """Count a round in which it was done and took *seconds*, where rounds take *round_s*, 0 if that is unknown."""
        self._num_left = min(share.rounds - 1, int(seconds / (share.of_time * round_s))) if round_s else 0
