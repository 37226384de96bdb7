"""Step costs between the sizes that were measured."""

from bisect import bisect_left
from collections.abc import Mapping


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
