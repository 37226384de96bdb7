"""Hydra (Ankner et al. 2024, arXiv 2402.05109): Medusa's heads, but each sees the tokens guessed before its own.

Head i reads the target's state at t and the embeddings of tokens t + 1 ... t + 1 + i, and guesses the one at t + 2 + i:
a first block, silu(W x + b) + R x + c, narrows all of that to one state; more blocks x + silu(W x + b) and an output
follow. In the architecture `prefix-mlp` (Hydra++) a decoder layer with KV of its own runs over the target's states, and
heads read what comes behind it instead.
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
    """The layer in front of the heads."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layers.layer(0)])
        self.norm = layers.norm(layers.dims.hidden)


class HydraNet(nn.Module):
    """What the checkpoint holds, under its names."""

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
    """See `proposers.shared.heads.Heads`. What is handed on is everything a head reads, wider from head to head.

    With a prefix, the entry of position i is made of the target's state at i alone, once the token behind it is known.
    """

    def __init__(self, spec: checkpoint.HydraSpec, tensors: Mapping[str, torch.Tensor], parts: DraftWeights) -> None:
        super().__init__(spec.num_heads, spec.vocab_size, parts.dtype)
        self.is_grounded = spec.grounded
        layers = None if spec.prefix is None else Layers(spec.prefix, 1, spec.rope, spec.max_model_len, parts)
        with torch.device("meta"):
            self.net = HydraNet(spec, layers)
        fill(self.net, tensors, parts)
        self.embed = parts.embedding() if spec.grounded else nn.Identity()
        if layers is not None:
            self.rope, self.layers = layers.rope(parts), layers.shapes
            self.shift, self.max_model_len = 1, spec.max_model_len

    def forward(self, tokens_1T: torch.Tensor, positions_1T: torch.Tensor, features_1TH: torch.Tensor) -> torch.Tensor:
        """Return the states behind the prefix, `[1, T, H]`."""
        rope = self.rope(features_1TH, positions_1T)
        states_1TH: torch.Tensor = self.net.prefix.norm(through(self.net.prefix.layers, features_1TH, rope))
        return states_1TH

    def step(self, states_NS: torch.Tensor, tokens_N: torch.Tensor, head: int) -> torch.Tensor:
        """Return the states with the tokens' embeddings behind them; as they are where heads see no tokens."""
        return torch.cat([states_NS, self.embed(tokens_N)], 1) if self.is_grounded else states_NS

    def logits(self, states_NS: torch.Tensor, head: int) -> torch.Tensor:
        """Return `[N, V]`."""
        logits_NV: torch.Tensor = self.net.heads[head](self.net.blocks[head](states_NS))
        return logits_NV.float()


class HydraProposer(HeadsProposer):
    """Drafts trees: the one that is given, else the one that is right most often by what heads usually achieve."""

    method: ClassVar[str] = "hydra"
    decay: ClassVar[float] = 0.9

    @classmethod
    def features_of(cls, config: SpeculativeConfig, draft: Mapping[str, Any], target: Mapping[str, Any]) -> FeatureSpec:
        """The state that the target's head reads: of every token where a prefix attends to them, else of the newest."""
        return FeatureSpec("all" if draft.get("hydra_head_arch") == checkpoint.PREFIX else "last")

    @classmethod
    def build(cls, config: SpeculativeConfig, parts: DraftWeights) -> Hydra:
        """See `protos.draft_module.LearnedProposer`."""
        return Hydra(*stored(checkpoint, parts), parts)

    def begin(self, rows: Seq[DraftRow]) -> torch.Tensor:
        """Return what comes behind the prefix where there is one."""
        return self.runner.catch_up(rows) if self.module.layers else super().begin(rows)
