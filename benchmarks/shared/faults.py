"""The actors of a replica on this machine's Ray: their processes and their memory, and faults injected into them."""

import asyncio
import contextlib
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.util
from ray.exceptions import RayError

from cluster.ray.placement import Placement
from cluster.ray.processes import is_running
from protos.stats import EngineStats

ANSWER_S = 5.0
SPARE = "spare "
FROZEN_S = 10.0
SAMPLE_EVERY_S = 5.0
SETTLED_S = 15.0
"""A process of this age has finished loading."""
MIN_SAMPLES = 6
INCARNATION = re.compile(r" \(restart \d+\)$")
STEADY_STEPS = 60
"""Rounds that a rebuilt target group runs before the next fault: the engine gives up if it is lost too often."""

# Ray leaves these functions without types.
_ray: Any = ray


@dataclass(frozen=True)
class Kind:
    """A signal to a process of a role. `for_s`: seconds until a stopped process continues; None: never."""

    role: str
    number: signal.Signals
    for_s: float | None = None

    def __str__(self) -> str:
        return f"{self.role} {self.number.name}" + ("" if self.for_s is None else f" for {self.for_s:.0f} s")


KINDS = (
    Kind("draft", signal.SIGKILL),
    Kind("draft", signal.SIGSTOP),
    Kind("draft", signal.SIGSTOP, FROZEN_S),
    Kind("target", signal.SIGKILL),
    Kind("target", signal.SIGSTOP),
)


class Actors:
    """The replica's processes by the names of their actors: "controller", "target rank 0 (restart 2)"."""

    def __init__(self, placement: Placement) -> None:
        self._prefix = placement.name_of("")
        self.pids: dict[str, int] = {}
        """Process ids of all actors seen so far, by the names that they were started with."""
        self._roles: dict[str, str] = {}  # the workers that spares have become

    def refresh(self) -> dict[str, int]:
        """List the running actors; return their names and process ids. A spare that took over has its worker's name."""
        names = [name for name in ray.util.list_named_actors() if name.startswith(self._prefix)]
        alive = {who: pid for name in names if (pid := self._pid(who := name.removeprefix(self._prefix))) is not None}
        return {self._role_of(who): pid for who, pid in alive.items()}

    def _role_of(self, who: str) -> str:
        """Return the worker that actor *who* is: its name, unless it was started as a spare."""
        if who.startswith(SPARE) and who not in self._roles:
            with contextlib.suppress(RayError, ValueError, TimeoutError):
                asked = _ray.get_actor(self._prefix + who).role.remote()
                if worker := str(_ray.get(asked, timeout=ANSWER_S)):
                    self._roles[who] = worker
        return self._roles.get(who, who)

    def _pid(self, who: str) -> int | None:
        """Return the id of a running process, which was found earlier or answers now: a stopped one cannot answer."""
        if who not in self.pids:
            with contextlib.suppress(RayError, ValueError, TimeoutError):
                where = _ray.get_actor(self._prefix + who).location.remote()
                self.pids[who] = int(_ray.get(where, timeout=ANSWER_S).pid)
        pid = self.pids.get(who)
        return pid if pid is not None and is_running(pid) else None

    def orphans(self) -> list[int]:
        """Return the ids of the processes that still run."""
        return [pid for pid in self.pids.values() if is_running(pid)]


def role(who: str) -> str:
    """Return a name without its incarnation."""
    return INCARNATION.sub("", who)


@dataclass
class Faults:
    """Injects a fault of a random kind every *every_s* seconds. `done` counts them by kind; `log` has times and names.

    Attributes:
        stats: the engine's counters now.
    """

    actors: Actors
    stats: Callable[[], EngineStats]
    rng: random.Random
    every_s: float
    done: Counter[str] = field(default_factory=Counter)
    log: list[tuple[float, str, str]] = field(default_factory=list)
    _thawing: set[asyncio.Task[None]] = field(default_factory=set)
    _targets_due: int = 0  # target losses, and steps, to wait for before the next fault of a target
    _steps_due: int = 0

    async def run(self, until: float) -> None:
        """Inject faults until *until* on the monotonic clock, the last one early enough to recover from it."""
        began = time.monotonic()
        while time.monotonic() + 2 * self.every_s < until:
            await asyncio.sleep(self.every_s)
            kind = self.rng.choice(KINDS)
            who, pid = await self._victim(kind.role, until)
            if pid:
                self.log.append((time.monotonic() - began, str(kind), who))
                self._inject(kind, pid)
        await asyncio.gather(*self._thawing)

    async def _victim(self, wanted: str, until: float) -> tuple[str, int]:
        """Wait for a process of a role; return its name and id, or `("", 0)` if there is none in time."""
        while time.monotonic() < until:
            alive = await asyncio.to_thread(self.actors.refresh)
            found = sorted((who, pid) for who, pid in alive.items() if who.startswith(wanted))
            if found and (wanted == "draft" or self._is_steady()):
                return self.rng.choice(found)
            await asyncio.sleep(0.5)
        return "", 0

    def _is_steady(self) -> bool:
        """Whether the target group that was hit last has been replaced, and the new one serves."""
        stats = self.stats()
        return stats.target_losses >= self._targets_due and stats.steps >= self._steps_due

    def _inject(self, kind: Kind, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, kind.number)
            self.done[str(kind)] += 1
            if kind.role == "target":
                stats = self.stats()
                self._targets_due, self._steps_due = stats.target_losses + 1, stats.steps + STEADY_STEPS
            if kind.for_s is not None:
                self._thawing.add(asyncio.create_task(self._thaw(pid, kind.for_s)))

    async def _thaw(self, pid: int, after_s: float) -> None:
        await asyncio.sleep(after_s)
        if is_running(pid):
            os.kill(pid, signal.SIGCONT)


@dataclass
class Memory:
    """RssAnon of every process over time, this one included: [(seconds, MiB)] by name."""

    actors: Actors
    series: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    async def run(self) -> None:
        """Sample until cancelled."""
        began = time.monotonic()
        while True:
            alive = await asyncio.to_thread(self.actors.refresh)
            for who, pid in {**alive, "front end": os.getpid()}.items():
                held = anonymous_mib(pid)
                if held is not None:
                    self.series.setdefault(who, []).append((time.monotonic() - began, held))
            await asyncio.sleep(SAMPLE_EVERY_S)

    def report(self) -> dict[str, dict[str, Any]]:
        """Return by role: minimum, maximum, and growth in MiB per minute, of all processes and of the longest-lived.

        The first seconds of each process are left out.
        """
        return {
            name: _growth([self._settled(who) for who in self.series if role(who) == name])
            for name in sorted({role(who) for who in self.series})
        }

    def _settled(self, who: str) -> list[tuple[float, float]]:
        samples = self.series[who]
        return [sample for sample in samples if sample[0] >= samples[0][0] + SETTLED_S]


def _growth(lives: list[list[tuple[float, float]]]) -> dict[str, Any]:
    lives = [samples for samples in lives if samples]
    everything = sorted(sample for samples in lives for sample in samples)
    held = [mib for _, mib in everything]
    longest: list[tuple[float, float]] = max(lives, key=len, default=[])
    return {
        "lives": len(lives),
        "samples": len(held),
        "least_mib": min(held, default=None),
        "most_mib": max(held, default=None),
        "mib_a_minute": _slope(everything),
        "mib_a_minute_in_the_longest_life": _slope(longest),
    }


def _slope(samples: list[tuple[float, float]]) -> float | None:
    """Return the slope of the least-squares line in MiB per minute; None for too few samples."""
    if len(samples) < MIN_SAMPLES:
        return None
    seconds, mib = np.array(samples).T
    return float(np.polyfit(seconds / 60.0, mib, 1)[0])


def anonymous_mib(pid: int) -> float | None:
    """Return the RssAnon of a process, None if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) / 1024 if found else None
