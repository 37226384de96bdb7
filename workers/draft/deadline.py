"""How long target rank 0 waits for the draft: one deadline per outage."""

from collections import deque
from collections.abc import Callable
from statistics import median

from protos.worker_messages import Drafted

FLOOR_S = 0.05
LEG_FACTOR = 3.0
MEMORY = 32
"""Number of legs and steps that the medians are of."""


class DraftDeadline:
    """Counts from when target rank 0 could verify a round. Not thread-safe.

    It follows the measured leg of the draft: drafting, and the way of the plan there and of the table back. A draft on
    another machine is waited for as long as that can pay. The legs of late tables count, too.

    After a missed deadline, target rank 0 does not wait until the draft is on time again: until the table of some round
    arrives within the deadline counted from when target rank 0 could verify that round.

    Args:
        clock: seconds, monotonic.
        floor_s: the shortest deadline.
    """

    def __init__(self, clock: Callable[[], float], floor_s: float = FLOOR_S) -> None:
        self._clock, self._floor_s = clock, floor_s
        self._leg_s: deque[float] = deque(maxlen=MEMORY)
        self._step_s: deque[float] = deque(maxlen=MEMORY)
        self._started: dict[int, tuple[float, float]] = {}  # by round: start and deadline, seconds
        self._newest = -1
        self.is_skipping = False

    def start(self, round_number: int, k: int) -> float:
        """Start the deadline of a round; return how many seconds to wait for *k* draft tokens a row."""
        limit = self.limit_s(k)
        self._newest = round_number
        self._started[round_number] = self._clock(), limit
        for old in [started for started in self._started if started < round_number - MEMORY]:
            del self._started[old]
        return 0.0 if self.is_skipping else limit

    def arrived(self, drafted: Drafted) -> None:
        """Record that the table of a round has arrived."""
        started, limit = self._started.pop(drafted.round, (None, 0.0))
        waited_s = 0.0 if started is None else self._clock() - started
        self._leg_s.append(max(drafted.propose_s, waited_s))
        if drafted.round > self._newest or (started is not None and waited_s <= limit):
            self.is_skipping = False

    def missed(self) -> None:
        """Record a missed deadline."""
        self.is_skipping = True

    def scored(self, seconds: float) -> None:
        """Record the duration of a round, without waiting."""
        self._step_s.append(seconds)

    def limit_s(self, k: int) -> float:
        """Return the deadline. Waiting longer than *k* steps costs more than *k* accepted draft tokens save."""
        if not self._leg_s:
            return self._floor_s
        wanted = LEG_FACTOR * median(self._leg_s)
        worth = k * median(self._step_s) if self._step_s else wanted
        return max(self._floor_s, min(wanted, worth))
