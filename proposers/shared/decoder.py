"""Decoder layers of `transformers` for draft modules, and the loading of their weights."""

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from transformers import Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from proposers.formats.shared.layers import LayerDims
from proposers.formats.shared.layout import Shapes
from proposers.formats.shared.values import Config
from protos.draft_module import DraftWeights
from protos.errors import ModelError
from protos.layers import LayerShape

Rope = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of the positions of a forward, `[1, T, D]` each."""

Spec = TypeVar("Spec")

KEPT_IN_FP32 = "e_score_correction_bias"  # expert-choice biases: in lower precision they would choose other experts


class Layers:
    """Makes layers of the same dimensions, their norms, and their rotary positions.

    Args:
        dims: of each layer.
        num_layers: number of layers; their `layer_idx` count from 0.
        rope: rotary parameters, in the format of `transformers` 5.
        max_model_len: most positions.
        weights: names the attention implementation.
    """

    def __init__(
        self, dims: LayerDims, num_layers: int, rope: Mapping[str, Any], max_model_len: int, weights: DraftWeights
    ) -> None:
        self.dims, self.num_layers, self.max_model_len = dims, num_layers, max_model_len
        # Qwen3's config has all fields needed; `layer` chooses between Llama's and Qwen3's attention.
        self.config: Any = Qwen3Config(
            hidden_size=dims.hidden,
            intermediate_size=dims.inner,
            num_hidden_layers=num_layers,
            num_attention_heads=dims.heads,
            num_key_value_heads=dims.kv_heads,
            head_dim=dims.head_dim,
            hidden_act=dims.act,
            rms_norm_eps=dims.eps,
            attention_bias=dims.qkv_bias,
            rope_parameters=dict(rope),
            max_position_embeddings=max_model_len,
        )
        self.config.mlp_bias = dims.mlp_bias
        self.config._attn_implementation = weights.attention

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """K/V shape of each layer."""
        return (LayerShape(self.dims.kv_heads, self.dims.head_dim, self.dims.head_dim),) * self.num_layers

    def layer(self, index: int, window: int | None = None) -> Any:
        """Return a new decoder layer; with Qwen3's query norm, it may have a sliding *window*."""
        layer: Any = LlamaDecoderLayer(self.config, index)
        if self.dims.qk_norm:
            layer.self_attn = Qwen3Attention(self.config, index)
            layer.self_attn.sliding_window = window
        queries = self.dims.heads * self.dims.head_dim
        layer.self_attn.o_proj = nn.Linear(queries, self.dims.hidden, bias=self.dims.o_bias)
        return layer

    def norm(self, width: int) -> Any:
        """Return a new RMS norm."""
        return LlamaRMSNorm(width, self.dims.eps)

    def rope(self, weights: DraftWeights) -> Any:
        """Return a new module that computes `Rope` from states and positions; it has no weights."""
        return LlamaRotaryEmbedding(self.config).to(weights.device)


def through(layers: nn.ModuleList, states_1TH: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Return the states after decoder *layers*."""
    for layer in layers:
        states_1TH = layer(states_1TH, attention_mask=None, position_embeddings=rope)
    return states_1TH


def fill(module: nn.Module, tensors: Mapping[str, torch.Tensor], weights: DraftWeights) -> None:
    """Load the weights of *module*, made on the meta device; put it in eval mode, without gradients.

    Tied weights stay tied; a tensor for the first of their names is enough.

    Raises:
        ModelError: names a tensor that is missing, unexpected, or of another shape than the module's.
    """
    own = module.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    tied = {name: first.setdefault(id(weight), name) for name, weight in own.items()}
    given = {name: tensors[twin] for name, twin in tied.items() if twin in tensors} | dict(tensors)
    for name in sorted(own.keys() | given.keys()):
        wanted = tuple(own[name].shape) if name in own else None
        found = tuple(given[name].shape) if name in given else None
        if wanted != found:
            raise ModelError(f"the draft's tensor {name} should be {wanted}, but the checkpoint has {found}")
    placed = {
        name: given[name].to(weights.device, torch.float32 if name.endswith(KEPT_IN_FP32) else weights.dtype)
        for name in set(tied.values())
    }
    module.load_state_dict({name: placed[twin] for name, twin in tied.items()}, assign=True)
    module.eval().requires_grad_(False)


def compute_buffers(model: Any, device: torch.device) -> None:
    """Compute the buffers that a `transformers` model on the meta device does not store, such as rotary frequencies."""
    stored = set(model.state_dict())
    for name, module in model.named_modules():
        keys = [key for key, _ in module.named_buffers(recurse=False) if f"{name}.{key}" not in stored]
        for key in keys:
            module.register_buffer(key, torch.empty_like(module.get_buffer(key), device=device), persistent=False)
        if keys:
            model._init_weights(module)  # as transformers does for models made on the meta device


def layer_shape(config: Any) -> LayerShape:
    """Return the K/V shape of a layer of a `transformers` model, from its config."""
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # latent attention that is expanded, per head
        return LayerShape(heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return LayerShape(getattr(config, "num_key_value_heads", None) or heads, size, size)


class Format(Protocol[Spec]):
    """A module of `proposers.formats`."""

    def read(self, config: Config, target_config: Config, shapes: Shapes) -> Spec:
        """Check a checkpoint's config and tensor shapes. Raises `ModelError`."""
        ...

    def load(self, spec: Spec, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors under their canonical names."""
        ...


def stored(format_of: Format[Spec], weights: DraftWeights) -> tuple[Spec, dict[str, torch.Tensor]]:
    """Read the draft's checkpoint: its spec and its tensors. Raises `ModelError` if it does not fit."""
    tensors = weights.tensors()
    spec = format_of.read(weights.config, weights.target_config, shapes_of(tensors))
    return spec, format_of.load(spec, tensors)


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


class TargetVocabulary:
    """Maps logits over a draft's smaller vocabulary to the target's ids. Other ids get -inf.

    Args:
        ids_V: int64, the target's id of each of the draft's; None if they are the same.
        vocab_size: of the target.
    """

    def __init__(self, ids_V: torch.Tensor | None, vocab_size: int) -> None:
        self.ids_V, self.vocab_size = ids_V, vocab_size

    def __call__(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits `[N, vocab_size]`."""
        if self.ids_V is None:
            return logits_NV.float()
        whole_NV = logits_NV.new_full((len(logits_NV), self.vocab_size), -torch.inf, dtype=torch.float32)
        return whole_NV.index_copy_(1, self.ids_V, logits_NV.float())


class LayersModule(nn.Module):
    """Base of modules of decoder layers over the target's states. See `protos.draft_module.Module`.

    Args:
        net: the checkpoint's tensors, under its names, on the meta device. Without `embed_tokens` or `lm_head`, the
            target's are used.
        layers: those of *net*.
        tensors: of *net*; consumed. `target_ids`, if among them, are the target's id of each of the draft's.
        vocab_size: of the target.
        weights: of draft and target.
    """

    shift = 1

    def __init__(
        self, net: nn.Module, layers: Layers, tensors: dict[str, torch.Tensor], vocab_size: int, weights: DraftWeights
    ) -> None:
        super().__init__()
        ids_V = tensors.pop("target_ids", None)
        fill(net, tensors, weights)
        self.net: Any = net
        self.rope: Any = layers.rope(weights)
        self.embed: Any = net.embed_tokens if hasattr(net, "embed_tokens") else weights.embedding()
        self.head: Any = net.lm_head if hasattr(net, "lm_head") else weights.head()
        self.to_target = TargetVocabulary(None if ids_V is None else ids_V.to(weights.device), vocab_size)
        self.layers, self.max_model_len, self.vocab_size = layers.shapes, layers.max_model_len, vocab_size
