"""Multi-token prediction: extra layers, trained with the target, that predict tokens further ahead.

DeepSeek-V3 (arXiv 2412.19437), GLM-4.5, MiMo, Qwen3-Next. They are part of the target's checkpoint, and are decoder
layers of the same kind. The input at position i is token i + 1 and the target's state of token i.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from proposers.formats import mtp as format_of
from proposers.formats import speculators
from proposers.formats.causal import model_config
from proposers.shared.autoregressive import AutoregressiveProposer
from proposers.shared.decoder import Rope, compute_buffers, fill, layer_shape, shapes_of
from protos.config.engine import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from protos.draft_module import DraftWeights
from protos.layers import FeatureSpec

ADDS_ONE = (".embed_norm.weight", ".state_norm.weight", ".norm.weight")


class MtpLayer(nn.Module):
    """A decoder layer of the target's kind, with its input projection, norms and head."""

    def __init__(self, spec: format_of.MtpSpec, block: Any) -> None:
        super().__init__()
        hidden = spec.hidden
        self.embed_norm, self.state_norm = LlamaRMSNorm(hidden, spec.eps), LlamaRMSNorm(hidden, spec.eps)
        self.proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.block = block
        self.norm = LlamaRMSNorm(hidden, spec.eps)
        if spec.own_embedding:
            self.embed_tokens = nn.Embedding(spec.vocab_size, hidden)
        if spec.own_head:
            self.head = nn.Linear(hidden, spec.vocab_size, bias=False)
        self._spec = spec

    def forward(
        self, embedded_1TH: torch.Tensor, states_1TH: torch.Tensor, blank_1T: torch.Tensor, rope: Rope
    ) -> torch.Tensor:
        """Return states before the last norm, `[1, T, H]`. Embeddings are zeroed where *blank_1T*."""
        embedded_1TH = self.embed_norm(embedded_1TH.masked_fill(blank_1T.unsqueeze(-1), 0.0))
        both = (self.state_norm(states_1TH), embedded_1TH)
        read_1TH = self.proj(torch.cat(both if self._spec.state_first else both[::-1], -1))
        output_1TH: torch.Tensor = self.block(read_1TH, attention_mask=None, position_embeddings=rope)
        return output_1TH


class MtpNet(nn.Module):
    """The checkpoint's tensors, under its names. `layer_idx` of the *blocks* count from 0."""

    def __init__(self, spec: format_of.MtpSpec, blocks: Seq[Any]) -> None:
        super().__init__()
        for index, block in enumerate(blocks):
            block.self_attn.layer_idx = index
        self.layers = nn.ModuleList(MtpLayer(spec, block) for block in blocks)


class MtpModule(nn.Module):
    """See `protos.draft_module.Module`. Outputs the states of all its n layers, `[1, T, n * H]`.

    Every layer is fed every token, so that each has the KV of the whole text: draft token k is predicted by layer k
    modulo n.
    """

    shift = 1

    def __init__(self, spec: format_of.MtpSpec, tensors: Mapping[str, torch.Tensor], weights: DraftWeights) -> None:
        super().__init__()
        config = model_config(format_of.FORMAT, speculators.flattened(weights.config), **_shortest(weights.config))
        models = [_empty_model(config, weights) for _ in range(spec.num_layers)]
        with torch.device("meta"):
            self.net: Any = MtpNet(spec, [model.base_model.layers[-1] for model in models])
        plain = {name: tensor + 1 if spec.one_plus and _is_norm(name) else tensor for name, tensor in tensors.items()}
        fill(self.net, plain, weights)
        compute_buffers(models[0], weights.device)
        self.rope = models[0].base_model.rotary_emb
        self._embedding = None if spec.own_embedding else weights.embedding()
        self._head = None if spec.own_head else weights.head()
        self.layers = (layer_shape(config),) * spec.num_layers
        self.max_model_len, self.vocab_size = int(config.max_position_embeddings), spec.vocab_size
        self.compiled_methods = {"forward": 1, "predict": spec.num_layers}
        self.max_tokens = 1 if spec.one_step else MAX_SPECULATIVE_TOKENS
        self._spec = spec

    def take_in(self, features_TF: torch.Tensor) -> torch.Tensor:
        """Return the features unchanged."""
        return features_TF

    def forward(self, tokens_1T: torch.Tensor, positions_1T: torch.Tensor, features_1TH: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all layers, concatenated, `[1, T, n * H]`."""
        rope: Rope = self.rope(features_1TH, positions_1T)
        blank_1T = (positions_1T == 0) & self._spec.blanks_first
        return torch.cat(
            [layer(self._embed(layer, tokens_1T), features_1TH, blank_1T, rope) for layer in self.net.layers], -1
        )

    def predict(self, states_NX: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `proposers.shared.autoregressive.AutoregressiveModule`."""
        index = step % self._spec.num_layers
        states_NH = states_NX.tensor_split(self._spec.num_layers, -1)[index]
        layer = self.net.layers[index]
        normed_NH = layer.norm(states_NH)
        head = layer.head if self._head is None else self._head
        return head(normed_NH).float(), normed_NH if self._spec.feeds_back_normed else states_NH

    def _embed(self, layer: Any, tokens_1T: torch.Tensor) -> torch.Tensor:
        embed = layer.embed_tokens if self._embedding is None else self._embedding
        embedded_1TH: torch.Tensor = embed(tokens_1T)
        return embedded_1TH


class MtpProposer(AutoregressiveProposer):
    """Drafts with the target's own MTP heads, chains or trees."""

    method: ClassVar[str] = "mtp"

    @classmethod
    def features_of(cls, config: SpeculativeConfig, draft: Mapping[str, Any], target: Mapping[str, Any]) -> FeatureSpec:
        """Return the state that the target's head reads, for every token."""
        return FeatureSpec("all")

    @classmethod
    def build(cls, config: SpeculativeConfig, weights: DraftWeights) -> MtpModule:
        """See `protos.draft_module.LearnedProposer`. Only the MTP layers of the checkpoint are read."""
        tensors = {
            prefix + name: tensor
            for prefix in format_of.prefixes(weights.config)
            for name, tensor in weights.tensors(prefix).items()
        }
        spec = format_of.read(weights.config, weights.target_config, shapes_of(tensors))
        return MtpModule(spec, format_of.load(spec, tensors), weights)


def _shortest(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config changes for the fewest layers that include one of the last layer's kind."""
    few = int(speculators.flattened(config).get("first_k_dense_replace") or 0) + 1
    return {"num_hidden_layers": few, "layer_types": ["full_attention"] * few}


def _empty_model(config: Any, weights: DraftWeights) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation=weights.attention)


def _is_norm(name: str) -> bool:
    return ".block." not in name and name.endswith(ADDS_ONE)
