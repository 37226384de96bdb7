"""Starting Python subprocesses of this package, and folders for the sockets between them."""

import contextlib
import ctypes
import json
import signal
import sys
import tempfile
from pathlib import Path

SOCKET_FOLDER_LIMIT = 90
"""The system limits a socket's path to about 107 bytes; longer temporary folders are not used."""

PR_SET_PDEATHSIG = 1


def at_parents_death(number: signal.Signals) -> None:
    """Make the kernel send this process a signal when the thread that started it ends, even while it is stopped."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux: rely on a pipe
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def python_command(module: str) -> list[str]:
    """Return the command that calls `main()` of *module* in a new interpreter with this one's import path."""
    start = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {module} import main; main()"
    return [sys.executable, "-c", start, json.dumps(sys.path)]


def socket_folder() -> Path:
    """Make an empty folder that only this user can read, with a path short enough for sockets in it."""
    folder = Path(tempfile.mkdtemp(prefix="slipstream-"))
    if len(str(folder)) <= SOCKET_FOLDER_LIMIT:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="slipstream-", dir="/tmp"))
