"""Acceptance by p/q: rules that keep as much of a draft as they can without changing the target's law.

A draft is drawn from laws q, and judged with uniform numbers u of its own; p is the target's law. What is kept, and the
token drawn behind it from what is *left*, have together the law of the target alone, whatever q is:

- `standard`: token by token (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318);
- `block`: the whole chain at once (Sun et al., arXiv 2403.10444).

Pure functions over float64 arrays on the host, where a law is a few ids and their probabilities: beyond them q is 0,
and what is left is p times one number, the *scale*. Noise that a draft shares with its target would spoil them all.
For trees there is `workers.verification.rejection_math_trees`. Shapes: R rows, K guesses of a chain, L ids of a law, V
ids of all.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NONE_LEFT = -1


class ChainBatch(NamedTuple):
    """The chains of R rows of a round, filled up with zeros.

    Attributes:
        counts_R: int64, guesses of each.
        p_RKL: the target's probability, before each guess, of the ids that the guess's law has.
        q_RKL: the law's own; it adds up to 1.
        guess_RK: int64, which of the L ids was drawn.
    """

    counts_R: Ints
    p_RKL: Floats
    q_RKL: Floats
    guess_RK: Ints


class Kept(NamedTuple):
    """What came of chains: `counts_R` guesses are kept, and the token behind them is drawn from what is left.

    Where all are kept that is p, and the two others mean nothing. Else it is proportional to `left_RL` at the ids of
    the law of the first guess that was not kept, and to `scale_R` times p at all others.
    """

    counts_R: Ints
    scale_R: Floats
    left_RL: Floats


def standard(chains: ChainBatch, u_RK: Floats) -> Kept:
    """Keep guesses up to the first whose u is not below p/q; left is (p - q)+."""
    is_kept_RK = u_RK < standard_odds(chains)
    return _kept(chains, is_kept_RK.cumprod(1).sum(1), np.ones((len(u_RK), u_RK.shape[1] + 1)))


def block(chains: ChainBatch, u_RK: Floats) -> Kept:
    """Keep guesses up to the last whose u is below its odds; left is (P p - q)+, with P as in `block_odds`."""
    is_kept_RK = u_RK < block_odds(chains)
    place_K = np.arange(1, u_RK.shape[1] + 1)
    return _kept(chains, (is_kept_RK * place_K).max(1, initial=0), _path_odds(chains))


def standard_odds(chains: ChainBatch) -> Floats:
    """Return for each guess how likely it is kept when those before it are: min(1, p/q), `[R, K]`."""
    return np.minimum(1.0, _ratios(chains))


def block_odds(chains: ChainBatch) -> Floats:
    """Return for each guess how likely it is kept when none behind it is, `[R, K]`.

    With P_0 = 1 and P_i = min(1, P_(i-1) p/q), that is Z / (Z + 1 - P_i), Z the mass of (P_i p - q)+ behind guess i;
    and P_i for the last one.
    """
    path_RK = _path_odds(chains)[:, 1:]
    behind_RK = np.zeros_like(path_RK)
    scaled_RKL = path_RK[:, :-1, None] * chains.p_RKL[:, 1:]
    rest_RK = path_RK[:, :-1] * mass_beyond(chains.p_RKL[:, 1:])
    behind_RK[:, :-1] = end_odds(rest_RK + positive(scaled_RKL - chains.q_RKL[:, 1:]).sum(2), path_RK[:, :-1])
    place_K = np.arange(1, path_RK.shape[1] + 1)
    odds_RK = np.where(place_K < chains.counts_R[:, None], behind_RK, path_RK)
    return np.where(place_K <= chains.counts_R[:, None], odds_RK, 0.0)


def _ratios(chains: ChainBatch) -> Floats:
    """Return p/q of each guess, `[R, K]`; 0 where its law cannot have drawn it, and behind a row's last."""
    p_RK, q_RK = (
        np.take_along_axis(law_RKL, chains.guess_RK[:, :, None], 2)[:, :, 0] for law_RKL in (chains.p_RKL, chains.q_RKL)
    )
    ratio_RK = np.divide(p_RK, q_RK, out=np.zeros_like(p_RK), where=q_RK > 0)
    return np.where(np.arange(ratio_RK.shape[1]) < chains.counts_R[:, None], ratio_RK, 0.0)


def _path_odds(chains: ChainBatch) -> Floats:
    """Return P_0 ... P_K, `[R, K + 1]`."""
    ratio_RK = _ratios(chains)
    path = [np.ones(len(ratio_RK))]
    for ratio_R in ratio_RK.T:
        path.append(np.minimum(1.0, path[-1] * ratio_R))
    return np.stack(path, 1)


def _kept(chains: ChainBatch, counts_R: Ints, scales_RK: Floats) -> Kept:
    """Say what is left behind *counts_R* guesses, if p counts there `scales_RK[:, counts_R]` times."""
    rows_R = np.arange(len(counts_R))
    at_R = np.minimum(counts_R, chains.p_RKL.shape[1] - 1)
    scale_R = scales_RK[rows_R, counts_R]
    left_RL = positive(scale_R[:, None] * chains.p_RKL[rows_R, at_R] - chains.q_RKL[rows_R, at_R])
    return Kept(counts_R, scale_R, left_RL)


def end_odds(mass_X: Floats, path_X: Floats) -> Floats:
    """Return how likely a path ends here when nothing behind is kept: Z / (Z + 1 - P), 0 where Z is."""
    found: Floats = np.divide(mass_X, mass_X + (1.0 - path_X), out=np.zeros_like(mass_X), where=mass_X > 0)
    return found


def positive(values: Floats) -> Floats:
    """Return what is above 0 of *values*, else 0."""
    return np.maximum(values, 0.0)


def mass_beyond(p_XL: Floats) -> Floats:
    """Return the target's mass beyond the ids of a law."""
    return positive(1.0 - p_XL.sum(-1))


def normalised(q_XL: Floats) -> Floats:
    """Return laws that add up to 1; nothing stays nothing."""
    mass_X1 = q_XL.sum(-1, keepdims=True)
    found: Floats = np.divide(q_XL, mass_X1, out=np.zeros_like(q_XL), where=mass_X1 > 0)
    return found


def left(p_RV: torch.Tensor, scale_R: torch.Tensor, at_M2: torch.Tensor, left_M: torch.Tensor) -> torch.Tensor:
    """Return what is left of R laws, float64 `[R, V]`, which need not add up to 1.

    Args:
        p_RV: float64, the target's laws.
        scale_R: float64, how often p counts.
        at_M2: int64, rows and ids where it does not count.
        left_M: float64, what is left there.
    """
    left_RV = p_RV * scale_R[:, None]
    left_RV.index_put_((at_M2[:, 0], at_M2[:, 1]), left_M)
    has_mass_R1 = left_RV.amax(1, keepdim=True) > 0  # rounding may have kept a guess that took all, from being kept
    return torch.where(has_mass_R1, left_RV, p_RV)


def drawn(weights_RV: torch.Tensor, noise_RV: torch.Tensor) -> torch.Tensor:
    """Return argmax of log w + noise, the lowest id among equals, int64 `[R]`: a draw from w where noise is Gumbel's.

    -1 where there is nothing to draw from: no weight, or some that are no numbers.
    """
    score_RV = weights_RV.log() + noise_RV
    best_R1 = score_RV.amax(1, keepdim=True)
    ids_R = torch.where(
        score_RV == best_R1, torch.arange(score_RV.shape[1], device=score_RV.device), score_RV.shape[1]
    ).amin(1)
    return torch.where(best_R1[:, 0].isfinite(), ids_R, NONE_LEFT)
