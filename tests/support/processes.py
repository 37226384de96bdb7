"""The `slipstream` command in a process of its own, and waiting for processes and conditions."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def slipstream(*given: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a command as users do, in a wide terminal."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "slipstream", *given],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd=ROOT,
        env=environment,
    )


def is_running(pid: int) -> bool:
    """Return whether *pid* runs or is stopped; a zombie does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 10.0, what: object = "") -> float:
    """Wait for *condition*, at most *seconds*; return how many seconds it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"not within {seconds} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - started


def wait_gone(pids: list[int], seconds: float = 20.0) -> None:
    """Wait until none of *pids* runs."""
    wait_until(lambda: not any(map(is_running, pids)), seconds, [pid for pid in pids if is_running(pid)])
