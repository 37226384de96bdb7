"""Medusa (Cai et al. 2024, arXiv 2401.10774): heads that each guess a token further ahead, all from one state.

The target's own head says the token at t + 1 by its state at t; head i, from the same state, the one at t + 2 + i. A
head is a few blocks x + silu(W x + b), and an output of its own, one for all heads, or (Medusa-2 as TGI serves it) the
target's. Guesses do not know of each other, so a tree of them is worth more than a chain.
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
    """What the checkpoint holds, under its names."""

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
    """See `proposers.shared.heads.Heads`. What all heads read is the target's state."""

    is_grounded = False

    def __init__(self, spec: checkpoint.MedusaSpec, tensors: dict[str, torch.Tensor], parts: DraftWeights) -> None:
        super().__init__(spec.num_heads, spec.vocab_size, parts.dtype)
        ids_V = tensors.pop("target_ids", None)
        self.vocabulary = TargetVocabulary(None if ids_V is None else ids_V.to(parts.device), spec.vocab_size)
        with torch.device("meta"):
            self.net = MedusaNet(spec)
        fill(self.net, tensors, parts)
        self.outputs: list[Output] = self._outputs(spec, parts)

    def _outputs(self, spec: checkpoint.MedusaSpec, parts: DraftWeights) -> list[Output]:
        """Return what turns each head's states into logits."""
        if spec.output == "own":
            return [*self.net.heads]
        return [self.net.head if spec.output == "shared" else parts.head()] * spec.num_heads

    def step(self, states_NS: torch.Tensor, tokens_N: torch.Tensor, head: int) -> torch.Tensor:
        """Return the states as they are: heads do not know what was guessed."""
        return states_NS

    def logits(self, states_NS: torch.Tensor, head: int) -> torch.Tensor:
        """Return `[N, V]`."""
        return self.vocabulary(self.outputs[head](self.net.blocks[head](states_NS)))


class MedusaProposer(HeadsProposer):
    """Drafts trees: the one that is given, else the one that is right most often by what heads usually achieve."""

    method: ClassVar[str] = "medusa"
    decay: ClassVar[float] = 0.8

    @classmethod
    def features_of(cls, config: SpeculativeConfig, draft: Mapping[str, Any], target: Mapping[str, Any]) -> FeatureSpec:
        """The state that the target's head reads, of the newest token."""
        return FeatureSpec("last")

    @classmethod
    def build(cls, config: SpeculativeConfig, parts: DraftWeights) -> Medusa:
        """See `protos.draft_module.LearnedProposer`."""
        return Medusa(*stored(checkpoint, parts), parts)
