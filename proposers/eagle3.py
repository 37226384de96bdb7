"""EAGLE-3: a decoder layer over states from three depths of the target (Li et al. 2025, arXiv 2503.01840).

Also the variants with norms in other places, as written by `speculators`. The input at position i is token i + 1 and
the target's states of token i, projected by `fc`; for draft tokens, the layer's own output takes the place of the
latter.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from proposers.formats import eagle3 as format_of
from proposers.shared.autoregressive import AutoregressiveProposer
from proposers.shared.decoder import Layers, LayersModule, Rope, stored, through
from protos.config.engine import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from protos.draft_module import DraftWeights
from protos.layers import FeatureSpec


class WideLayer(nn.Module):
    """The first layer, whose attention reads the concatenation of embedding and state.

    With *norm_before_residual*, the residual is the normed state instead of the state.
    """

    def __init__(self, layers: Layers, *, norm_before_residual: bool) -> None:
        super().__init__()
        dims, plain = layers.dims, layers.layer(0)
        self.input_layernorm, self.hidden_norm = plain.input_layernorm, layers.norm(dims.hidden)
        self.self_attn = plain.self_attn
        queries, keys = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
        self.self_attn.q_proj = nn.Linear(2 * dims.hidden, queries, bias=dims.qkv_bias)
        self.self_attn.k_proj = nn.Linear(2 * dims.hidden, keys, bias=dims.qkv_bias)
        self.self_attn.v_proj = nn.Linear(2 * dims.hidden, keys, bias=dims.qkv_bias)
        self.post_attention_layernorm, self.mlp = plain.post_attention_layernorm, plain.mlp
        self._norm_before_residual = norm_before_residual

    def forward(self, embedded_1TH: torch.Tensor, states_1TH: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Return the layer's output, `[1, T, H]`."""
        normed_1TH = self.hidden_norm(states_1TH)
        wide_1TW = torch.cat([self.input_layernorm(embedded_1TH), normed_1TH], -1)
        attended_1TH, _ = self.self_attn(wide_1TW, position_embeddings=rope, attention_mask=None)
        states_1TH = attended_1TH + (normed_1TH if self._norm_before_residual else states_1TH)
        output_1TH: torch.Tensor = states_1TH + self.mlp(self.post_attention_layernorm(states_1TH))
        return output_1TH


class Eagle3Net(nn.Module):
    """The checkpoint's tensors, under its names."""

    def __init__(self, spec: format_of.Eagle3Spec, layers: Layers, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        hidden = spec.dims.hidden
        first = WideLayer(layers, norm_before_residual=spec.norm_before_residual)
        self.layers = nn.ModuleList([first, *(layers.layer(index) for index in range(1, spec.num_layers))])
        self.norm = layers.norm(hidden)
        if spec.has_fc:
            self.fc = nn.Linear(spec.features, hidden, bias="fc.bias" in tensors)
        if spec.fc_norm:
            self.fc_norm = nn.ModuleList(layers.norm(spec.target_hidden) for _ in spec.inputs_of)
        if spec.norm_before_fc:
            self.input_norm = layers.norm(spec.features)
        if spec.has_embedding:
            self.embed_tokens = nn.Embedding(spec.vocab_size, hidden)
        if spec.has_head:
            self.lm_head = nn.Linear(hidden, spec.draft_size, bias=False)


class Eagle3Module(LayersModule):
    """See `protos.draft_module.Module`. Outputs states before the last norm, `[1, T, H]`.

    Args:
        spec: of the checkpoint.
        tensors: of `formats.eagle3.load`; consumed.
        weights: of draft and target.
    """

    max_tokens = MAX_SPECULATIVE_TOKENS
    reads_states: ClassVar[str] = "predict"
    """The method that reads the states that `forward` returns."""

    def __init__(self, spec: format_of.Eagle3Spec, tensors: dict[str, torch.Tensor], weights: DraftWeights) -> None:
        layers = Layers(spec.dims, spec.num_layers, spec.rope, spec.max_model_len, weights)
        with torch.device("meta"):
            net = Eagle3Net(spec, layers, tensors)
        super().__init__(net, layers, tensors, spec.vocab_size, weights)
        self._spec = spec
        compiled = ("forward", self.reads_states, *(("take_in",) if spec.has_fc else ()))
        self.compiled_methods = dict.fromkeys(compiled, 1)

    def take_in(self, features_TF: torch.Tensor) -> torch.Tensor:
        """Return the target's states projected by `fc`, `[T, H]`, normed before if the checkpoint has such norms."""
        if self._spec.fc_norm:
            chunks = features_TF.tensor_split(len(self.net.fc_norm), -1)
            features_TF = torch.cat([norm(chunk) for norm, chunk in zip(self.net.fc_norm, chunks, strict=True)], -1)
        if self._spec.norm_before_fc:
            features_TF = self.net.input_norm(features_TF)
        taken_TH: torch.Tensor = self.net.fc(features_TF) if self._spec.has_fc else features_TF
        return taken_TH

    def forward(self, tokens_1T: torch.Tensor, positions_1T: torch.Tensor, features_1TH: torch.Tensor) -> torch.Tensor:
        """Return the states of the tokens, `[1, T, H]`."""
        rope: Rope = self.rope(features_1TH, positions_1T)
        states_1TH = self.net.layers[0](self.embed(tokens_1T), features_1TH, rope)
        return through(self.net.layers[1:], states_1TH, rope)

    def predict(self, states_NH: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `proposers.shared.autoregressive.AutoregressiveModule`.

        The states fed back are those before the norm; with `norm_output`, those after it.
        """
        normed_NH = self.net.norm(states_NH)
        return self.to_target(self.head(normed_NH)), normed_NH if self._spec.norm_output else states_NH


class Eagle3Proposer(AutoregressiveProposer):
    """Drafts with an EAGLE-3 head, chains or trees."""

    method: ClassVar[str] = "eagle3"

    @classmethod
    def features_of(cls, config: SpeculativeConfig, draft: Mapping[str, Any], target: Mapping[str, Any]) -> FeatureSpec:
        """Return the layers named by the checkpoint, for every token."""
        return FeatureSpec("all", format_of.features_of(draft, target))

    @classmethod
    def build(cls, config: SpeculativeConfig, weights: DraftWeights) -> Eagle3Module:
        """See `protos.draft_module.LearnedProposer`."""
        return Eagle3Module(*stored(format_of, weights), weights)
