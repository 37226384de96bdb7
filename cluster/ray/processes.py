"""Whether processes of this machine run."""

import time
from pathlib import Path


def gone_within(pid: int, seconds: float) -> bool:
    """Wait up to *seconds* for process *pid* of this machine to end; return whether it did. A zombie has ended."""
    deadline = time.monotonic() + seconds
    while is_running(pid):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.005)
    return True


def is_running(pid: int) -> bool:
    """Whether process *pid* of this machine exists and is no zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"
