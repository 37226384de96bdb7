"""IBM's MLP speculator (Wertheimer et al. 2024, arXiv 2404.19124): each head combines the state with a draft token.

s_0 is the target's state; head i computes s_(i+1) = gelu(norm_i(proj_i(s_i) w_s + emb_i(token) w_e)) and the logits
head_i(s_(i+1)). w_s and w_e preserve the state's variance over the number of trained heads, so they depend on the
checkpoint, not on the number of tokens drafted.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from proposers.formats import mlp_speculator as checkpoint
from proposers.shared.decoder import fill, stored
from proposers.shared.heads import HeadsModule, HeadsProposer
from protos.config.engine import SpeculativeConfig
from protos.draft_module import DraftWeights
from protos.layers import FeatureSpec

EPSILON = 1e-6


class Norm(nn.Module):
    """RMS norm with a bias."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(size)), nn.Parameter(torch.empty(size))

    def forward(self, states_NS: torch.Tensor) -> torch.Tensor:
        """Return states of the same shape."""
        return F.rms_norm(states_NS, self.weight.shape, self.weight, EPSILON) + self.bias


class MLPSpeculator(HeadsModule):
    """See `proposers.shared.heads.Heads`."""

    def __init__(self, spec: checkpoint.MLPSpeculatorSpec, dtype: torch.dtype) -> None:
        super().__init__(spec.num_heads, spec.vocab_size, dtype)
        self.compiled_methods = {"step": spec.num_heads, "logits": spec.num_heads}
        self.scale_input = spec.scale_input
        self.state_weight = 0.5 ** (0.5 / spec.num_heads)
        self.token_weight = math.sqrt((1 - self.state_weight**2) * spec.inner / 2)
        count, is_tied = spec.num_heads, spec.tied
        self.emb = _several(count, is_tied, lambda: nn.Embedding(spec.vocab_size, spec.inner))
        self.ln = _several(count, is_tied, lambda: Norm(spec.inner))
        self.head = _several(count, is_tied, lambda: nn.Linear(spec.inner, spec.vocab_size, bias=False))
        later = _several(count - 1, is_tied, lambda: nn.Linear(spec.inner, spec.inner, bias=False))
        self.proj = nn.ModuleList([nn.Linear(spec.width, spec.inner, bias=False), *later])

    def begin(self, features_RX: torch.Tensor) -> torch.Tensor:
        """Return the target's states, `[R, H]`; with `scale_input`, normed and divided by the square root of two."""
        if not self.scale_input:
            return features_RX
        return F.rms_norm(features_RX, features_RX.shape[-1:], eps=EPSILON) / math.sqrt(2)

    def step(self, states_NS: torch.Tensor, tokens_N: torch.Tensor, head: int) -> torch.Tensor:
        """Return the next states, `[N, inner]`."""
        mixed_NS = self.proj[head](states_NS) * self.state_weight + self.emb[head](tokens_N) * self.token_weight
        return F.gelu(self.ln[head](mixed_NS))

    def logits(self, states_NS: torch.Tensor, head: int) -> torch.Tensor:
        """Return fp32 logits, `[N, V]`."""
        logits_NV: torch.Tensor = self.head[head](states_NS)
        return logits_NV.float()


def _several(count: int, is_tied: bool, make: Callable[[], nn.Module]) -> nn.ModuleList:
    """Return *count* modules; if tied, the same module repeated."""
    return nn.ModuleList([make()] * count if is_tied else [make() for _ in range(count)])


class MLPSpeculatorProposer(HeadsProposer):
    """Drafts with an MLP speculator: chains by default, or static trees."""

    method: ClassVar[str] = "mlp_speculator"
    default_shape: ClassVar[Literal["chain", "tree"]] = "chain"
    decay: ClassVar[float] = 0.9

    @classmethod
    def features_of(cls, config: SpeculativeConfig, draft: Mapping[str, Any], target: Mapping[str, Any]) -> FeatureSpec:
        """Return the state that the target's head reads, for the newest token."""
        return FeatureSpec("last")

    @classmethod
    def build(cls, config: SpeculativeConfig, weights: DraftWeights) -> MLPSpeculator:
        """See `protos.draft_module.LearnedProposer`."""
        spec, tensors = stored(checkpoint, weights)
        with torch.device("meta"):
            module = MLPSpeculator(spec, weights.dtype)
        fill(module, tensors, weights)
        return module
