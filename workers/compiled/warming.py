"""Warm-up: a model's compiled forward is loaded, or compiled in a child process and kept for later starts."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from protos.config.engine import EngineConfig
from protos.progress import ProgressCallback
from protos.worker_messages import Allocate
from workers.compile import NO_COMPILER, CompileError, has_compiler
from workers.compiled import store
from workers.compiled.background import NICE, Child


class Compilable(Protocol):
    """What runs a model eagerly until it was compiled."""

    def key(self) -> str | None:
        """Return the key of its compiled entry; None if it is never compiled."""
        ...

    def compile_into(self, folder: Path, trial: Callable[[], None]) -> None:
        """Compile its graphs into the folder of a new entry; *trial* makes trial proposals with a draft.

        Raises:
            CompileError: they cannot be compiled.
        """
        ...

    def load_compiled(self, folder: Path) -> None:
        """Load an entry, compare it with eager, and run it from now on.

        Raises:
            CompileError: it cannot be loaded, or its results differ; the model runs as before.
        """
        ...


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Warm:
    """The state of a process's models after warm-up.

    Attributes:
        keys: of the entries that run; None if something runs eager.
        swap: compiles in the background what is missing; None if nothing is.
    """

    keys: tuple[str, ...] | None
    swap: "Swap | None" = None


class Swap:
    """Compiles parts of an engine while they run eager, and has them run compiled once all are ready.

    Args:
        children: compile the parts.
        parts: what runs them.
        keys: of all parts' entries; None if a part runs eager whatever is compiled.
        report: called with a line for each stage.
    """

    def __init__(
        self,
        children: Mapping[str, Child],
        parts: Mapping[str, Compilable],
        keys: tuple[str, ...] | None,
        report: ProgressCallback,
    ) -> None:
        self._children, self._parts, self._keys, self._report = dict(children), parts, keys, report

    @property
    def is_ready(self) -> bool:
        """Whether `finish` returns without waiting for the compiler."""
        return all(child.has_ended() for child in self._children.values())

    def finish(self) -> Warm:
        """Wait for the compiler, and load the results. To be called between two steps."""
        is_whole = True
        for name, child in self._children.items():
            failure = child.wait()
            if failure is not None:
                self._report(f"{name}: running eager: {failure}")
            is_whole &= failure is None and load(name, self._parts[name], child.key, self._report)
        return Warm(self._keys if is_whole else None)

    def stop(self) -> None:
        """End the children."""
        for child in self._children.values():
            child.kill()


def warm_up(
    config: EngineConfig, allocate: Allocate, parts: Mapping[str, Compilable], report: ProgressCallback
) -> Warm:
    """Load the compiled forwards of *parts*; have those that are missing compiled, which takes a minute.

    With `compile_in_background`, return before they are.

    Args:
        config: a parsed configuration, from which the child processes load the same models.
        allocate: the context length and the vocabulary of the engine.
        parts: "target", "draft" or both.
        report: called with a line for each stage.
    """
    keys = {name: key for name, part in parts.items() if (key := part.key()) is not None}
    found = {name: store.find(key) for name, key in keys.items()}
    loaded = [load(name, parts[name], keys[name], report) for name in keys if found[name]]
    missing = {name: keys[name] for name in keys if not found[name]}
    is_whole = 0 < len(keys) == len(parts) and all(loaded)
    if not missing:
        return Warm(tuple(keys.values()) if is_whole else None)
    if not has_compiler():
        report(f"running eager: {NO_COMPILER}")
        return Warm(None)
    nice = NICE if config.model.compile_in_background else 0
    children = {name: Child(config, allocate, name, key, nice) for name, key in missing.items()}
    names = " and the ".join(missing)
    if config.model.compile_in_background:
        swap = Swap(children, parts, tuple(keys.values()) if is_whole else None, logger.info)
        report(f"running eager while compiling the {names} in the background; later starts load the result")
        return Warm(None, swap)
    report(f"compiling the {names}, once for this machine; later starts load the result")
    return Swap(children, parts, tuple(keys.values()) if is_whole else None, report).finish()


def load(name: str, part: Compilable, key: str, report: ProgressCallback) -> bool:
    """Load the entry of a part; return whether it runs compiled now."""
    started = time.monotonic()
    folder = store.find(key)
    if folder is None:
        report(f"{name}: running eager: the compiled forward is gone from the cache folder")
        return False
    reason = store.read_failure(folder)
    if reason is not None:
        report(f"{name}: running eager: {reason} (kept from an earlier start; to try again, remove {folder})")
        return False
    try:
        part.load_compiled(folder)
    except CompileError as error:
        report(f"{name}: running eager: {error}")
        return False
    report(f"{name}: compiled forward loaded in {time.monotonic() - started:.1f} s")
    return True
