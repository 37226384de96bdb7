"""Who is silent, and whether a round takes too long. DESIGN section 4: a hang is no heartbeat, or an overlong step."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from protos.worker_messages import WorkerId

Clock = Callable[[], float]

SILENT_S = 3.0
"""A serving worker that was not heard of for this long hangs; heartbeats come from a thread of their own."""
SILENT_LOADING_S = 60.0
"""Loading and compiling may keep a worker's interpreter busy for this long."""
STEP_S = 5.0
STEP_FACTOR = 20.0
BLINK_S = 1.0
"""Longest time between two looks that counts: time in which nobody looked says nothing about the workers."""


@dataclass(slots=True)
class _Life:
    heard_at: float
    limit_s: float


class Watchdog:
    """Measures silence and rounds in *watched* time, so that neither a paused controller nor group forming counts.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._looked_at = clock()
        self._watched = 0.0
        self._lives: dict[WorkerId, _Life] = {}
        self._round: tuple[float, float] | None = None

    @property
    def now(self) -> float:
        """Watched seconds so far."""
        return self._watched

    def look(self) -> None:
        """Let time pass. To be called right after everything that came in was noted."""
        now = self._clock()
        self._watched += min(now - self._looked_at, BLINK_S)
        self._looked_at = now

    def add(self, worker: WorkerId) -> None:
        """Watch a worker that was placed, and loads."""
        self._lives[worker] = _Life(self._watched, SILENT_LOADING_S)

    def serves(self, worker: WorkerId) -> None:
        """A watched worker serves from now on."""
        self._lives[worker] = _Life(self._watched, SILENT_S)

    def remove(self, worker: WorkerId) -> None:
        """Watch it no more."""
        self._lives.pop(worker, None)

    def heard(self, worker: WorkerId) -> None:
        """It said something."""
        life = self._lives.get(worker)
        if life is not None:
            life.heard_at = self._watched

    def silent(self) -> list[tuple[WorkerId, str]]:
        """Return the workers that hang, and why we think so."""
        return [
            (worker, f"no heartbeat for {self._watched - life.heard_at:.1f} s")
            for worker, life in self._lives.items()
            if self._watched - life.heard_at > life.limit_s
        ]

    def begin_round(self, predicted_s: float) -> None:
        """A round begins that should take *predicted_s*."""
        self._round = self._watched, max(STEP_S, STEP_FACTOR * predicted_s)

    def extend_round(self, seconds: float) -> None:
        """Do not count *seconds* of the running round: something else kept the workers busy."""
        if self._round is not None:
            self._round = self._round[0] + seconds, self._round[1]

    def end_round(self) -> None:
        """The round is over, or was given up."""
        self._round = None

    def overdue(self) -> str | None:
        """Say so where the running round takes too long."""
        if self._round is None or self._watched - self._round[0] <= self._round[1]:
            return None
        return f"the round takes longer than {self._round[1]:.1f} s"
