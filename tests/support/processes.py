"""Waiting for processes and conditions."""

import time
from collections.abc import Callable
from pathlib import Path


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
