"""The folder in which this user's compiled code is kept between starts."""

import os
import platform
import shlex
import shutil
from pathlib import Path


class CacheFolderError(Exception):
    """The folder cannot be used; the message is one line."""


def cache_folder(*names: str) -> Path:
    """Return the folder *names* in `$XDG_CACHE_HOME/slipstream`, by default `~/.cache/slipstream`; make it if missing.

    Raises:
        CacheFolderError: it cannot be made, or belongs to another user, who could put libraries there.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "slipstream"
    for name in ("", *names):
        folder /= name
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise CacheFolderError(f"{folder} cannot be created: {error}") from error
        if folder.stat().st_uid != os.getuid():
            raise CacheFolderError(f"{folder} belongs to another user")
    return folder


def processor() -> str:
    """Return the model and features of this machine's processor."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return platform.processor()
    wanted = ("model name", "flags", "Features")
    lines = info.read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(wanted))


def compiler_version(name: str) -> str:
    """Return what differs between versions of a compiler: its file, and that one's size and time.

    It is not run: this is part of the key of every look-up.
    """
    found = shutil.which(shlex.split(name)[-1])  # it may be called through ccache
    if found is None:
        return "none"
    path = Path(found).resolve()
    stat = path.stat()
    return f"{path} {stat.st_size} {stat.st_mtime_ns}"
