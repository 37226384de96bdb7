"""Compiled libraries on disk, one folder per key, checked before they are loaded.

An entry is written to a temporary folder and becomes visible by a rename, so processes that compile the same at once do
not disturb each other: the first wins. `manifest.json` has the SHA-256 of every other file.
"""

import hashlib
import json
import logging
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from workers.cache_folder import CacheFolderError, cache_folder

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
COSTS = "costs"
FAILURE = "failure"
UNFINISHED = ".new-"
ABANDONED_S = 86400.0


def find(key: str) -> Path | None:
    """Return the folder of an entry; None if there is none, or it was damaged and is removed."""
    try:
        folder = cache_folder("compiled") / key
    except CacheFolderError:
        return None
    if not folder.is_dir():
        return None
    reason = _damage(folder)
    if reason is None:
        return folder
    logger.warning("%s is damaged (%s): it is removed and compiled again", folder, reason)
    shutil.rmtree(folder, ignore_errors=True)
    return None


def begin() -> Path:
    """Make a temporary folder for a new entry; remove those of killed processes. Raises `CacheFolderError`."""
    root = cache_folder("compiled")
    for path in root.glob(f"{UNFINISHED}*"):
        with suppress(FileNotFoundError):  # another process has published or removed it meanwhile
            if time.time() - path.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(path, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=root))


def publish(folder: Path, key: str) -> None:
    """Make the entry written to *folder*, which `begin` made, visible as *key*; another's failure gives way to it."""
    files = {path.name: _digest(path) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps(files))
    if FAILURE not in files and read_failure(folder.parent / key) is not None:
        shutil.rmtree(folder.parent / key, ignore_errors=True)
    try:
        folder.rename(folder.parent / key)
    except OSError:  # another process was first
        shutil.rmtree(folder, ignore_errors=True)


def read_costs(key: str) -> Any | None:
    """Return the step costs that were written under *key*; None if there are none."""
    folder = find(key)
    return None if folder is None else json.loads((folder / COSTS).read_text())


def write_costs(key: str, costs: Any) -> None:
    """Keep measured step costs for later starts. A full disk costs later starts the time to measure again."""
    _keep(key, COSTS, json.dumps(costs), "measured step costs are not kept: %s")


def read_failure(folder: Path) -> str | None:
    """Return why an entry could not be compiled; None if it was compiled."""
    path = folder / FAILURE
    return path.read_text() if path.is_file() else None


def write_failure(key: str, reason: str) -> None:
    """Keep the reason why an entry cannot be compiled, so that later starts do not try."""
    _keep(key, FAILURE, reason, "the failure to compile is not kept: %s")


def _keep(key: str, name: str, text: str, complaint: str) -> None:
    """Publish an entry of one file; log *complaint* if that fails."""
    try:
        folder = begin()
        (folder / name).write_text(text)
        publish(folder, key)
    except (OSError, CacheFolderError) as error:
        logger.warning(complaint, error)


def _damage(folder: Path) -> str | None:
    """Return what is wrong with an entry."""
    try:
        files = json.loads((folder / MANIFEST).read_text())
        wrong = [name for name, digest in files.items() if _digest(folder / name) != digest]
    except (OSError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return f"{wrong[0]} has another hash" if wrong else None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
