"""Tests of counts against a distribution: chi-square, binomial tails, total variation, and their power."""

import functools
import math

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]

POWER_Z = 1.8808
"""Normal quantile of 97 %."""


def chi_square_tail(statistic: float, freedom: int) -> float:
    """Return the probability that chi-square with *freedom* degrees of freedom is at least *statistic*."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@functools.lru_cache(maxsize=4096)
def chi_square_quantile(p_value: float, freedom: int) -> float:
    """Return the statistic whose `chi_square_tail` is *p_value*, by bisection."""
    low, high = 0.0, freedom + 2.0 * math.sqrt(freedom * 40.0) + 2000.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if chi_square_tail(middle, freedom) > p_value else (low, middle)
    return high


def deviance(seen_C: Floats, expected_C: Floats) -> tuple[float, float]:
    """Return Pearson's statistic and the likelihood-ratio statistic of observed and expected counts `[C]`.

    Both are chi-square for well-filled cells. In sparse cells Pearson's overweights an id that occurs several times,
    and the likelihood ratio's mean is too high: use the larger of the two p-values.
    """
    pearson = float(((seen_C - expected_C) ** 2 / expected_C).sum())
    ratio_C = np.where(seen_C > 0, seen_C, 1.0) / expected_C
    likelihood = float(2 * (seen_C * np.log(ratio_C) - seen_C + expected_C).sum())
    return pearson, max(likelihood, 0.0)


def rest_tail(count: float, draws: int, mass: float) -> float:
    """Bound the probability that *count* or more of *draws* samples have ids of total probability *mass*.

    Chernoff's bound, which is never below the binomial tail: exp(-draws * KL(count / draws, mass)).
    """
    share = count / draws
    if share <= mass:
        return 1.0
    if mass <= 0.0:
        return 0.0
    cost = share * math.log(share / mass)
    if share < 1.0:
        cost += (1 - share) * math.log((1 - share) / (1 - mass))
    return math.exp(-draws * cost)


def tv_bound(cells: int, draws: int, limit: float) -> float:
    """Return the total variation over *cells* cells that *draws* samples exceed with probability *limit* at most.

    The mean is at most about sqrt(cells / (2 pi draws)); the rest is McDiarmid's inequality.
    """
    return math.sqrt(cells / (2 * math.pi * draws)) + math.sqrt(math.log(1 / limit) / (2 * draws))


def least_tv(freedom: int, draws: int, limit: float, tolerance: float = 0.0) -> float:
    """Return the total variation that a chi-square test at *limit* detects with a probability of 97 %; 1 at most.

    A distribution at total variation D has a chi-square distance of at least 4 D^2, so the statistic is noncentral by
    x >= 4 D^2 * draws. It is taken as normal with mean f + x and variance 2 (f + 2 x). If expectations may be off by a
    relative *tolerance*, at least 2 D - tolerance of the L1 distance remains, against (1 + tolerance) draws at most.
    """
    if not freedom:
        return 1.0
    beyond = chi_square_quantile(limit, freedom) - freedom
    z = POWER_Z
    root = math.sqrt(z * z + beyond + freedom / 2)  # solves x - z sqrt(2 f + 4 x) = beyond for sqrt(f / 2 + x)
    noncentral = max(0.0, (z + root) ** 2 - freedom / 2)
    return min(1.0, math.sqrt(noncentral * (1 + tolerance) / (4 * draws)) + tolerance / 2)
