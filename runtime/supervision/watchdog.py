"""Detects hangs: a worker that sends no heartbeat, a round that takes too long, a start that stands still."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from protos.worker_messages import Died, FromWorker, Heartbeat, Role, WorkerId

Clock = Callable[[], float]

SILENT_S = 3.0
"""A serving worker from which nothing arrived for this long hangs; a separate thread sends its heartbeats."""
MOST = 0.7
"""Of a machine that is cut off all workers are silent, not quite since the same moment."""
SILENT_LOADING_S = 60.0
"""The same for a worker that is started: importing, loading and compiling may block the interpreter."""
SILENT_RESTARTING_S = 25.0
"""The same if workers of its role were started before: what they read is likely in memory."""
STANDSTILL_S = 25.0
"""A start that takes longer than earlier ones stands still if no worker of the role does anything for this long."""
DOES_CPU_S = 0.5
"""CPU time by which a process shows that it does something; its heartbeats alone take less in `STANDSTILL_S`."""
STEP_S = 5.0
STEP_FACTOR = 20.0
"""A round hangs after this many times its predicted time, and after `STEP_S` at the earliest."""
MAX_TICK_S = 1.0
"""Longest time between two calls of `tick` that counts: if the controller itself was paused, no worker is to blame."""


@dataclass(slots=True)
class _Watched:
    heard_at: float
    limit_s: float
    began: float | None = None  # None once it serves
    cpu_s: float = 0.0  # when it last did something


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
        self._start_s: dict[Role, float] = {}  # the longest start that ended well
        self._active_at: dict[Role, float] = {}  # when a worker that is started last did something

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
        """Watch a worker that is started, and whose process runs."""
        limit_s = SILENT_RESTARTING_S if worker.role in self._start_s else SILENT_LOADING_S
        self._workers[worker] = _Watched(self._now, limit_s, self._now)
        self.mark_active(worker.role)

    def mark_serving(self, worker: WorkerId) -> None:
        """Watch a worker that serves from now on."""
        watched = self._workers.get(worker)
        if watched is not None and watched.began is not None:
            took_s = self._now - watched.began
            self._start_s[worker.role] = max(took_s, self._start_s.get(worker.role, 0.0))
        self._workers[worker] = _Watched(self._now, SILENT_S)

    def mark_active(self, role: Role) -> None:
        """Record that the workers of *role* that are started do something, or wait for something that may take long."""
        self._active_at[role] = self._now

    def watches(self, worker: WorkerId) -> bool:
        """Whether the worker's process is known to run, or to have run."""
        return worker in self._workers

    def remove(self, worker: WorkerId) -> None:
        """Stop watching a worker."""
        self._workers.pop(worker, None)

    def heard(self, worker: WorkerId, message: FromWorker) -> None:
        """Record a message of a worker; the first one of a worker that is started adds it."""
        if worker not in self._workers and not isinstance(message, Died):
            self.add(worker)
        watched = self._workers.get(worker)
        if watched is None:
            return
        watched.heard_at = self._now
        if not isinstance(message, Heartbeat):
            self.mark_active(worker.role)
        elif message.cpu_s - watched.cpu_s >= DOES_CPU_S:
            watched.cpu_s = message.cpu_s
            self.mark_active(worker.role)

    def silent(self) -> list[tuple[WorkerId, str]]:
        """Return the workers that hang, with the reason."""
        reasons = [(worker, self._hang(worker, watched)) for worker, watched in self._workers.items()]
        return [(worker, why) for worker, why in reasons if why is not None]

    def is_silent(self, worker: WorkerId) -> bool:
        """Whether no heartbeat has come from the worker for most of its limit."""
        watched = self._workers.get(worker)
        return watched is not None and self._now - watched.heard_at > MOST * watched.limit_s

    def _hang(self, worker: WorkerId, watched: _Watched) -> str | None:
        silence_s = self._now - watched.heard_at
        if silence_s > watched.limit_s:
            return f"no heartbeat for {silence_s:.1f} s"
        usual_s = self._start_s.get(worker.role)
        if watched.began is None or usual_s is None or self._now - watched.began <= usual_s:
            return None
        if self._now - self._active_at[worker.role] <= STANDSTILL_S:
            return None
        return f"its start takes longer than the {usual_s:.0f} s of earlier ones, and stands still"

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
