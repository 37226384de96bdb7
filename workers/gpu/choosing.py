"""Sampling and acceptance inside a graph: shapes are static, and nothing is read on the host.

`workers.sampling.sample` is the definition; these functions call it.
"""

from collections.abc import Callable
from typing import Literal

import torch

from workers.sampling.sample import MIN_TEMPERATURE, DeviceLimits, Limits, greedy, sample_drawn, sample_limited

Chooser = Literal["greedy", "drawn", "limited"]
"""What the rows of a round need at most: the most likely tokens, noise, or top-k, top-p and min-p as well."""
CHOOSERS: tuple[Chooser, ...] = ("greedy", "drawn", "limited")
Choose = Callable[[torch.Tensor, torch.Tensor, DeviceLimits], torch.Tensor]
MAX_LOGITS = 1 << 24
"""Logits sampled from at a time: noise takes several float64 of each."""


def chooser_for(limits: Limits) -> Chooser:
    """Return what rows with *limits* need."""
    is_random_N = limits.temperature >= MIN_TEMPERATURE
    if not is_random_N.any():
        return "greedy"
    return "drawn" if (limits.are_off | ~is_random_N).all() else "limited"


def _greedy(logits_NV: torch.Tensor, _keys_N: torch.Tensor, _limits: DeviceLimits) -> torch.Tensor:
    return greedy(logits_NV)


FUNCTIONS: dict[Chooser, Choose] = {"greedy": _greedy, "drawn": sample_drawn, "limited": sample_limited}


def choose(chooser: Chooser, logits_NV: torch.Tensor, keys_N: torch.Tensor, limits: DeviceLimits) -> torch.Tensor:
    """Return the sampled ids, int64 `[N]`; -1 where the greatest logit is not finite."""
    count, vocab = logits_NV.shape
    size = max(1, MAX_LOGITS // vocab)
    function = FUNCTIONS[chooser]
    if count <= size or chooser == "greedy":
        return function(logits_NV, keys_N, limits)
    parts = [slice(first, first + size) for first in range(0, count, size)]
    return torch.cat([function(logits_NV[at], keys_N[at], _part(limits, at)) for at in parts])


def _part(limits: DeviceLimits, at: slice) -> DeviceLimits:
    return DeviceLimits(limits.temperature[at], limits.top_k[at], limits.top_p[at], limits.min_p[at])


def accepted(sampled_RQ: torch.Tensor, tokens_RQ: torch.Tensor, drafted_R: torch.Tensor) -> torch.Tensor:
    """Return how many draft tokens of each chain equal the target's own, up to the first that does not; int64 `[R]`.

    Args:
        sampled_RQ: the target's token after each token that was fed.
        tokens_RQ: the newest token, then the draft.
        drafted_R: length of the draft.
    """
    draft_RK = tokens_RQ[:, 1:]
    is_drafted_RK = torch.arange(draft_RK.shape[1], device=draft_RK.device) < drafted_R[:, None]
    is_equal_RK = (draft_RK == sampled_RQ[:, :-1]) & is_drafted_RK
    return is_equal_RK.long().cumprod(1).sum(1)
