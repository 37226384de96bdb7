"""Hydra (Ankner et al. 2024, arXiv 2402.05109): Medusa's heads, but each also reads the draft tokens before its own.

Head i reads the target's state at t and the embeddings of tokens t + 1 ... t + 1 + i, and predicts the one at t + 2 +
i: a first block, silu(W x + b) + R x + c, reduces them to one state; more blocks x + silu(W x + b) and an output layer
follow. In the architecture `prefix-mlp` (Hydra++), a decoder layer with its own KV runs over the target's states, and
the heads read its output instead.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, ClassVar

import torch
from torch import nn

from proposers.formats import hydra as checkpoint
from proposers.shared.decoder import Layers, fill, stored, through
from proposers.shared.heads import Block, HeadsModule, HeadsProposer
from protos.config.engine import SpeculativeConfig
from protos.draft import DraftRow
from protos.draft_module import DraftWeights
from protos.layers import FeatureSpec


class Prefix(nn.Module):
    """The decoder layer before the heads."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layers.layer(0)])
        self.norm = layers.norm(layers.dims.hidden)


class HydraNet(nn.Module):
    """The checkpoint's tensors, under its names."""

    def __init__(self, spec: checkpoint.HydraSpec, layers: Layers | None) -> None:
        super().__init__()
        width = spec.width
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(Block((i + 2) * width if spec.grounded and not k else width, width) for k in range(spec.num_blocks))
            )
            for i in range(spec.num_heads)
        )
        self.heads = nn.ModuleList(
            nn.Linear(width, spec.vocab_size, bias=spec.head_bias) for _ in range(spec.num_heads)
        )
        if layers is not None:
            self.prefix = Prefix(layers)


class Hydra(HeadsModule):
    """See `proposers.shared.heads.Heads`. The states are everything a head reads, wider from head to head.

    With a prefix, the input at position i is the target's state at i alone, fed once token i + 1 is known.
    """

    def __init__(self, spec: checkpoint.HydraSpec, tensors: Mapping[str, torch.Tensor], weights: DraftWeights) -> None:
        super().__init__(spec.num_heads, spec.vocab_size, weights.dtype)
        self.is_grounded = spec.grounded
        layers = None if spec.prefix is None else Layers(spec.prefix, 1, spec.rope, spec.max_model_len, weights)
        with torch.device("meta"):
            self.net = HydraNet(spec, layers)
        fill(self.net, tensors, weights)
        self.embed = weights.embedding() if spec.grounded else nn.Identity()
        self.compiled_methods = {"logits": spec.num_heads} | ({"forward": 1} if layers is not None else {})
        if layers is not None:
            self.rope, self.layers = layers.rope(weights), layers.shapes
            self.shift, self.max_model_len = 1, spec.max_model_len

    def forward(self, tokens_1T: torch.Tensor, positions_1T: torch.Tensor, features_1TH: torch.Tensor) -> torch.Tensor:
        """Return the prefix layer's output, `[1, T, H]`."""
        rope = self.rope(features_1TH, positions_1T)
        states_1TH: torch.Tensor = self.net.prefix.norm(through(self.net.prefix.layers, features_1TH, rope))
        return states_1TH

    def step(self, states_NS: torch.Tensor, tokens_N: torch.Tensor, head: int) -> torch.Tensor:
        """Append the tokens' embeddings to the states, if the heads read tokens."""
        return torch.cat([states_NS, self.embed(tokens_N)], 1) if self.is_grounded else states_NS

    def logits(self, states_NS: torch.Tensor, head: int) -> torch.Tensor:
        """Return fp32 logits, `[N, V]`."""
        logits_NV: torch.Tensor = self.net.heads[head](self.net.blocks[head](states_NS))
        return logits_NV.float()


class HydraProposer(HeadsProposer):
    """Drafts with Hydra heads: static trees by default, or chains."""

    method: ClassVar[str] = "hydra"
    decay: ClassVar[float] = 0.9

    @classmethod
    def features_of(cls, config: SpeculativeConfig, draft: Mapping[str, Any], target: Mapping[str, Any]) -> FeatureSpec:
        """Return the state that the target's head reads: for every token with a prefix layer, else for the newest."""
        return FeatureSpec("all" if draft.get("hydra_head_arch") == checkpoint.PREFIX else "last")

    @classmethod
    def build(cls, config: SpeculativeConfig, weights: DraftWeights) -> Hydra:
        """See `protos.draft_module.LearnedProposer`."""
        return Hydra(*stored(checkpoint, weights), weights)

    def begin(self, rows: Seq[DraftRow]) -> torch.Tensor:
        """Return the prefix layer's output, if there is one, else the target's states."""
        return self.runner.catch_up(rows) if self.module.layers else super().begin(rows)
