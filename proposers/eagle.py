"""EAGLE-1 and EAGLE-2: a decoder layer over the target's last states (Li et al. 2024, arXiv 2401.15077).

The input at position i is token i + 1 and the target's state of token i. The output predicts the target's state of
token i + 1, and is read by the target's head. EAGLE-2 (arXiv 2406.16858) uses the same weights to draft trees.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from proposers.formats import eagle as format_of
from proposers.shared.autoregressive import AutoregressiveProposer
from proposers.shared.decoder import Layers, LayersModule, stored, through
from protos.config.engine import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from protos.draft_module import DraftWeights
from protos.layers import FeatureSpec


class EagleNet(nn.Module):
    """The checkpoint's tensors, under its names. The first layer has no input norm, and there is no final norm."""

    def __init__(self, spec: format_of.EagleSpec, layers: Layers) -> None:
        super().__init__()
        hidden = spec.dims.hidden
        self.fc = nn.Linear(2 * hidden, hidden, bias=spec.fc_bias)
        self.layers = nn.ModuleList(layers.layer(index) for index in range(spec.num_layers))
        self.layers[0].input_layernorm = nn.Identity()
        if spec.has_embedding:
            self.embed_tokens = nn.Embedding(spec.vocab_size, hidden)


class EagleModule(LayersModule):
    """See `protos.draft_module.Module`. Outputs states, `[1, T, H]`."""

    max_tokens = MAX_SPECULATIVE_TOKENS
    compiled_methods: ClassVar[Mapping[str, int]] = {"forward": 1, "predict": 1}

    def __init__(self, spec: format_of.EagleSpec, tensors: dict[str, torch.Tensor], weights: DraftWeights) -> None:
        layers = Layers(spec.dims, spec.num_layers, spec.rope, spec.max_model_len, weights)
        with torch.device("meta"):
            net = EagleNet(spec, layers)
        super().__init__(net, layers, tensors, spec.vocab_size, weights)

    def take_in(self, features_TF: torch.Tensor) -> torch.Tensor:
        """Return the features unchanged."""
        return features_TF

    def forward(self, tokens_1T: torch.Tensor, positions_1T: torch.Tensor, features_1TH: torch.Tensor) -> torch.Tensor:
        """Return predictions of the target's states of the tokens, `[1, T, H]`."""
        states_1TH = self.net.fc(torch.cat([self.embed(tokens_1T), features_1TH], -1))
        return through(self.net.layers, states_1TH, self.rope(states_1TH, positions_1T))

    def predict(self, states_NH: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `proposers.shared.autoregressive.AutoregressiveModule`: states are fed back unchanged."""
        return self.to_target(self.head(states_NH)), states_NH


class EagleProposer(AutoregressiveProposer):
    """Drafts with an EAGLE-1 head: chains, or trees as EAGLE-2 does."""

    method: ClassVar[str] = "eagle"

    @classmethod
    def features_of(cls, config: SpeculativeConfig, draft: Mapping[str, Any], target: Mapping[str, Any]) -> FeatureSpec:
        """Return the state that the target's head reads, for every token."""
        return FeatureSpec("all")

    @classmethod
    def build(cls, config: SpeculativeConfig, weights: DraftWeights) -> EagleModule:
        """See `protos.draft_module.LearnedProposer`."""
        return EagleModule(*stored(format_of, weights), weights)
