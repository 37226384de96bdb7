"""Detects hangs: a worker hangs if it sends no heartbeat, or if a round takes too long."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from protos.worker_messages import WorkerId

Clock = Callable[[], float]

SILENT_S = 3.0
"""A serving worker from which nothing arrived for this long hangs; a separate thread sends its heartbeats."""
SILENT_LOADING_S = 60.0
"""The same for a loading worker: loading and compiling may block the interpreter."""
STEP_S = 5.0
STEP_FACTOR = 20.0
"""A round hangs after this many times its predicted time, and after `STEP_S` at the earliest."""
MAX_TICK_S = 1.0
"""Longest time between two calls of `tick` that counts: if the controller itself was paused, no worker is to blame."""


@dataclass(slots=True)
class _Watched:
    heard_at: float
    limit_s: float


class Watchdog:
    """Measures silence and rounds in watched time: without pauses of the controller and the forming of draft channels.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._ticked_at = clock()
        self._now = 0.0
        self._workers: dict[WorkerId, _Watched] = {}
        self._round: tuple[float, float] | None = None  # begin, and longest time

    @property
    def now(self) -> float:
        """Watched seconds so far."""
        return self._now

    def tick(self) -> None:
        """Advance the watched time. Call it right after all messages were read."""
        now = self._clock()
        self._now += min(now - self._ticked_at, MAX_TICK_S)
        self._ticked_at = now

    def add(self, worker: WorkerId) -> None:
        """Watch a worker that was placed and loads."""
        self._workers[worker] = _Watched(self._now, SILENT_LOADING_S)

    def mark_serving(self, worker: WorkerId) -> None:
        """Watch a worker that serves from now on."""
        self._workers[worker] = _Watched(self._now, SILENT_S)

    def remove(self, worker: WorkerId) -> None:
        """Stop watching a worker."""
        self._workers.pop(worker, None)

    def heard(self, worker: WorkerId) -> None:
        """Record a message of a worker."""
        watched = self._workers.get(worker)
        if watched is not None:
            watched.heard_at = self._now

    def silent(self) -> list[tuple[WorkerId, str]]:
        """Return the workers that hang, with the reason."""
        return [
            (worker, f"no heartbeat for {self._now - watched.heard_at:.1f} s")
            for worker, watched in self._workers.items()
            if self._now - watched.heard_at > watched.limit_s
        ]

    def begin_round(self, predicted_s: float) -> None:
        """Begin a round that should take *predicted_s*."""
        self._round = self._now, max(STEP_S, STEP_FACTOR * predicted_s)

    def extend_round(self, seconds: float) -> None:
        """Exclude *seconds* from the running round: the workers were busy with something else."""
        if self._round is not None:
            self._round = self._round[0] + seconds, self._round[1]

    def end_round(self) -> None:
        """End the round, finished or not."""
        self._round = None

    def overdue(self) -> str | None:
        """Return the reason if the running round takes too long."""
        if self._round is None or self._now - self._round[0] <= self._round[1]:
            return None
        return f"the round takes longer than {self._round[1]:.1f} s"
