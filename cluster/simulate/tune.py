"""Chooses a draft and its number of tokens by batch size from predictions, with the reason for each choice."""

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from cluster.simulate.predict import SpeedupPrediction

LEAST_GAIN = 1.02
"""A predicted speed-up below this is within what measurements differ by: no speculation then."""

Gains = Mapping[str, Mapping[int, Mapping[int, float]]]
"""By draft, batch size and K: the predicted speed-up."""


@dataclass(frozen=True)
class TunedSize:
    """The number of draft tokens for batches of *rows*, 0 for none, its predicted speed-up and the reason."""

    rows: int
    k: int
    gain: float
    reason: str


@dataclass(frozen=True)
class Advice:
    """The draft to use, None for no speculation, its K by batch size, and why the others were not chosen."""

    name: str | None
    choices: Seq[TunedSize]
    others: Seq[str]

    def speculative_config(self, keys: Mapping[str, Any], max_rows: int) -> dict[str, Any] | None:
        """Return the configuration for the draft that *keys* describe, for batches of up to *max_rows*."""
        if self.name is None:
            return None
        ends = [choice.rows - 1 for choice in self.choices[1:]] + [max(max_rows, self.choices[-1].rows)]
        starts = [1, *(choice.rows for choice in self.choices[1:])]
        table: list[list[int]] = []
        for start, end, choice in zip(starts, ends, self.choices, strict=True):
            if table and table[-1][2] == choice.k:
                table[-1][1] = end
            else:
                table.append([start, end, choice.k])
        most = max(choice.k for choice in self.choices)
        return {**keys, "num_speculative_tokens": most, "num_speculative_tokens_per_batch_size": table}


def choose(predictions: Seq[SpeedupPrediction]) -> Advice:
    """Return the draft with the highest speed-up, as the geometric mean over batch sizes, each at its best K."""
    gains = _gains(predictions)
    by_draft = {name: _choices(by_rows) for name, by_rows in gains.items()}
    means = {name: _mean([choice.gain for choice in choices]) for name, choices in by_draft.items()}
    best = max(means, key=lambda name: means[name])
    paying = {name for name, choices in by_draft.items() if any(choice.k for choice in choices)}
    if best not in paying:
        return Advice(None, by_draft[best], [_why_not(name, gains[name]) for name in gains])
    others = [
        f"{name}: {means[name]:.2f}x on average, {best} {means[best]:.2f}x"
        if name in paying
        else _why_not(name, gains[name])
        for name in gains
        if name != best
    ]
    return Advice(best, by_draft[best], others)


def _gains(predictions: Seq[SpeedupPrediction]) -> Gains:
    """Return the geometric mean of the speed-ups at all contexts."""
    found: dict[str, dict[int, dict[int, list[float]]]] = {}
    for each in predictions:
        found.setdefault(each.name, {}).setdefault(each.shape[0], {}).setdefault(each.k, []).append(each.speedup)
    return {
        name: {rows: {k: _mean(all_) for k, all_ in by_k.items()} for rows, by_k in sorted(by_rows.items())}
        for name, by_rows in found.items()
    }


def _mean(speedups: Seq[float]) -> float:
    return math.exp(sum(map(math.log, speedups)) / len(speedups))


def _choices(by_rows: Mapping[int, Mapping[int, float]]) -> list[TunedSize]:
    """Return the best K of a draft by batch size; none from the first batch size on at which none pays."""
    choices: list[TunedSize] = []
    for rows, by_k in by_rows.items():
        k = max(by_k, key=lambda one: by_k[one])
        listed = ", ".join(f"K = {one}: {gain:.2f}x" for one, gain in sorted(by_k.items()))
        if choices and not choices[-1].k:
            choices.append(TunedSize(rows, 0, 1.0, f"off, as at batch size {choices[-1].rows} ({listed})"))
        elif by_k[k] < LEAST_GAIN:
            choices.append(TunedSize(rows, 0, 1.0, f"off: no K gains {LEAST_GAIN - 1:.0%} ({listed})"))
        else:
            choices.append(TunedSize(rows, k, by_k[k], f"the highest of {listed}"))
    return choices


def _why_not(name: str, by_rows: Mapping[int, Mapping[int, float]]) -> str:
    rows, smallest = next(iter(by_rows.items()))
    k = max(smallest, key=lambda one: smallest[one])
    return f"{name}: does not pay, {smallest[k]:.2f}x at batch size {rows} with its best K, {k}"
