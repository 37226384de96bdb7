"""Names of checkpoints, a folder or a Hub id, and whether the Hub can be reached."""

import os
import socket
import time
from functools import lru_cache
from pathlib import Path

from protos.errors import ModelError

PATH_STARTS = (".", "/", "~")
ASK_AGAIN_S = 60.0
TIMEOUT_S = 10.0


def folder_of(model: str) -> Path | None:
    """Return the folder that *model* names, None for a Hub id.

    A Hub id is `name` or `owner/name`, and `owner` is not an existing folder.

    Raises:
        ModelError: *model* is a path, and there is no such folder.
    """
    path = Path(os.path.expanduser(model))  # noqa: PTH111 - Path.expanduser fails for unknown users
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(f"not a folder: {model}")
    if path.is_absolute():  # it may exist where it was named, and this be another machine
        raise ModelError(f"no such folder: {model}, on the machine {socket.gethostname()}")
    if model.startswith(PATH_STARTS) or model.count("/") > 1:
        raise ModelError(f"no such folder: {model}")
    if "/" in model and path.parent.is_dir():
        raise ModelError(f"no such folder: {model} (not read as a Hub id, because the folder {path.parent} exists)")
    return None


def absolute(path: str) -> str:
    """Return the absolute *path* of what exists on this machine, for processes elsewhere; else *path*, as a Hub id."""
    found = Path(os.path.expanduser(path))  # noqa: PTH111 - as above
    return str(found.absolute()) if found.exists() else path


def unreachable() -> str | None:
    """Return why the Hub cannot be reached, None if it can. Remembered for a minute.

    The Hub's client itself retries for 24 s per file and logs each attempt.
    """
    return _unreachable(int(time.monotonic() / ASK_AGAIN_S))


@lru_cache(maxsize=1)
def _unreachable(_minute: int) -> str | None:
    from huggingface_hub import constants, get_session  # noqa: PLC0415 - slow to load, and folders need none of it

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT_S)
    except client_errors() as error:
        return reason(error)
    return None


def client_errors() -> tuple[type[Exception], ...]:
    """Return every error of the Hub's client: no answer, an answer with an error, a name that is no id."""
    from huggingface_hub import errors  # noqa: PLC0415

    # The client's HTTP library, whose name depends on the version, has a base class of its own errors.
    (library, *_) = errors.HfHubHTTPError.__bases__
    return (library, OSError, ValueError, errors.NotASafetensorsRepoError, errors.SafetensorsParsingError)


def reason(error: BaseException) -> str:
    """Return *error* in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
