"""Choosing a token from processed logits: argmax of log p + Gumbel noise over what top-k, top-p and min-p leave.

Written twice. `choose` is the definition, in torch, on any device. `host_choose` gives the same ids on the host,
several times faster: it sorts values without ids, and takes the noise only of what can still win. Everything in
both is local to a row, so a row's token does not depend on the rows beside it.

What is left, as in vLLM: tokens whose probability is at least `min_p` times the greatest; of those the `top_k` most
likely (all that tie with the last one); of those, renormalised, the shortest list, most likely first and lowest id
first among equals, that holds `top_p` of the mass. Probability masses are counted in whole units of 2^-34 of the
greatest, so that sums do not depend on the order of summation.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from workers.noise import SCALE, fraction_bits, gumbel, host_gumbel

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Logits = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]

FAILED = -1
UNITS = 2.0**34
BLOCK_ELEMENTS = 1 << 15
NUCLEUS_HEAD = 128  # most nuclei are smaller, and need no running sum over the whole vocabulary
SLACK = 1.0001  # covers the float32 rounding of the race, whose exact finish is in float64


@dataclass(frozen=True)
class Limits:
    """How each of N rows is drawn: float32 temperature (> 0), int64 top-k, float64 top-p and min-p.

    `top_k` 0, `top_p` 1 and `min_p` 0 mean off.
    """

    temperature: Logits
    top_k: Ints
    top_p: Floats
    min_p: Floats

    def at(self, rows: Ints) -> "Limits":
        """Return the limits of some rows."""
        return Limits(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


def choose(logits_NV: torch.Tensor, keys_N: torch.Tensor, limits: Limits) -> torch.Tensor:
    """Return the chosen ids, int64 `[N]`; -1 for rows whose greatest logit is not finite.

    Args:
        logits_NV: float32, after all edits.
        keys_N: int64, from `workers.noise.row_keys`.
        limits: of each row.
    """
    vocab = logits_NV.shape[1]
    temperature_N, top_k_N, top_p_N, min_p_N = (
        torch.from_numpy(limit).to(logits_NV.device)
        for limit in (limits.temperature, limits.top_k, limits.top_p, limits.min_p))
    scaled_NV = logits_NV / temperature_N[:, None]
    sorted_NV, ids_NV = scaled_NV.sort(dim=1, descending=True, stable=True)
    weight_NV = (sorted_NV - sorted_NV[:, :1]).exp()
    keep_NV = (weight_NV >= min_p_N[:, None]) & (sorted_NV > -torch.inf)
    last_N = torch.where((top_k_N > 0) & (top_k_N < vocab), top_k_N, vocab) - 1
    keep_NV &= sorted_NV >= sorted_NV.gather(1, last_N[:, None])
    mass_NV = torch.where(keep_NV, (weight_NV * UNITS).round(), 0.0).double()
    before_NV = mass_NV.cumsum(1) - mass_NV
    keep_NV &= (before_NV < top_p_N[:, None] * mass_NV.sum(1, keepdim=True)) | (top_p_N[:, None] >= 1.0)
    score_NV = torch.where(keep_NV, sorted_NV + gumbel(keys_N[:, None], ids_NV), -torch.inf)
    winner_NV = score_NV == score_NV.amax(1, keepdim=True)
    chosen_N = torch.where(winner_NV, ids_NV, vocab).amin(1)
    return torch.where(sorted_NV[:, 0].isfinite(), chosen_N, FAILED)


def greedy(logits_NV: torch.Tensor) -> torch.Tensor:
    """Return the most likely ids, the lowest among equals; -1 for rows whose greatest logit is not finite."""
    ids_N = logits_NV.argmax(1)
    return torch.where(logits_NV.gather(1, ids_N[:, None])[:, 0].isfinite(), ids_N, FAILED)


def host_greedy(logits_NV: Logits) -> Ints:
    """As `greedy`, on the host."""
    ids_N = logits_NV.argmax(1)
    return _failing(ids_N, logits_NV[np.arange(len(ids_N)), ids_N])


def host_choose(logits_NV: Logits, keys_N: Ints, limits: Limits) -> Ints:
    """As `choose`, on the host; in blocks of rows that stay in the processor's cache."""
    bounded_N = (limits.top_k > 0) | (limits.top_p < 1.0) | (limits.min_p > 0.0)
    ids_N = np.empty(len(keys_N), np.int64)
    size = block_rows(logits_NV.shape[1])
    with np.errstate(all="ignore"):  # rows without a finite logit
        for rows in blocks(np.flatnonzero(bounded_N), size):
            scaled_NV = logits_NV[rows] / limits.temperature[rows, None]
            ids_N[rows] = _choose_bounded(scaled_NV, keys_N[rows], limits.at(rows))
        for rows in blocks(np.flatnonzero(~bounded_N), size):
            scaled_NV = logits_NV[rows] / limits.temperature[rows, None]
            ids_N[rows] = _race(scaled_NV, keys_N[rows])
    return ids_N


def block_rows(vocab: int) -> int:
    """Return how many rows of logits are worked on at a time on the host."""
    return max(1, BLOCK_ELEMENTS // vocab)


def blocks(rows: Ints, size: int) -> Iterator[Ints]:
    """Cut *rows* into pieces of at most *size*."""
    return (rows[first : first + size] for first in range(0, len(rows), size))


def _failing(ids_N: Ints, greatest_N: Logits) -> Ints:
    finite_N = np.isfinite(greatest_N)
    return ids_N if finite_N.all() else np.where(finite_N, ids_N, FAILED)


def _race(logits_NV: Logits, keys_N: Ints) -> Ints:
    """Choose among all tokens.

    The greatest log p + g is the least -log(1 - u) / p, u uniform, of which u / p is a lower bound and close to it
    for the few that can win. So the token of the least u / p, in float32, is scored exactly, and then only those
    whose bound lies below what it scored: one or two as a rule.
    """
    rows_N = np.arange(len(keys_N))
    greatest_N = logits_NV.max(1)
    bound_NV = fraction_bits(keys_N[:, None], np.arange(logits_NV.shape[1])[None]).astype(np.float32)
    bound_NV /= np.exp(logits_NV - greatest_N[:, None])
    first_N = bound_NV.argmin(1)
    score_N = logits_NV[rows_N, first_N] + host_gumbel(keys_N, first_N)
    limit_N = np.exp(greatest_N - score_N) * (SLACK / SCALE)
    return _best(logits_NV, keys_N, bound_NV <= limit_N.astype(np.float32)[:, None])


def _choose_bounded(logits_NV: Logits, keys_N: Ints, limits: Limits) -> Ints:
    """Choose among the tokens within the limits, found by their values: which is cheap to sort, and leaves few ids."""
    sorted_NV = np.sort(logits_NV, axis=1)[:, ::-1]
    count_N = _count_kept(sorted_NV, limits)
    cut_N = np.where(np.isfinite(sorted_NV[:, 0]), sorted_NV[np.arange(len(count_N)), count_N - 1], np.inf)
    keep_NV = logits_NV >= cut_N[:, None]
    for row in np.flatnonzero(np.count_nonzero(keep_NV, axis=1) > count_N).tolist():
        ids = np.flatnonzero(keep_NV[row])
        tied = ids[logits_NV[row, ids] == cut_N[row]]
        keep_NV[row, tied[int(count_N[row]) - len(ids) :]] = False
    return _best(logits_NV, keys_N, keep_NV)


def _count_kept(sorted_NV: Logits, limits: Limits) -> Ints:
    """Return how many of the values, greatest first, are within the limits; anything for rows without a finite one."""
    weight_NV = np.exp(sorted_NV - sorted_NV[:, :1])
    count_N: Ints = np.count_nonzero(sorted_NV > -np.inf, axis=1)
    if limits.min_p.any():
        count_N = np.minimum(count_N, np.count_nonzero(weight_NV >= limits.min_p[:, None], axis=1))
    if limits.top_k.any():
        last_N = np.where(limits.top_k > 0, limits.top_k, sorted_NV.shape[1]) - 1
        least_N1 = np.take_along_axis(sorted_NV, last_N[:, None], axis=1)
        count_N = np.minimum(count_N, np.count_nonzero(sorted_NV >= least_N1, axis=1))
    if (limits.top_p < 1.0).any():
        count_N = np.minimum(count_N, _count_nucleus(weight_NV, count_N, limits.top_p))
    return count_N


def _count_nucleus(weight_NV: Logits, count_N: Ints, top_p_N: Floats) -> Ints:
    """Return how many of the first `count_N[r]` weights hold `top_p_N[r]` of their sum; no bound where that is 1."""
    vocab = weight_NV.shape[1]
    mass_NV = np.rint(weight_NV * np.float32(UNITS))
    if (count_N < vocab).any():
        mass_NV[np.arange(vocab) >= count_N[:, None]] = 0.0
    enough_N = np.where(top_p_N < 1.0, top_p_N * mass_NV.sum(1, dtype=np.float64), np.inf)
    for width in (NUCLEUS_HEAD, vocab):
        head_NW = mass_NV[:, :width]
        inside_NW = head_NW.cumsum(1, dtype=np.float64) - head_NW < enough_N[:, None]
        if not inside_NW[:, -1].any():
            break
    inside_N: Ints = np.count_nonzero(inside_NW, axis=1)
    return inside_N


def _best(logits_NV: Logits, keys_N: Ints, keep_NV: Flags) -> Ints:
    """Return the id of the greatest exact score among those kept, the lowest among equals; -1 where none is kept."""
    rows_M, ids_M = np.divmod(np.flatnonzero(keep_NV), logits_NV.shape[1])
    score_M = logits_NV[rows_M, ids_M] + host_gumbel(keys_N[rows_M], ids_M)
    best_N = np.full(len(keys_N), -np.inf)
    np.maximum.at(best_N, rows_M, score_M)
    winners = np.flatnonzero(score_M == best_N[rows_M])[::-1]
    ids_N = np.full(len(keys_N), FAILED)
    ids_N[rows_M[winners]] = ids_M[winners]
    return ids_N
