"""Sampling a token from processed logits: argmax of log p + Gumbel noise over the tokens top-k, top-p and min-p leave.

`sample` is the definition, in torch, on any device; `workers.sampling.sample_native` gives the same ids on CPUs, many
times faster. Both treat every row separately, so a row's token does not depend on the other rows.

As in vLLM, these tokens are left: those whose probability is at least `min_p` times the greatest; of those the `top_k`
most likely (with all ties of the last one); of those, renormalised, the shortest list, most likely first and lowest id
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

NO_TOKEN = -1
UNITS = 2.0**34
MAX_LOGITS = 1 << 24
"""Logits sampled from at a time, where it takes several float64 of each."""
MIN_TEMPERATURE = 1e-5  # temperatures below are greedy, as in vLLM
MAX_CANDIDATES = 1024  # most likely ids to which limits are applied for draft tokens


@dataclass(frozen=True)
class SamplingLimits:
    """Sampling parameters of each of N rows: float32 temperature, int64 top-k, float64 top-p and min-p.

    `top_k` 0, `top_p` 1 and `min_p` 0 mean off.
    """

    temperature: Logits
    top_k: Ints
    top_p: Floats
    min_p: Floats

    @property
    def are_off(self) -> npt.NDArray[np.bool_]:
        """Which rows have only a temperature."""
        off_N: npt.NDArray[np.bool_] = (self.top_k == 0) & (self.top_p >= 1.0) & (self.min_p == 0.0)
        return off_N

    def at(self, rows: Ints) -> "SamplingLimits":
        """Return the limits of some rows."""
        return SamplingLimits(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


@dataclass(frozen=True)
class Penalties:
    """Penalties of each of N rows, float32; a repetition penalty of 1 and others of 0 mean off."""

    repetition: Logits
    presence: Logits
    frequency: Logits

    @property
    def are_off(self) -> npt.NDArray[np.bool_]:
        """Which rows have none."""
        off_N: npt.NDArray[np.bool_] = (self.repetition == 1.0) & (self.presence == 0.0) & (self.frequency == 0.0)
        return off_N

    def at(self, rows: Ints) -> "Penalties":
        """Return the penalties of some rows."""
        return Penalties(self.repetition[rows], self.presence[rows], self.frequency[rows])


@dataclass(frozen=True)
class DeviceLimits:
    """`SamplingLimits` as tensors `[N]` on the logits' device, of the same dtypes; greedy rows have temperature 0."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    @property
    def is_random_N(self) -> torch.Tensor:
        """Which rows are not greedy."""
        return self.temperature >= MIN_TEMPERATURE

    @property
    def are_off_N(self) -> torch.Tensor:
        """See `SamplingLimits.are_off`."""
        return (self.top_k == 0) & (self.top_p >= 1.0) & (self.min_p == 0.0)

    def at(self, rows: slice) -> "DeviceLimits":
        """Return the limits of some rows."""
        return DeviceLimits(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


def parts_of(logits_NV: torch.Tensor) -> list[slice]:
    """Return slices of rows with at most `MAX_LOGITS` logits each, or one row."""
    count, vocab = logits_NV.shape
    size = max(1, MAX_LOGITS // vocab)
    return [slice(first, first + size) for first in range(0, count, size)]


def sample(logits_NV: torch.Tensor, keys_N: torch.Tensor, limits: SamplingLimits) -> torch.Tensor:
    """Return the sampled ids, int64 `[N]`; -1 for rows whose greatest logit is not finite.

    Args:
        logits_NV: float32, processed.
        keys_N: int64, from `workers.sampling.noise.row_keys`.
        limits: of each row.
    """
    scaled_NV = logits_NV / _column(limits.temperature, logits_NV)
    if limits.are_off.all():
        score_NV, ids_NV = _scores_without_limits(scaled_NV, keys_N)
    else:
        ordered = scaled_NV.sort(dim=1, descending=True, stable=True)
        score_NV, ids_NV = _scores(ordered.values, ordered.indices, keys_N, limits), ordered.indices
    return _best(score_NV, ids_NV, logits_NV)


def sample_drawn(logits_NV: torch.Tensor, keys_N: torch.Tensor, limits: DeviceLimits) -> torch.Tensor:
    """As `sample`, of rows that are greedy or have only a temperature, without reading *limits* on the host."""
    temperature_N = torch.where(limits.is_random_N, limits.temperature, 1.0)
    score_NV, ids_NV = _scores_without_limits(logits_NV / temperature_N[:, None], keys_N)
    return torch.where(limits.is_random_N, _best(score_NV, ids_NV, logits_NV), greedy(logits_NV))


def sample_limited(logits_NV: torch.Tensor, keys_N: torch.Tensor, limits: DeviceLimits) -> torch.Tensor:
    """As `sample_drawn`, of rows with any limits."""
    temperature_N = torch.where(limits.is_random_N, limits.temperature, 1.0)
    ordered = (logits_NV / temperature_N[:, None]).sort(dim=1, descending=True, stable=True)
    score_NV = _scores(ordered.values, ordered.indices, keys_N, limits)
    return torch.where(limits.is_random_N, _best(score_NV, ordered.indices, logits_NV), greedy(logits_NV))


def _best(score_NV: torch.Tensor, ids_NV: torch.Tensor, logits_NV: torch.Tensor) -> torch.Tensor:
    """Return the lowest id of those with the highest score; -1 for rows whose greatest logit is not finite."""
    winner_NV = score_NV == score_NV.amax(1, keepdim=True)
    chosen_N = torch.where(winner_NV, ids_NV, logits_NV.shape[1]).amin(1)
    return torch.where(logits_NV.amax(1).isfinite(), chosen_N, NO_TOKEN)


def _scores_without_limits(scaled_NV: torch.Tensor, keys_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of rows without limits, and their ids; these rows need no sorting."""
    ids_NV = torch.arange(scaled_NV.shape[1], device=scaled_NV.device).expand_as(scaled_NV)
    return scaled_NV + gumbel(keys_N[:, None], ids_NV), ids_NV


def candidates(
    logits_NV: torch.Tensor, keys_N: torch.Tensor, limits: SamplingLimits, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the *width* ids of highest score, best first, int64 `[N, W]`, and their log-probabilities, float32.

    Arguments as for `sample`, which returns the first. The log-probabilities are those of the softmax of the scores:
    how likely a model with the same noise and similar logits samples the id; -inf where the limits leave no more ids.

    For draft tokens: if any row has limits, they apply to the `MAX_CANDIDATES` most likely ids only, which is nearly
    always all that the limits leave. Sorting whole vocabularies would take longer than the draft tokens save.
    """
    scaled_NV = logits_NV / _column(limits.temperature, logits_NV)
    if limits.are_off.all():
        return _highest(*_scores_without_limits(scaled_NV, keys_N), width)
    return _highest(*_likely_scores(scaled_NV, keys_N, limits, width), width)


def likely_candidates(logits_NV: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `candidates`, of greedy rows: the most likely ids, and log-probabilities without noise."""
    ids_NW = logits_NV.topk(width, 1).indices
    return ids_NW, torch.log_softmax(logits_NV, 1).gather(1, ids_NW)


def candidates_drawn(
    logits_NV: torch.Tensor, keys_N: torch.Tensor, limits: DeviceLimits, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `candidates`, of rows that are greedy or have only a temperature, without reading *limits* on the host."""
    scaled_NV = logits_NV / torch.where(limits.is_random_N, limits.temperature, 1.0)[:, None]
    drawn = _highest(*_scores_without_limits(scaled_NV, keys_N), width)
    return _either(limits.is_random_N, drawn, likely_candidates(logits_NV, width))


def candidates_limited(
    logits_NV: torch.Tensor, keys_N: torch.Tensor, limits: DeviceLimits, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `candidates_drawn`, of rows with any limits."""
    scaled_NV = logits_NV / torch.where(limits.is_random_N, limits.temperature, 1.0)[:, None]
    limited = _highest(*_likely_scores(scaled_NV, keys_N, limits, width), width)
    is_limited_N = limits.is_random_N & ~limits.are_off_N
    return _either(is_limited_N, limited, candidates_drawn(logits_NV, keys_N, limits, width))


def _highest(score_NV: torch.Tensor, ids_NV: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the *width* ids of highest score, and the logarithms of their part of the softmax of the scores."""
    found = score_NV.topk(width, 1)
    return ids_NV.gather(1, found.indices), (found.values - score_NV.logsumexp(1, keepdim=True)).float()


def _likely_scores(
    scaled_NV: torch.Tensor, keys_N: torch.Tensor, limits: SamplingLimits | DeviceLimits, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of the most likely ids, to which limits apply, and these ids."""
    likely = scaled_NV.topk(min(max(MAX_CANDIDATES, width), scaled_NV.shape[1]), 1)
    return _scores(likely.values, likely.indices, keys_N, limits), likely.indices


def _either(
    is_first_N: torch.Tensor, first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    ids_NW, log_q_NW = (torch.where(is_first_N[:, None], a, b) for a, b in zip(first, second, strict=True))
    return ids_NW, log_q_NW


def _column(limit: Logits | Ints | Floats | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return one of the limits as a tensor `[N, 1]` on the device of *like*."""
    if isinstance(limit, torch.Tensor):
        return limit[:, None]
    return torch.from_numpy(limit).to(like.device)[:, None]


def _scores(
    sorted_NV: torch.Tensor, ids_NV: torch.Tensor, keys_N: torch.Tensor, limits: SamplingLimits | DeviceLimits
) -> torch.Tensor:
    """Return log p + noise, up to a constant per row, float64 `[N, V]`; -inf for ids that the limits exclude.

    Args:
        sorted_NV: logits over temperature, in descending order.
        ids_NV: their ids.
        keys_N: as for `sample`.
        limits: of each row.
    """
    keep_NV = _left_by(limits, sorted_NV)
    return torch.where(keep_NV, sorted_NV + gumbel(keys_N[:, None], ids_NV), -torch.inf)


def _left_by(limits: SamplingLimits | DeviceLimits, sorted_NV: torch.Tensor) -> torch.Tensor:
    """Return which of the logits over temperature, in descending order, the limits leave; bool `[N, V]`."""
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


def distribution(logits_NV: torch.Tensor, limits: SamplingLimits) -> torch.Tensor:
    """Return the distribution of `sample`, float64 `[N, V]`; zeros for rows whose greatest logit is not finite."""
    scaled_NV = logits_NV / _column(limits.temperature, logits_NV)
    if not limits.are_off.all():
        ordered = scaled_NV.sort(dim=1, descending=True, stable=True)
        left_NV = ordered.values.masked_fill(~_left_by(limits, ordered.values), -torch.inf)
        scaled_NV = torch.empty_like(left_NV).scatter_(1, ordered.indices, left_NV)
    p_NV = scaled_NV.softmax(1, dtype=torch.float64)
    return p_NV.masked_fill_(~logits_NV.amax(1, keepdim=True).isfinite(), 0.0)


def top_distribution(logits_NV: torch.Tensor, limits: SamplingLimits, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a distribution over the *size* most likely ids, to draft from: int64 ids and float32 q, `[N, L]`.

    In descending order of q, which sums to 1; ids that the limits exclude have 0, and so have all ids of a row whose
    greatest logit is not finite.
    """
    likely = (logits_NV / _column(limits.temperature, logits_NV)).topk(min(size, logits_NV.shape[1]), 1)
    left_NL = likely.values
    if not limits.are_off.all():
        left_NL = left_NL.masked_fill(~_left_by(limits, left_NL), -torch.inf)
    return likely.indices, torch.where(left_NL[:, :1].isfinite(), left_NL.softmax(1), 0.0)


def without_replacement(ids_NL: torch.Tensor, q_NL: torch.Tensor, keys_N: torch.Tensor, width: int) -> torch.Tensor:
    """Sample *width* ids without replacement, int64 `[N, W]`: the greatest of log q + noise, in that order.

    Where fewer ids have a probability, others follow.
    """
    score_NL = q_NL.double().log() + gumbel(keys_N[:, None], ids_NL)
    return ids_NL.gather(1, score_NL.topk(width, 1).indices)


def greedy(logits_NV: torch.Tensor) -> torch.Tensor:
    """Return the most likely ids, the lowest id among equals; -1 for rows whose greatest logit is not finite."""
    ids_N = logits_NV.argmax(1)
    return torch.where(logits_NV.gather(1, ids_N[:, None])[:, 0].isfinite(), ids_N, NO_TOKEN)
