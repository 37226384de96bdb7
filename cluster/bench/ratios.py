"""Ratios of what was measured block by block, with bootstrap 95 % intervals."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

RESAMPLES = 4000
Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Ratio:
    """How many times one side is faster (or slower) than another, or a mean, with a bootstrap 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def bootstrap(statistic: Callable[[Indices], Any], blocks: int) -> Ratio:
    """Return *statistic* of all blocks, and the interval that resampling them with replacement gives.

    Args:
        statistic: called with the indices of blocks, int64 `[blocks]`; returns a number.
        blocks: how many blocks there are, at least 1.
    """
    rng = np.random.default_rng(0)
    drawn = [float(statistic(rng.integers(blocks, size=blocks))) for _ in range(RESAMPLES)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Ratio(float(statistic(np.arange(blocks))), float(low), float(high))
