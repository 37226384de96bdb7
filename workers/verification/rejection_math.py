"""Rejection sampling of draft chains: rules of acceptance that keep the target's distribution.

Draft tokens are sampled from distributions q, and accepted with independent uniform numbers u; p is the target's
distribution. The accepted tokens and the token sampled after them, from the *residual* distribution, have together the
distribution of the target alone, whatever q is:

- `standard`: token by token (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318);
- `block`: block verification of the whole chain (Sun et al., arXiv 2403.10444).

Pure functions over float64 arrays on the host. A distribution q is given as L ids and their probabilities; at all other
ids q is 0, and the residual is p times one number, the *scale*. The noise that samples a draft must be independent of
the target's noise. `workers.verification.rejection_math_trees` has the rules for trees.
Shapes: R rows, K draft tokens of a chain, L ids of a distribution, V ids of the vocabulary.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NO_TOKEN = -1


class ChainBatch(NamedTuple):
    """The chains of R rows of a round, padded with zeros.

    Attributes:
        counts_R: int64, draft tokens of each row.
        p_RKL: the target's probability, before each draft token, of the ids of the token's distribution.
        q_RKL: the distribution itself; it sums to 1.
        drawn_RK: int64, which of the L ids the draft token is.
    """

    counts_R: Ints
    p_RKL: Floats
    q_RKL: Floats
    drawn_RK: Ints


class AcceptedChains(NamedTuple):
    """How many tokens of each chain are accepted, and the residual distribution that the next token is sampled from.

    If all tokens are accepted, the residual is p, and the other two fields mean nothing. Else it is proportional to
    `residual_RL` at the ids of the first rejected token's distribution, and to `scale_R` times p at all others.
    """

    counts_R: Ints
    scale_R: Floats
    residual_RL: Floats


def standard(chains: ChainBatch, u_RK: Floats) -> AcceptedChains:
    """Accept tokens up to the first whose u is not below p/q; the residual is (p - q)+."""
    is_accepted_RK = u_RK < standard_acceptance(chains)
    return _accepted(chains, is_accepted_RK.cumprod(1).sum(1), np.ones((len(u_RK), u_RK.shape[1] + 1)))


def block(chains: ChainBatch, u_RK: Floats) -> AcceptedChains:
    """Accept tokens up to the last whose u is below `block_acceptance`; the residual is (P p - q)+, with P as there."""
    is_accepted_RK = u_RK < block_acceptance(chains)
    place_K = np.arange(1, u_RK.shape[1] + 1)
    return _accepted(chains, (is_accepted_RK * place_K).max(1, initial=0), _path_acceptance(chains))


def standard_acceptance(chains: ChainBatch) -> Floats:
    """Return the probability that each token is accepted when those before it are: min(1, p/q), `[R, K]`."""
    return np.minimum(1.0, _ratios(chains))


def block_acceptance(chains: ChainBatch) -> Floats:
    """Return the probability that each token is accepted when none after it is, `[R, K]`.

    With P_0 = 1 and P_i = min(1, P_(i-1) p/q), that is Z / (Z + 1 - P_i), where Z is the mass of (P_i p - q)+ after
    token i; and P_i for the last token.
    """
    path_RK = _path_acceptance(chains)[:, 1:]
    inner_RK = np.zeros_like(path_RK)
    scaled_RKL = path_RK[:, :-1, None] * chains.p_RKL[:, 1:]
    rest_RK = path_RK[:, :-1] * mass_beyond(chains.p_RKL[:, 1:])
    inner_RK[:, :-1] = end_probability(rest_RK + positive(scaled_RKL - chains.q_RKL[:, 1:]).sum(2), path_RK[:, :-1])
    place_K = np.arange(1, path_RK.shape[1] + 1)
    acceptance_RK = np.where(place_K < chains.counts_R[:, None], inner_RK, path_RK)
    return np.where(place_K <= chains.counts_R[:, None], acceptance_RK, 0.0)


def _ratios(chains: ChainBatch) -> Floats:
    """Return p/q of each token, `[R, K]`; 0 if its distribution cannot have sampled it, and after a row's last."""
    p_RK, q_RK = (
        np.take_along_axis(probs_RKL, chains.drawn_RK[:, :, None], 2)[:, :, 0]
        for probs_RKL in (chains.p_RKL, chains.q_RKL)
    )
    ratio_RK = np.divide(p_RK, q_RK, out=np.zeros_like(p_RK), where=q_RK > 0)
    return np.where(np.arange(ratio_RK.shape[1]) < chains.counts_R[:, None], ratio_RK, 0.0)


def _path_acceptance(chains: ChainBatch) -> Floats:
    """Return P_0 ... P_K, `[R, K + 1]`."""
    ratio_RK = _ratios(chains)
    path = [np.ones(len(ratio_RK))]
    for ratio_R in ratio_RK.T:
        path.append(np.minimum(1.0, path[-1] * ratio_R))
    return np.stack(path, 1)


def _accepted(chains: ChainBatch, counts_R: Ints, scales_RK: Floats) -> AcceptedChains:
    """Return the residuals after *counts_R* accepted tokens, where p counts `scales_RK[:, counts_R]` times."""
    rows_R = np.arange(len(counts_R))
    at_R = np.minimum(counts_R, chains.p_RKL.shape[1] - 1)
    scale_R = scales_RK[rows_R, counts_R]
    residual_RL = positive(scale_R[:, None] * chains.p_RKL[rows_R, at_R] - chains.q_RKL[rows_R, at_R])
    return AcceptedChains(counts_R, scale_R, residual_RL)


def end_probability(mass_X: Floats, path_X: Floats) -> Floats:
    """Return the probability that a path ends here when nothing after it is accepted: Z / (Z + 1 - P), 0 if Z is 0."""
    found: Floats = np.divide(mass_X, mass_X + (1.0 - path_X), out=np.zeros_like(mass_X), where=mass_X > 0)
    return found


def positive(values: Floats) -> Floats:
    """Return the positive part of *values*."""
    return np.maximum(values, 0.0)


def mass_beyond(p_XL: Floats) -> Floats:
    """Return the target's mass at all ids that are not given."""
    return positive(1.0 - p_XL.sum(-1))


def normalised(q_XL: Floats) -> Floats:
    """Return distributions that sum to 1; zeros stay zeros."""
    mass_X1 = q_XL.sum(-1, keepdims=True)
    found: Floats = np.divide(q_XL, mass_X1, out=np.zeros_like(q_XL), where=mass_X1 > 0)
    return found


def residual(p_RV: torch.Tensor, scale_R: torch.Tensor, at_M2: torch.Tensor, residual_M: torch.Tensor) -> torch.Tensor:
    """Return R residual distributions, float64 `[R, V]`, which need not sum to 1.

    Args:
        p_RV: float64, the target's distributions.
        scale_R: float64, what p is multiplied with.
        at_M2: int64, rows and ids at which the residual is given instead.
        residual_M: float64, the residual there.
    """
    residual_RV = p_RV * scale_R[:, None]
    residual_RV.index_put_((at_M2[:, 0], at_M2[:, 1]), residual_M)
    has_mass_R1 = residual_RV.amax(1, keepdim=True) > 0  # a token with p >= q may be rejected by a rounding error
    return torch.where(has_mass_R1, residual_RV, p_RV)


def gumbel_argmax(weights_RV: torch.Tensor, noise_RV: torch.Tensor) -> torch.Tensor:
    """Return argmax of log w + noise, the lowest id among equals, int64 `[R]`: a sample from w, for Gumbel noise.

    -1 where no weight is positive, or one is NaN.
    """
    score_RV = weights_RV.log() + noise_RV
    best_R1 = score_RV.amax(1, keepdim=True)
    ids_R = torch.where(
        score_RV == best_R1, torch.arange(score_RV.shape[1], device=score_RV.device), score_RV.shape[1]
    ).amin(1)
    return torch.where(best_R1[:, 0].isfinite(), ids_R, NO_TOKEN)
