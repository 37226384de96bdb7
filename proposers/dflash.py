"""DFlash: a block of mask tokens, denoised in one forward over the target's states (arXiv 2602.06036).

Known tokens have no states of their own: each layer computes their keys and values from the target's states, projected
by `fc`. The newest known token, which the target has not computed yet, is the first of the block, whose positions
attend to each other.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from proposers.formats import dflash as format_of
from proposers.shared.decoder import Layers, LayersModule, Rope, stored
from proposers.shared.one_forward import ParallelProposer
from protos.config.engine import SpeculativeConfig
from protos.draft_module import DraftWeights
from protos.layers import FeatureSpec


class DFlashNet(nn.Module):
    """The checkpoint's tensors, under its names."""

    def __init__(self, spec: format_of.DFlashSpec, layers: Layers) -> None:
        super().__init__()
        hidden = spec.dims.hidden
        self.fc = nn.Linear(spec.target_hidden * len(spec.inputs_of), hidden, bias=False)
        self.hidden_norm, self.norm = layers.norm(hidden), layers.norm(hidden)
        windows = [attention.window for attention in spec.attention]
        self.layers = nn.ModuleList(map(layers.layer, range(len(windows)), windows))
        if spec.has_embedding:
            self.embed_tokens = nn.Embedding(spec.vocab_size, hidden)
        if spec.has_head:
            self.lm_head = nn.Linear(hidden, spec.draft_size, bias=False)


class DFlashModule(LayersModule):
    """See `protos.draft_module.Module` and `proposers.shared.one_forward.MaskedModule`; outputs states, `[1, T, H]`.

    The features fed with a token are `[H + 1]`: the projected target states and a one for known tokens, zeros for
    positions of a block.
    """

    compiled_methods: ClassVar[Mapping[str, int]] = {"forward": 1, "logits": 1, "take_in": 1}

    def __init__(self, spec: format_of.DFlashSpec, tensors: dict[str, torch.Tensor], weights: DraftWeights) -> None:
        layers = Layers(spec.dims, len(spec.attention), spec.rope, spec.max_model_len, weights)
        with torch.device("meta"):
            net = DFlashNet(spec, layers)
        super().__init__(net, layers, tensors, spec.vocab_size, weights)
        self.mask_token_id, self.attention = spec.mask_token_id, spec.attention
        self.sees_later = not all(attention.causal for attention in spec.attention)
        self.is_masked = self.sees_later or any(attention.window_from_block for attention in spec.attention)
        self.lead = 0 if spec.samples_anchor else 1
        self.max_tokens = spec.block_size - self.lead

    def take_in(self, features_TF: torch.Tensor) -> torch.Tensor:
        """Return the context for the layers' keys and values, and a one that marks it, `[T, H + 1]`."""
        context_TH = self.net.hidden_norm(self.net.fc(features_TF))
        return torch.cat([context_TH, context_TH.new_ones(len(context_TH), 1)], -1)

    def mask_features(self, count: int) -> torch.Tensor:
        """Return zeros: positions of a block have no context."""
        weight_H: torch.Tensor = self.net.hidden_norm.weight
        return weight_H.new_zeros(count, len(weight_H) + 1)

    def forward(self, tokens_1T: torch.Tensor, positions_1T: torch.Tensor, features_1TX: torch.Tensor) -> torch.Tensor:
        """Return states after the last norm, `[1, T, H]`; those of known tokens are not used."""
        context_1TH, is_context_1T1 = features_1TX[..., :-1], features_1TX[..., -1:] > 0
        states_1TH = self.embed(tokens_1T)
        rope: Rope = self.rope(states_1TH, positions_1T)
        for layer, attention in zip(self.net.layers, self.attention, strict=True):
            # Known tokens get queries from their context, too; their outputs are not used.
            read_1TH = torch.where(is_context_1T1, context_1TH, layer.input_layernorm(states_1TH))
            attended_1TH, _ = layer.self_attn(
                read_1TH,
                position_embeddings=rope,
                attention_mask=None,
                window_from_block=attention.window_from_block,
                causal_block=attention.causal,
            )
            states_1TH = states_1TH + attended_1TH
            states_1TH = states_1TH + layer.mlp(layer.post_attention_layernorm(states_1TH))
        output_1TH: torch.Tensor = self.net.norm(states_1TH)
        return output_1TH

    def logits(self, states_NH: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits, `[N, V]`."""
        return self.to_target(self.head(states_NH))


class DFlashProposer(ParallelProposer):
    """Drafts with a DFlash head."""

    method: ClassVar[str] = "dflash"

    @classmethod
    def features_of(cls, config: SpeculativeConfig, draft: Mapping[str, Any], target: Mapping[str, Any]) -> FeatureSpec:
        """Return the layers named by the checkpoint, for every token."""
        return FeatureSpec("all", format_of.features_of(draft, target))

    @classmethod
    def build(cls, config: SpeculativeConfig, weights: DraftWeights) -> DFlashModule:
        """See `protos.draft_module.LearnedProposer`."""
        return DFlashModule(*stored(format_of, weights), weights)
