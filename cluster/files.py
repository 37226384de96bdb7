"""Files of data that users give, text, JSON and JSON lines; and checks of those that are to be written."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from protos.errors import ConfigError
from protos.validation import why_unreadable

LIST, LINES = ".json", ".jsonl"
"""Suffixes of a file that is one JSON list, and of one with a JSON value in each line."""
UTF8 = "utf-8-sig"
"""UTF-8 with or without a byte order mark, which some editors write."""


def read_text(path: Path) -> str:
    """Return the text of a file. Raises `ConfigError`: it cannot be read."""
    try:
        return path.read_text(encoding=UTF8)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {why_unreadable(error)}") from None


def read_json(path: Path) -> Any:
    """Return the value in a JSON file. Raises `ConfigError`: it cannot be read, or is not JSON."""
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {why_unreadable(error)}") from None


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the lines of a file that are not blank, with their places, `file:line`.

    Not those of `str.splitlines`, which ends lines at characters that JSON allows within text, such as U+2028.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        with path.open(encoding=UTF8, newline="\n") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", line.rstrip("\r\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {why_unreadable(error)}") from None


def read_objects(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the values of a JSONL file with their places, `file:line`; blank lines are skipped.

    Raises:
        ConfigError: the file cannot be read, or a line is not JSON.
    """
    for place, line in read_lines(path):
        try:
            yield place, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{place} is not JSON: {why_unreadable(error)}") from None


def read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the values of a JSONL file, or those of the list in any other file, with their places.

    Raises:
        ConfigError: the file cannot be read, a line is not JSON, or there is no list.
    """
    if path.suffix == LINES:
        yield from read_objects(path)
        return
    rows = read_json(path)
    if not isinstance(rows, list):
        raise ConfigError(f"{path} must hold a list, got {type(rows).__name__}")
    yield from ((f"{path}: item {number}", row) for number, row in enumerate(rows, 1))


def check_outputs(outputs: Iterable[Path | None], inputs: Iterable[Path | None] = ()) -> None:
    """Check files that are written after minutes of work, before it begins; None for those that are not wanted.

    Raises:
        ConfigError: one could not be written, is among the *inputs*, or is given twice.
    """
    taken = {path.resolve(): "read" for path in inputs if path is not None}
    for path in outputs:
        if path is None:
            continue
        _check_writable(path)
        resolved = path.resolve()
        if resolved in taken and (resolved.is_file() or not resolved.exists()):  # not a terminal or a pipe
            raise ConfigError(f"{path} cannot be written: it is {taken[resolved]}, too; name another file")
        taken[resolved] = "written"


def _check_writable(path: Path) -> None:
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent} to write {path.name} to")
    try:
        is_folder, is_there = path.is_dir(), path.exists()
    except OSError as error:  # such as a name that is too long
        raise ConfigError(f"{path} cannot be written: {why_unreadable(error)}") from None
    if is_folder:
        raise ConfigError(f"{path} cannot be written: it is a folder")
    if not os.access(path if is_there else path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written: permission denied")
    if path.is_file() or not is_there:  # opening a pipe would wait for its reader
        _open_to_write(path.resolve(), is_there)


def _open_to_write(path: Path, is_there: bool) -> None:
    """Open a file without changing it: root has all permissions, but `/proc` and some mounts take no new files."""
    try:
        path.open("ab" if is_there else "xb").close()
        if not is_there:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {why_unreadable(error)}") from None
