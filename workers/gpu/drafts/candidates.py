"""The candidates for the children of draft trees' nodes inside a graph.

`workers.sampling.sample` is the definition, as it is for `workers.gpu.choosing`.
"""

from collections.abc import Callable

import torch

from workers.gpu.inputs import RoundInputs
from workers.gpu.sizes import SamplerKind
from workers.sampling.sample import DeviceLimits, candidates_drawn, candidates_limited, likely_candidates, parts_of

Candidates = tuple[torch.Tensor, torch.Tensor]


def _likely(logits_NV: torch.Tensor, _keys_N: torch.Tensor, _limits: DeviceLimits, width: int) -> Candidates:
    return likely_candidates(logits_NV, width)


FUNCTIONS: dict[SamplerKind, Callable[[torch.Tensor, torch.Tensor, DeviceLimits, int], Candidates]] = {
    "greedy": _likely,
    "drawn": candidates_drawn,
    "limited": candidates_limited,
}


def candidates(
    kind: SamplerKind, logits_NV: torch.Tensor, keys_N: torch.Tensor, limits: DeviceLimits, width: int
) -> Candidates:
    """Return what `workers.sampling.sampler.Sampler.candidates` does, without reading anything on the host.

    Args:
        kind: what the rows need at most.
        logits_NV: float32, of the ids that may be sampled.
        keys_N: int64, of the noise.
        limits: of each row.
        width: candidates of each.

    Returns:
        Ids, int64 `[N, W]`, and their log-probabilities, float32.
    """
    found = [FUNCTIONS[kind](logits_NV[at], keys_N[at], limits.at(at), width) for at in parts_of(logits_NV)]
    ids_NW, log_q_NW = (torch.cat(column) if len(column) > 1 else column[0] for column in zip(*found, strict=True))
    return ids_NW, log_q_NW


def candidates_at(
    kind: SamplerKind, logits_NV: torch.Tensor, inputs: RoundInputs, depth: int, width: int
) -> Candidates:
    """Return `candidates` for the children of nodes of a depth, the same number of nodes for each row of *inputs*."""
    repeats = len(logits_NV) // inputs.size.rows
    keys_N = inputs.on_device["keys_RQ"][:, depth, None].expand(-1, repeats).reshape(-1)
    return candidates(kind, logits_NV, keys_N, inputs.limits(repeats), width)
