"""The number of CPU threads that a process computes with: chosen at start, revised while serving.

OpenMP's threads wait for each other in every operator, so one of them that is not scheduled stops all others: beside
one busy process, two threads on two cores take four times as long as one thread. A process therefore uses as many
threads as there are cores that other processes leave free, by affinity, cgroup quota and the kernel's CPU times.

A number that the user sets (`num_threads`, `OMP_NUM_THREADS`) is used as it is.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch._inductor.config

from protos.config.engine import EngineConfig

logger = logging.getLogger(__name__)

PERIOD_S = 0.25
"""How often the number is revised. The kernel counts CPU time in steps of 10 ms."""
STALE_S = 2.0
"""Times over a longer period, with a pause between requests or the start in it, are not used."""
CALM_S = 1.0
"""Cores must be free for this long before threads are added; doubled, to `MAX_CALM_S`, each time that was too early."""
MAX_CALM_S = 32.0
TRIAL_S = 32.0
"""Threads are also added after this long without a change: a neighbour of lower priority takes every core that is left,
but gives it back.
"""
TOO_EARLY_S = 10.0
ROUND_UP = 0.25
"""A thread is added for this part of a core less than a whole one."""
SHORT_OF = 0.35
"""Threads are removed when more than this part of a core is missing. A busy process takes at least half of a core from
a thread of the same weight."""

USER_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class CpuSample(NamedTuple):
    """CPU times at one moment.

    Attributes:
        at: seconds of a monotonic clock.
        cores: that the process may run on.
        quota: cores' worth of time that its cgroups allow; infinite without a limit.
        busy_s: CPU seconds that all processes, and the hypervisor, have taken on these cores.
        own_s: CPU seconds that this process and its parent have taken. The parent is the server of an engine in a
            process of its own; it works only while tokens are made.
    """

    at: float
    cores: int
    quota: float
    busy_s: float
    own_s: float

    def free_since(self, before: "CpuSample") -> float:
        """Return how many cores were not taken by others since *before*, at most the quota."""
        taken = (self.busy_s - before.busy_s) - (self.own_s - before.own_s)
        return min(self.quota, self.cores - max(0.0, taken) / max(1e-3, self.at - before.at))


class ThreadCount:
    """The number of threads of the calling thread's operators. Call `revise` between steps, from `due` on.

    Args:
        most: threads at start, and at most.
        set_threads: called with each new number.
        sample: returns the current CPU times.
    """

    def __init__(self, most: int, set_threads: Callable[[int], None], sample: Callable[[], CpuSample]) -> None:
        self.most = self.count = most
        self._set_threads, self._sample = set_threads, sample
        self.forget()

    def forget(self) -> None:
        """Compute with as many threads as at start, as if nothing had been measured yet."""
        self._last = self._sample()
        self.due = self._last.at + PERIOD_S
        self._free_s, self._calm_s = 0.0, CALM_S
        self._changed_at = self._added_at = float("-inf")
        if self.count != self.most:
            self.count = self.most
            self._set_threads(self.count)

    def revise(self) -> None:
        """Set the number that suits the cores that were free since the last call."""
        last, self._last = self._last, self._sample()
        self.due = self._last.at + PERIOD_S
        if self._last.at - last.at > STALE_S:
            return
        free = self._last.free_since(last)
        fitting = whole_threads(free, self.most)
        self._free_s = self._free_s + self._last.at - last.at if fitting > self.count else 0.0
        if free < self.count - SHORT_OF and fitting < self.count:
            if self._last.at - self._added_at < TOO_EARLY_S:
                self._calm_s = min(2 * self._calm_s, MAX_CALM_S)
            elif self._last.at - self._changed_at >= TOO_EARLY_S:
                self._calm_s = CALM_S
            self._change(fitting, free)
        elif self._free_s >= self._calm_s:
            self._added_at = self._last.at
            self._change(fitting, free)
        elif self.count < self.most and self._last.at - self._changed_at >= TRIAL_S:
            self._change(min(2 * self.count, self.most), free)

    def _change(self, count: int, free: float) -> None:
        logger.info("%d CPU threads instead of %d: %.1f cores are free", count, self.count, free)
        self.count, self._free_s, self._changed_at = count, 0.0, self._last.at
        self._set_threads(count)


def whole_threads(free: float, most: int) -> int:
    """Return the number of threads for *free* cores: at least one, at most *most*."""
    return max(1, int(min(free + ROUND_UP, most)))


def choose_threads(config: EngineConfig) -> ThreadCount | None:
    """Set this process's number of threads; return what revises it, or None where the user chose the number.

    The number is torch's default, which respects affinity, but at most the cgroup's quota. To be called before models
    are compiled: generated code may use fewer threads than when it was compiled, but not more.
    """
    if config.model.num_threads:
        torch.set_num_threads(config.model.num_threads)
        return None
    if any(name in os.environ for name in USER_VARIABLES):
        return None
    most = whole_threads(cpu_quota(), torch.get_num_threads())
    torch.set_num_threads(most)
    # Otherwise the compiler writes the number into the code, unless it is that of all processors.
    torch._inductor.config.cpp.dynamic_threads = 1 < most < (os.cpu_count() or 1)
    return ThreadCount(most, torch.set_num_threads, sample_cpu)


def sample_cpu(root: Path = Path("/")) -> CpuSample:
    """Return the current CPU times. Without Linux's files nothing is ever taken by others."""
    cores = usable_cores()
    own_s = time.process_time() + process_seconds(os.getppid(), root)
    return CpuSample(time.monotonic(), len(cores), cpu_quota(root), busy_seconds(cores, root), own_s)


def usable_cores() -> frozenset[int]:
    """Return the indices of the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def busy_seconds(cores: frozenset[int], root: Path = Path("/")) -> float:
    """Return the seconds that *cores* have not been idle since boot; 0.0 if the kernel does not report them."""
    names = {f"cpu{core}" for core in cores}
    fields = (line.split() for line in _text(root / "proc/stat").splitlines() if line.startswith("cpu"))
    # user nice system idle iowait irq softirq steal; guests are part of user and nice
    ticks = sum(int(value) for name, *values in fields if name in names for value in (*values[:3], *values[5:8]))
    return ticks / os.sysconf("SC_CLK_TCK")


def process_seconds(pid: int, root: Path = Path("/")) -> float:
    """Return the CPU seconds that process *pid* has taken; 0.0 if it is not known here."""
    # The name, in parentheses, may contain anything. After it: state, ten fields, utime, stime.
    fields = _text(root / "proc" / str(pid) / "stat").rpartition(")")[2].split()
    return sum(int(ticks) for ticks in fields[11:13]) / os.sysconf("SC_CLK_TCK")


def cpu_quota(root: Path = Path("/")) -> float:
    """Return the CPU time that the process's cgroups allow, in cores; infinite without a limit.

    Reads version 2 (`cpu.max`) and version 1 (`cpu.cfs_quota_us`), of the process's group and the groups around it. In
    a container, the path of its group may be the host's, and only the mounted root is the container's.
    """
    return min((quota for folder in cpu_groups(root) for quota in _quotas(folder)), default=float("inf"))


def cpu_groups(root: Path = Path("/")) -> Iterator[Path]:
    """Return the folders of the process's groups of the cpu controller, and of all groups around them."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            group = Path(path.lstrip("/"))
            mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
            yield from (mount / part for part in (group, *group.parents))


def _quotas(folder: Path) -> Iterator[float]:
    """Return the quota that *folder* sets, in cores; nothing if it sets none."""
    quota, period = (_text(folder / "cpu.max").split() or ("max", ""))[:2]
    if quota == "max":
        quota, period = _text(folder / "cpu.cfs_quota_us").strip(), _text(folder / "cpu.cfs_period_us").strip()
    if quota and period and int(quota) > 0:
        yield int(quota) / int(period)


def _text(path: Path) -> str:
    """Return the content of a file of the kernel, empty if there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
