"""Choosing a token from processed logits: argmax of log p + Gumbel noise over what top-k, top-p and min-p leave.

`choose` is the definition, in torch, on any device; `workers.sampling.sample_native` gives the same ids on CPUs, many
times faster. Everything in both is local to a row, so a row's token does not depend on the rows beside it.

What is left, as in vLLM: tokens whose probability is at least `min_p` times the greatest; of those the `top_k` most
likely (all that tie with the last one); of those, renormalised, the shortest list, most likely first and lowest id
first among equals, that holds `top_p` of the mass. Probability masses are counted in whole units of 2^-34 of the
greatest, so that sums do not depend on the order of summation.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from workers.sampling.noise import gumbel

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Logits = npt.NDArray[np.float32]

FAILED = -1
UNITS = 2.0**34
COLDEST = 1e-5  # temperatures below are greedy, as in vLLM
LIKELY = 1024  # ids among which limits are applied where only a guess is wanted


@dataclass(frozen=True)
class Limits:
    """How each of N rows is drawn: float32 temperature, int64 top-k, float64 top-p and min-p.

    `top_k` 0, `top_p` 1 and `min_p` 0 mean off.
    """

    temperature: Logits
    top_k: Ints
    top_p: Floats
    min_p: Floats

    @property
    def are_off(self) -> npt.NDArray[np.bool_]:
        """Which rows have none but a temperature."""
        off_N: npt.NDArray[np.bool_] = (self.top_k == 0) & (self.top_p >= 1.0) & (self.min_p == 0.0)
        return off_N

    def at(self, rows: Ints) -> "Limits":
        """Return the limits of some rows."""
        return Limits(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


def choose(logits_NV: torch.Tensor, keys_N: torch.Tensor, limits: Limits) -> torch.Tensor:
    """Return the chosen ids, int64 `[N]`; -1 for rows whose greatest logit is not finite.

    Args:
        logits_NV: float32, after all edits.
        keys_N: int64, from `workers.sampling.noise.row_keys`.
        limits: of each row.
    """
    scaled_NV = logits_NV / _column(limits.temperature, logits_NV)
    if limits.are_off.all():
        score_NV, ids_NV = _free_scores(scaled_NV, keys_N)
    else:
        ordered = scaled_NV.sort(dim=1, descending=True, stable=True)
        score_NV, ids_NV = _scores(ordered.values, ordered.indices, keys_N, limits), ordered.indices
    winner_NV = score_NV == score_NV.amax(1, keepdim=True)
    chosen_N = torch.where(winner_NV, ids_NV, logits_NV.shape[1]).amin(1)
    return torch.where(logits_NV.amax(1).isfinite(), chosen_N, FAILED)


def _free_scores(scaled_NV: torch.Tensor, keys_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of rows without limits, and whose they are; nothing need be sorted for them."""
    ids_NV = torch.arange(scaled_NV.shape[1], device=scaled_NV.device).expand_as(scaled_NV)
    return scaled_NV + gumbel(keys_N[:, None], ids_NV), ids_NV


def best(
    logits_NV: torch.Tensor, keys_N: torch.Tensor, limits: Limits, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the *width* ids of highest score, best first, int64 `[N, W]`: `choose` names the first. As `choose`.

    With them come log-probabilities, float32 `[N, W]`: how likely each is what somebody chooses who has the same noise
    and much the same logits, which is the softmax of the scores. -inf where the limits leave no more ids.

    For guesses: where any row has limits, only the `LIKELY` likeliest ids take part, which is nearly always what limits
    leave. Sorting whole vocabularies would take longer than the guesses save.
    """
    scaled_NV = logits_NV / _column(limits.temperature, logits_NV)
    if limits.are_off.all():
        score_NV, ids_NV = _free_scores(scaled_NV, keys_N)
    else:
        likely = scaled_NV.topk(min(max(LIKELY, width), logits_NV.shape[1]), 1)
        score_NV, ids_NV = _scores(likely.values, likely.indices, keys_N, limits), likely.indices
    found = score_NV.topk(width, 1)
    return ids_NV.gather(1, found.indices), (found.values - score_NV.logsumexp(1, keepdim=True)).float()


def _column(limit: Logits | Ints | Floats, like: torch.Tensor) -> torch.Tensor:
    """Return one of the limits as a tensor `[N, 1]` beside others."""
    return torch.from_numpy(limit).to(like.device)[:, None]


def _scores(sorted_NV: torch.Tensor, ids_NV: torch.Tensor, keys_N: torch.Tensor, limits: Limits) -> torch.Tensor:
    """Return log p + noise up to a constant a row, float64 `[N, V]`, -inf for what the limits cut.

    Args:
        sorted_NV: logits over temperature, falling.
        ids_NV: whose they are.
        keys_N: as in `choose`.
        limits: of each row.
    """
    keep_NV = _left_by(limits, sorted_NV)
    return torch.where(keep_NV, sorted_NV + gumbel(keys_N[:, None], ids_NV), -torch.inf)


def _left_by(limits: Limits, sorted_NV: torch.Tensor) -> torch.Tensor:
    """Return which of the logits over temperature, falling, the limits leave; bool `[N, V]`."""
    vocab = sorted_NV.shape[1]
    top_k_N1, top_p_N1, min_p_N1 = (_column(limit, sorted_NV) for limit in (limits.top_k, limits.top_p, limits.min_p))
    weight_NV = (sorted_NV - sorted_NV[:, :1]).exp()
    keep_NV = (weight_NV >= min_p_N1) & (sorted_NV > -torch.inf)
    last_N1 = torch.where((top_k_N1 > 0) & (top_k_N1 < vocab), top_k_N1, vocab) - 1
    keep_NV &= sorted_NV >= sorted_NV.gather(1, last_N1)
    mass_NV = torch.where(keep_NV, (weight_NV * UNITS).round(), 0.0).double()
    before_NV = mass_NV.cumsum(1) - mass_NV
    keep_NV &= (before_NV < top_p_N1 * mass_NV.sum(1, keepdim=True)) | (top_p_N1 >= 1.0)
    return keep_NV


def law(logits_NV: torch.Tensor, limits: Limits) -> torch.Tensor:
    """Return the law that `choose` draws by, float64 `[N, V]`; zeros for rows whose greatest logit is not finite."""
    scaled_NV = logits_NV / _column(limits.temperature, logits_NV)
    if not limits.are_off.all():
        ordered = scaled_NV.sort(dim=1, descending=True, stable=True)
        left_NV = ordered.values.masked_fill(~_left_by(limits, ordered.values), -torch.inf)
        scaled_NV = torch.empty_like(left_NV).scatter_(1, ordered.indices, left_NV)
    law_NV = scaled_NV.softmax(1, dtype=torch.float64)
    return law_NV.masked_fill_(~logits_NV.amax(1, keepdim=True).isfinite(), 0.0)


def short_law(logits_NV: torch.Tensor, limits: Limits, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a law of the *size* likeliest ids alone, for guesses: int64 `[N, L]` and float32 `[N, L]`, falling.

    It adds up to 1; ids that the limits cut have 0, and so have all where the greatest logit is not finite.
    """
    likely = (logits_NV / _column(limits.temperature, logits_NV)).topk(min(size, logits_NV.shape[1]), 1)
    left_NL = likely.values
    if not limits.are_off.all():
        left_NL = left_NL.masked_fill(~_left_by(limits, left_NL), -torch.inf)
    return likely.indices, torch.where(left_NL[:, :1].isfinite(), left_NL.softmax(1), 0.0)


def without_replacement(ids_NL: torch.Tensor, law_NL: torch.Tensor, keys_N: torch.Tensor, width: int) -> torch.Tensor:
    """Draw *width* of a law's ids, one after another, int64 `[N, W]`: the greatest of log q + noise, in that order.

    Where fewer have a probability, others follow.
    """
    score_NL = law_NL.double().log() + gumbel(keys_N[:, None], ids_NL)
    return ids_NL.gather(1, score_NL.topk(width, 1).indices)


def greedy(logits_NV: torch.Tensor) -> torch.Tensor:
    """Return the most likely ids, the lowest among equals; -1 for rows whose greatest logit is not finite."""
    ids_N = logits_NV.argmax(1)
    return torch.where(logits_NV.gather(1, ids_N[:, None])[:, 0].isfinite(), ids_N, FAILED)
