"""PARD: a small language model that predicts several masked tokens at once (An et al. 2025, arXiv 2504.18583).

It is independent of the target: one model serves a whole family. Its input is the text followed by mask tokens.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from proposers.formats import pard as format_of
from proposers.formats.causal import model_config
from proposers.shared.decoder import compute_buffers, fill, layer_shape, stored
from proposers.shared.one_forward import ParallelProposer
from protos.config.engine import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from protos.draft_module import DraftWeights
from protos.layers import FeatureSpec


class PardModule(nn.Module):
    """See `protos.draft_module.Module` and `proposers.shared.one_forward.MaskedModule`; outputs states, `[1, T, H]`."""

    shift = 0
    lead = -1
    max_tokens = MAX_SPECULATIVE_TOKENS
    sees_later = is_masked = False
    compiled_methods: ClassVar[Mapping[str, int]] = {"forward": 1, "logits": 1}

    def __init__(self, spec: format_of.PardSpec, tensors: Mapping[str, torch.Tensor], weights: DraftWeights) -> None:
        super().__init__()
        config = model_config(format_of.FORMAT, weights.config)
        with torch.device("meta"):
            self.model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=weights.attention)
        compute_buffers(self.model, weights.device)
        fill(self.model, tensors, weights)
        self.layers = (layer_shape(config),) * config.num_hidden_layers
        self.max_model_len, self.vocab_size = spec.max_model_len, spec.vocab_size
        self.mask_token_id = spec.mask_token_id

    def take_in(self, features_TF: torch.Tensor) -> torch.Tensor:
        """Return the features unchanged; there are none."""
        return features_TF

    def mask_features(self, count: int) -> None:
        """Return None: masks are fed without features."""

    def forward(self, tokens_1T: torch.Tensor, positions_1T: torch.Tensor, features_1TF: None = None) -> torch.Tensor:
        """Return the model's last states, `[1, T, H]`."""
        states_1TH: torch.Tensor = self.model.base_model(
            input_ids=tokens_1T,
            position_ids=positions_1T,
            use_cache=False,
        ).last_hidden_state
        return states_1TH

    def logits(self, states_NH: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits of the model's own head, `[N, Vd]`."""
        logits_NV: torch.Tensor = self.model.get_output_embeddings()(states_NH)
        return logits_NV.float()


class PardProposer(ParallelProposer):
    """Drafts with a PARD model."""

    method: ClassVar[str] = "pard"

    @classmethod
    def features_of(cls, config: SpeculativeConfig, draft: Mapping[str, Any], target: Mapping[str, Any]) -> FeatureSpec:
        """Return no features: the model reads tokens only."""
        return FeatureSpec()

    @classmethod
    def build(cls, config: SpeculativeConfig, weights: DraftWeights) -> PardModule:
        """See `protos.draft_module.LearnedProposer`."""
        return PardModule(*stored(format_of, weights), weights)
