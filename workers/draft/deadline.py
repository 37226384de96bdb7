"""How long target 0 waits for the draft: one deadline per outage. DESIGN section 4."""

from collections import deque
from collections.abc import Callable
from statistics import median

from protos.worker_messages import Drafted

FLOOR_S = 0.05
LEG_FACTOR = 3.0
MEMORY = 32
"""Legs and steps that the medians are of."""


class DraftDeadline:
    """Counts from when target 0 could verify. Used under its owner's lock.

    After a miss nothing is waited for until the draft is on time again: until ids of a round arrive no later than the
    deadline after target 0 could verify *that* round, waited for or not.

    Args:
        clock: seconds, monotonic.
        floor_s: the shortest deadline.
    """

    def __init__(self, clock: Callable[[], float], floor_s: float = FLOOR_S) -> None:
        self._clock, self._floor_s = clock, floor_s
        self._legs: deque[float] = deque(maxlen=MEMORY)
        self._steps: deque[float] = deque(maxlen=MEMORY)
        self._asked: dict[int, tuple[float, float]] = {}  # by round: when it could verify, and its deadline in seconds
        self._newest = -1
        self.is_skipping = False

    def ask(self, round_number: int, k: int) -> float:
        """Target 0 could verify this round now; return how many seconds it should wait for *k* guesses a row."""
        limit = self.limit_s(k)
        self._newest = round_number
        self._asked[round_number] = self._clock(), limit
        for old in [asked for asked in self._asked if asked < round_number - MEMORY]:
            del self._asked[old]
        return 0.0 if self.is_skipping else limit

    def arrived(self, drafted: Drafted) -> None:
        """The ids of a round are here."""
        self._legs.append(drafted.propose_s)
        asked = self._asked.pop(drafted.round, None)
        if drafted.round > self._newest or (asked is not None and self._clock() - asked[0] <= asked[1]):
            self.is_skipping = False

    def missed(self) -> None:
        """It was waited for in vain."""
        self.is_skipping = True

    def scored(self, seconds: float) -> None:
        """A round without waiting took this long."""
        self._steps.append(seconds)

    def limit_s(self, k: int) -> float:
        """Return the deadline. Waiting longer than *k* steps could not pay even if all *k* guesses were right."""
        if not self._legs:
            return self._floor_s
        wanted = LEG_FACTOR * median(self._legs)
        worth = k * median(self._steps) if self._steps else wanted
        return max(self._floor_s, min(wanted, worth))
