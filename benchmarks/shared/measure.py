"""Times several sides of a comparison so that noise affects all alike, with confidence intervals."""

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from cluster.bench.ratios import RESAMPLES, Floats, Ratio, bootstrap

__all__ = [
    "COUNT",
    "Floats",
    "Ratio",
    "Timings",
    "alternate",
    "alternate_slices",
    "arguments",
    "at_least",
    "environment",
    "joined",
    "mean",
    "share",
    "write",
]
Block = TypeVar("Block")
Side = TypeVar("Side")


@dataclass(frozen=True)
class Timings:
    """Seconds `[B]` of each side in each block, and the tokens `[B]` that every side generated in it."""

    tokens_B: Floats
    seconds: Mapping[str, Floats]

    def tokens_per_second(self, side: str) -> float:
        """Return the median over blocks."""
        return float(np.median(self.tokens_B / self.seconds[side]))

    def speedup(self, side: str, over: str) -> Ratio:
        """Return how many times faster *side* did all blocks together than *over*."""
        return bootstrap(
            lambda picked: self.seconds[over][picked].sum() / self.seconds[side][picked].sum(), len(self.tokens_B)
        )

    def slowdown(self, side: str, over: str) -> Ratio:
        """Return the median over blocks of the time of *side* by the time of *over* in the same block."""
        ratio_B = self.seconds[side] / self.seconds[over]
        return bootstrap(lambda picked: np.median(ratio_B[picked]), len(ratio_B))


def mean(values_B: Floats) -> Ratio:
    """Return the mean over blocks; of differences, whether one way is better than the other on the same blocks."""
    return bootstrap(lambda picked: values_B[picked].mean(), len(values_B))


def share(part_A: Floats, whole_B: Floats) -> Ratio:
    """Return the median of *part_A* over that of *whole_B*, resampling both, which were measured separately."""
    rng = np.random.default_rng(0)

    def drawn(values: Floats) -> Floats:
        return np.median(values[rng.integers(len(values), size=(RESAMPLES, len(values)))], axis=1)

    low, high = np.percentile(drawn(part_A) / drawn(whole_B), [2.5, 97.5])
    return Ratio(float(np.median(part_A) / np.median(whole_B)), float(low), float(high))


def joined(parts: Sequence[Timings]) -> Timings:
    """Return the blocks of all *parts*, which have the same sides."""
    seconds = {side: np.concatenate([one.seconds[side] for one in parts]) for side in parts[0].seconds}
    return Timings(np.concatenate([one.tokens_B for one in parts]), seconds)


def alternate(
    sides: Mapping[str, Callable[[Block], int]],
    blocks: Sequence[Block],
    around: Mapping[str, Callable[[], AbstractContextManager[None]]] | None = None,
) -> Timings:
    """Run every side on every block, a different one first each time; a side returns its number of tokens.

    Args:
        sides: what is measured, by name.
        blocks: the arguments of each call.
        around: context managers within which some sides run; entering and leaving them is not timed.

    Raises:
        ValueError: two sides generated different numbers of tokens, so their times cannot be compared.
    """
    names = list(sides)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    tokens: list[int] = []
    for index, block in enumerate(blocks):
        made = {}
        for name in _rotated(names, index):
            with (around or {}).get(name, nullcontext)():
                began = time.perf_counter()
                made[name] = sides[name](block)
                seconds[name].append(time.perf_counter() - began)
        tokens.append(_equal(index, made))
    return Timings(np.array(tokens, float), {name: np.array(values) for name, values in seconds.items()})


def alternate_slices(
    sides: Mapping[str, Callable[[Block], Iterator[int]]], blocks: Sequence[Block], num_tokens: int
) -> Timings:
    """Run every side on every block, in slices of *num_tokens* tokens that take turns, another side first each time.

    Another one begins each block, too: the first to read a prompt of some length prepares kernels for all engines.

    A shared machine is faster and slower for a second or so at a time. Slices of some 0.1 s find all sides in the same
    state. Two equal engines that differ by 2 to 3 % over blocks of 0.3 s differ by about 1 % this way.

    Args:
        sides: what is measured, by name: iterators that yield the number of tokens after each piece of work.
        blocks: the arguments of each call.
        num_tokens: of a slice, at least.

    Raises:
        ValueError: two sides generated different numbers of tokens, so their times cannot be compared.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    tokens: list[int] = []
    for index, block in enumerate(blocks):
        runs = {name: _SlicedRun(side(block)) for name, side in sides.items()}
        order = _rotated([*runs.values()], index)
        while not all(run.has_ended for run in order):
            for run in order:
                run.go_on(num_tokens)
            order = _rotated(order, 1)
        tokens.append(_equal(index, {name: run.num_tokens for name, run in runs.items()}))
        for name, run in runs.items():
            seconds[name].append(run.seconds)
    return Timings(np.array(tokens, float), {name: np.array(values) for name, values in seconds.items()})


def _rotated(sides: list[Side], by: int) -> list[Side]:
    start = by % len(sides)
    return sides[start:] + sides[:start]


def _equal(index: int, made: Mapping[str, int]) -> int:
    """Return the number of tokens that all sides made of a block."""
    first, *others = made.values()
    if any(other != first for other in others):
        raise ValueError(f"block {index}: the sides generated different numbers of tokens: {made}")
    return first


class _SlicedRun:
    """One side's run of a block: its tokens and seconds so far."""

    def __init__(self, work: Iterator[int]) -> None:
        self._work = work
        self.num_tokens, self.seconds, self.has_ended = 0, 0.0, False

    def go_on(self, num_tokens: int) -> None:
        """Run until there are *num_tokens* more, or the end."""
        wanted = self.num_tokens + num_tokens
        began = time.perf_counter()
        while self.num_tokens < wanted and not self.has_ended:
            num_new = next(self._work, None)
            self.has_ended = num_new is None
            self.num_tokens += num_new or 0
        self.seconds += time.perf_counter() - began


def environment(threads: int) -> dict[str, Any]:
    """Return the processor and versions, to compare figures of different machines."""
    packages = {name: version(name) for name in ("torch", "transformers", "numpy")}
    return {"cpu": _cpu_name(), "threads": threads, "python": platform.python_version(), **packages}


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def at_least(least: int) -> Callable[[str], int]:
    """Return the type of an option that is a number of things. With none, a benchmark has nothing to report."""

    def whole(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
        return int(text)

    return whole


COUNT = at_least(1)


def arguments(about: str | None) -> argparse.ArgumentParser:
    """Return the parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the target (default: the demo's)")
    parser.add_argument("--draft", type=Path, help="folder of the draft (default: the demo's)")
    parser.add_argument("--num-speculative-tokens", type=COUNT, default=3)
    parser.add_argument("--threads", type=COUNT, default=2)
    parser.add_argument("--limit", type=COUNT, help="use only the first so many prompts")
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    return parser


def write(path: Path | None, report: Mapping[str, Any]) -> None:
    """Write *report* as JSON to *path*, if there is one."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(f"written to {path}")
