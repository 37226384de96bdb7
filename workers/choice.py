"""Choosing a token from processed logits: argmax of log p + Gumbel noise over what top-k, top-p and min-p leave.

`choose` is the definition, in torch, on any device; `workers.choice_native` gives the same ids on CPUs, many times
faster. Everything in both is local to a row, so a row's token does not depend on the rows beside it.

What is left, as in vLLM: tokens whose probability is at least `min_p` times the greatest; of those the `top_k` most
likely (all that tie with the last one); of those, renormalised, the shortest list, most likely first and lowest id
first among equals, that holds `top_p` of the mass. Probability masses are counted in whole units of 2^-34 of the
greatest, so that sums do not depend on the order of summation.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from workers.noise import gumbel

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Logits = npt.NDArray[np.float32]

FAILED = -1
UNITS = 2.0**34
COLDEST = 1e-5  # temperatures below are greedy, as in vLLM


@dataclass(frozen=True)
class Limits:
    """How each of N rows is drawn: float32 temperature, int64 top-k, float64 top-p and min-p.

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
    score_NV, ids_NV = _scores(logits_NV, keys_N, limits)
    winner_NV = score_NV == score_NV.amax(1, keepdim=True)
    chosen_N = torch.where(winner_NV, ids_NV, logits_NV.shape[1]).amin(1)
    return torch.where(logits_NV.amax(1).isfinite(), chosen_N, FAILED)


def best(logits_NV: torch.Tensor, keys_N: torch.Tensor, limits: Limits, width: int) -> (
    tuple[torch.Tensor, torch.Tensor]
):  # fmt: skip
    """Return the *width* ids of highest score, best first, int64 `[N, W]`: `choose` names the first. As `choose`.

    With them come log-probabilities, float32 `[N, W]`: how likely each is what somebody chooses who has the same noise
    and much the same logits, which is the softmax of the scores. -inf where the limits leave no more ids.
    """
    score_NV, ids_NV = _scores(logits_NV, keys_N, limits)
    found = score_NV.topk(width, 1)
    return ids_NV.gather(1, found.indices), (found.values - score_NV.logsumexp(1, keepdim=True)).float()


def _scores(logits_NV: torch.Tensor, keys_N: torch.Tensor, limits: Limits) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log p + noise up to a constant a row, -inf for what the limits cut, and the ids they belong to."""
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
    return torch.where(keep_NV, sorted_NV + gumbel(keys_N[:, None], ids_NV), -torch.inf), ids_NV


def greedy(logits_NV: torch.Tensor) -> torch.Tensor:
    """Return the most likely ids, the lowest among equals; -1 for rows whose greatest logit is not finite."""
    ids_N = logits_NV.argmax(1)
    return torch.where(logits_NV.gather(1, ids_N[:, None])[:, 0].isfinite(), ids_N, FAILED)
