"""Whether processes of this machine run, and calls that may not return."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
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


def returns_within(seconds: float, call: Callable[[], None]) -> bool:
    """Run *call* in a thread and return whether it returned in *seconds*. If it did not, it goes on by itself.

    Where no thread can be started, as when the interpreter exits, *call* runs here.

    Raises:
        Exception: what *call* raised within the time.
    """
    done: Future[None] = Future()
    try:
        threading.Thread(target=_settle, args=(done, call), name="slipstream-call", daemon=True).start()
    except RuntimeError:
        _settle(done, call)
    try:
        done.result(seconds)
    except FutureTimeout:
        return False
    return True


def _settle(done: "Future[None]", call: Callable[[], None]) -> None:
    try:
        call()
    except Exception as error:
        done.set_exception(error)
    else:
        done.set_result(None)
