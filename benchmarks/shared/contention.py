"""What takes CPU time from a process: busy processes beside it, and a quota around it."""

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from workers.threads import busy_seconds, cpu_groups, process_seconds, usable_cores

SPIN = f"""
import os
while os.getppid() == {os.getpid()}:
    for _ in range(1_000_000):
        pass
"""
"""Ends with the process that started it."""
PERIOD_US = 100_000


@contextmanager
def busy_processes(count: int) -> Iterator[list[int]]:
    """Run *count* processes that compute without a pause, in pure Python; yield their ids."""
    running = [subprocess.Popen([sys.executable, "-I", "-S", "-c", SPIN]) for _ in range(count)]
    try:
        yield [process.pid for process in running]
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()


def others_seconds(pids: Iterable[int]) -> float:
    """Return the CPU seconds that processes other than *pids* and this one have taken on this one's processors."""
    return busy_seconds(usable_cores()) - sum(map(process_seconds, pids)) - time.process_time()


class QuotaGroup:
    """A cgroup, version 1 or 2, whose processes may use *cores*' worth of CPU time together.

    Args:
        cores: the quota.
        root: where `proc` and `sys/fs/cgroup` are.

    Raises:
        OSError: no group can be made here, with the reason of each attempt.
    """

    def __init__(self, cores: float, root: Path = Path("/")) -> None:
        reasons = []
        for parent in cpu_groups(root):
            if not (parent / "cgroup.procs").exists():
                continue
            self._parent, self._folder = parent, parent / f"slipstream-benchmark-{os.getpid()}"
            try:
                self._make(cores)
                return
            except OSError as error:
                reasons.append(str(error))
        raise OSError("; ".join(reasons) or "no cgroup with a cpu controller is mounted")

    def _make(self, cores: float) -> None:
        """Make the group below the parent; leave nothing behind if it cannot be limited."""
        self._folder.mkdir()
        try:
            self._limit(cores)
        except OSError:
            self.close()
            raise

    def _limit(self, cores: float) -> None:
        if (self._parent / "cpu.cfs_quota_us").exists():
            (self._folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self._folder / "cpu.cfs_quota_us").write_text(str(round(cores * PERIOD_US)))
        else:
            (self._parent / "cgroup.subtree_control").write_text("+cpu")
            (self._folder / "cpu.max").write_text(f"{round(cores * PERIOD_US)} {PERIOD_US}")

    @contextmanager
    def around(self, pid: int) -> Iterator[list[int]]:
        """Limit the process, and those that it starts, within the block; yield the ids of its neighbours: none."""
        try:
            (self._folder / "cgroup.procs").write_text(str(pid))
            yield []
        finally:
            (self._parent / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Remove the group, which must be empty."""
        self._folder.rmdir()
