"""Medusa (Cai et al. 2024, arXiv 2401.10774): heads that each predict a token further ahead, all from one state.

The target's own head predicts the token at t + 1 from its state at t; head i, from the same state, the one at t + 2 +
i. A head is a few blocks x + silu(W x + b) and an output layer: its own, one shared by all heads, or the target's
(Medusa-2 as served by TGI). The predictions are independent of each other, so trees are accepted more often than
chains.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from proposers.formats import medusa as checkpoint
from proposers.shared.decoder import TargetVocabulary, fill, stored
from proposers.shared.heads import Block, HeadsModule, HeadsProposer
from protos.config.engine import SpeculativeConfig
from protos.draft_module import DraftWeights
from protos.layers import FeatureSpec

Output = Callable[[torch.Tensor], torch.Tensor]


class MedusaNet(nn.Module):
    """The checkpoint's tensors, under its names."""

    def __init__(self, spec: checkpoint.MedusaSpec) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(*(Block(spec.width, spec.width, bias=spec.has_bias) for _ in range(spec.num_blocks)))
            for _ in range(spec.num_heads)
        )
        if spec.output == "own":
            self.heads = nn.ModuleList(_output(spec) for _ in range(spec.num_heads))
        elif spec.output == "shared":
            self.head = _output(spec)


def _output(spec: checkpoint.MedusaSpec) -> nn.Linear:
    return nn.Linear(spec.width, spec.head_size, bias=False)


class Medusa(HeadsModule):
    """See `proposers.shared.heads.Heads`. All heads read the target's state."""

    is_grounded = False

    def __init__(self, spec: checkpoint.MedusaSpec, tensors: dict[str, torch.Tensor], weights: DraftWeights) -> None:
        super().__init__(spec.num_heads, spec.vocab_size, weights.dtype)
        ids_V = tensors.pop("target_ids", None)
        self.vocabulary = TargetVocabulary(None if ids_V is None else ids_V.to(weights.device), spec.vocab_size)
        with torch.device("meta"):
            self.net = MedusaNet(spec)
        fill(self.net, tensors, weights)
        self.compiled_methods = {"logits": spec.num_heads}
        self.outputs: list[Output] = self._outputs(spec, weights)

    def _outputs(self, spec: checkpoint.MedusaSpec, weights: DraftWeights) -> list[Output]:
        """Return the output layer of each head."""
        if spec.output == "own":
            return [*self.net.heads]
        return [self.net.head if spec.output == "shared" else weights.head()] * spec.num_heads

    def step(self, states_NS: torch.Tensor, tokens_N: torch.Tensor, head: int) -> torch.Tensor:
        """Return the states unchanged: heads do not read draft tokens."""
        return states_NS

    def logits(self, states_NS: torch.Tensor, head: int) -> torch.Tensor:
        """Return fp32 logits, `[N, V]`."""
        return self.vocabulary(self.outputs[head](self.net.blocks[head](states_NS)))


class MedusaProposer(HeadsProposer):
    """Drafts with Medusa heads: static trees by default, or chains."""

    method: ClassVar[str] = "medusa"
    decay: ClassVar[float] = 0.8

    @classmethod
    def features_of(cls, config: SpeculativeConfig, draft: Mapping[str, Any], target: Mapping[str, Any]) -> FeatureSpec:
        """Return the state that the target's head reads, for the newest token."""
        return FeatureSpec("last")

    @classmethod
    def build(cls, config: SpeculativeConfig, weights: DraftWeights) -> Medusa:
        """See `protos.draft_module.LearnedProposer`."""
        return Medusa(*stored(checkpoint, weights), weights)
