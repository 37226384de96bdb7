"""Step costs between the sizes that were measured, and values that are known to rise with the size."""

from bisect import bisect_left
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def interpolate(seconds: Mapping[int, float], tokens: int) -> float:
    """Return the seconds for *tokens*: linear between measured sizes, proportional above the largest."""
    sizes = sorted(seconds)
    above = bisect_left(sizes, tokens)
    if above == len(sizes):
        return seconds[sizes[-1]] * tokens / sizes[-1]
    if above == 0 or sizes[above] == tokens:
        return seconds[sizes[above]]
    low, high = sizes[above - 1], sizes[above]
    share = (tokens - low) / (high - low)
    return seconds[low] * (1 - share) + seconds[high] * share


def rising(values_N: Floats, weights_N: Floats) -> Floats:
    """Return the values that never fall and are nearest to *values_N*, by weighted squares (isotonic regression).

    Neighbours that fall are replaced by their mean, until none do (pool adjacent violators; Barlow et al. 1972).
    """
    pools: list[tuple[float, float, int]] = []  # mean, weight, number of values
    for value, weight in zip(values_N.tolist(), weights_N.tolist(), strict=True):
        mean, total, number = value, weight, 1
        while pools and pools[-1][0] > mean:
            before, more, several = pools.pop()
            mean = (before * more + mean * total) / (more + total)
            total, number = total + more, number + several
        pools.append((mean, total, number))
    return np.repeat([mean for mean, _, _ in pools], [number for _, _, number in pools])
