"""Sampling and acceptance inside a graph: shapes are static, and nothing is read on the host.

`workers.sampling.sample` is the definition. Triton's kernels, where they run, give the same ids without sorting; else
these functions call it.
"""

from collections.abc import Callable
from importlib.util import find_spec

import torch

from workers.gpu.sizes import SamplerKind
from workers.sampling.sample import (
    MIN_TEMPERATURE,
    DeviceLimits,
    SamplingLimits,
    greedy,
    parts_of,
    sample_drawn,
    sample_limited,
)

SAMPLER_KINDS: tuple[SamplerKind, ...] = ("greedy", "drawn", "limited")
Choose = Callable[[torch.Tensor, torch.Tensor, DeviceLimits], torch.Tensor]


def sampler_kind(limits: SamplingLimits) -> SamplerKind:
    """Return what rows with *limits* need."""
    is_random_N = limits.temperature >= MIN_TEMPERATURE
    if not is_random_N.any():
        return "greedy"
    return "drawn" if (limits.are_off | ~is_random_N).all() else "limited"


def _greedy(logits_NV: torch.Tensor, _keys_N: torch.Tensor, _limits: DeviceLimits) -> torch.Tensor:
    return greedy(logits_NV)


FUNCTIONS: dict[SamplerKind, Choose] = {"greedy": _greedy, "drawn": sample_drawn, "limited": sample_limited}


def choose(kind: SamplerKind, logits_NV: torch.Tensor, keys_N: torch.Tensor, limits: DeviceLimits) -> torch.Tensor:
    """Return the sampled ids, int64 `[N]`; -1 where the greatest logit is not finite."""
    if has_kernels(logits_NV.device):
        return _by_kernels(kind, logits_NV, keys_N, limits)
    function, parts = FUNCTIONS[kind], parts_of(logits_NV)
    if len(parts) <= 1 or kind == "greedy":
        return function(logits_NV, keys_N, limits)
    return torch.cat([function(logits_NV[at], keys_N[at], limits.at(at)) for at in parts])


def has_kernels(device: torch.device) -> bool:
    """Return whether Triton's kernels run on *device*."""
    return device.type == "cuda" and find_spec("triton") is not None


def _by_kernels(kind: SamplerKind, logits_NV: torch.Tensor, keys_N: torch.Tensor, limits: DeviceLimits) -> torch.Tensor:
    from workers.gpu.kernels.sampling import KernelLimits, sample_tokens  # noqa: PLC0415 - triton may be missing

    if kind != "limited":
        return sample_tokens(logits_NV, keys_N, KernelLimits(limits.temperature))
    return sample_tokens(logits_NV, keys_N, KernelLimits(limits.temperature, limits.top_k, limits.top_p, limits.min_p))


def accepted(
    sampled_RQ: torch.Tensor, tokens_RQ: torch.Tensor, parents_RQ: torch.Tensor, drafted_R: torch.Tensor
) -> torch.Tensor:
    """Return which nodes of each draft are accepted: bit n of an int64 is set for node n, `[R]`.

    A node is accepted if it equals the token that the target samples after its parent, which is accepted.

    Args:
        sampled_RQ: the target's token after each token that was fed.
        tokens_RQ: the newest token, then the draft's nodes in topological order.
        parents_RQ: int64, the column of each node's parent; of the first column, the newest token, 0.
        drafted_R: number of nodes.
    """
    columns_Q = torch.arange(tokens_RQ.shape[1], device=tokens_RQ.device)
    is_equal_RQ = (tokens_RQ == sampled_RQ.gather(1, parents_RQ)) & (columns_Q <= drafted_R[:, None])
    kept_RQ = is_equal_RQ | (columns_Q == 0)
    for _ in range((tokens_RQ.shape[1] - 1).bit_length()):  # each turn doubles how far up the ancestors are known
        kept_RQ = kept_RQ & kept_RQ.gather(1, parents_RQ)
        parents_RQ = parents_RQ.gather(1, parents_RQ)
    bits_Q = torch.ones_like(columns_Q) << (columns_Q - 1).clamp_min(0)
    return torch.where(columns_Q > 0, kept_RQ * bits_Q, 0).sum(1)
