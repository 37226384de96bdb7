"""Decoder layers of `transformers` as parts of a draft, and how they get their weights."""

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

KEPT_IN_FP32 = "e_score_correction_bias"  # biases that choose experts: in fewer bits they would choose others


class Layers:
    """Makes layers of the same dimensions, their norms, and their rotary positions.

    Args:
        dims: of each layer.
        num_layers: how many there are; their `layer_idx` count from 0.
        rope: rotary parameters, as `transformers` 5 writes them.
        max_model_len: positions they are for.
        parts: says which attention they use.
    """

    def __init__(
        self, dims: LayerDims, num_layers: int, rope: Mapping[str, Any], max_model_len: int, parts: DraftWeights
    ) -> None:
        self.dims, self.num_layers = dims, num_layers
        # Its config has a field for everything; which of the layers are Llama's is decided below.
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
        self.config._attn_implementation = parts.attention

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """What each layer caches."""
        return (LayerShape(self.dims.kv_heads, self.dims.head_dim, self.dims.head_dim),) * self.num_layers

    def layer(self, index: int, window: int | None = None) -> Any:
        """Return a new decoder layer, with a sliding *window* if its queries are normed as Qwen3's."""
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

    def rope(self, parts: DraftWeights) -> Any:
        """Return a new module that makes `Rope` of states and positions; it holds no weights."""
        return LlamaRotaryEmbedding(self.config).to(parts.device)


def through(layers: nn.ModuleList, states_1TH: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Return the states behind decoder *layers*."""
    for layer in layers:
        states_1TH = layer(states_1TH, attention_mask=None, position_embeddings=rope)
    return states_1TH


def fill(module: nn.Module, tensors: Mapping[str, torch.Tensor], parts: DraftWeights) -> None:
    """Give *module*, made on the meta device, its weights, and leave it in eval mode, without gradients.

    Weights that are tied stay tied; the first of their names is enough.

    Raises:
        ModelError: names the tensor that is missing, left over, or of another shape than the module's.
    """
    weights = module.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    tied = {name: first.setdefault(id(weight), name) for name, weight in weights.items()}
    given = {name: tensors[twin] for name, twin in tied.items() if twin in tensors} | dict(tensors)
    for name in sorted(weights.keys() | given.keys()):
        wanted = tuple(weights[name].shape) if name in weights else None
        found = tuple(given[name].shape) if name in given else None
        if wanted != found:
            raise ModelError(f"the draft's tensor {name} should be {wanted}, but the checkpoint has {found}")
    placed = {
        name: given[name].to(parts.device, torch.float32 if name.endswith(KEPT_IN_FP32) else parts.dtype)
        for name in set(tied.values())
    }
    module.load_state_dict({name: placed[twin] for name, twin in tied.items()}, assign=True)
    module.eval().requires_grad_(False)


def compute_buffers(model: Any, device: torch.device) -> None:
    """Compute what a `transformers` model on the meta device has and does not store, rotary frequencies above all."""
    stored = set(model.state_dict())
    for name, module in model.named_modules():
        keys = [key for key, _ in module.named_buffers(recurse=False) if f"{name}.{key}" not in stored]
        for key in keys:
            module.register_buffer(key, torch.empty_like(module.get_buffer(key), device=device), persistent=False)
        if keys:
            model._init_weights(module)  # transformers' own code for models that were made on the meta device


def layer_shape(config: Any) -> LayerShape:
    """Return what a layer of a `transformers` model caches, by the model's config."""
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # latent attention is cached expanded: each head has its own
        return LayerShape(heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return LayerShape(getattr(config, "num_key_value_heads", None) or heads, size, size)


class Format(Protocol[Spec]):
    """A module of `proposers.formats`."""

    def read(self, config: Config, target_config: Config, shapes: Shapes) -> Spec:
        """Check a checkpoint by its config and the shapes of its tensors. Raises `ModelError`."""
        ...

    def load(self, spec: Spec, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors under their canonical names."""
        ...


def stored(format_of: Format[Spec], parts: DraftWeights) -> tuple[Spec, dict[str, torch.Tensor]]:
    """Read the draft's checkpoint: what it is, and its tensors. Raises `ModelError` where it does not fit."""
    tensors = parts.tensors()
    spec = format_of.read(parts.config, parts.target_config, shapes_of(tensors))
    return spec, format_of.load(spec, tensors)


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


class TargetVocabulary:
    """Puts a draft's logits, of fewer ids, where the target has them. The others can never be drafted.

    Args:
        ids_V: int64, the target's id of each of the draft's; None where they are the same.
        vocab_size: ids that the target has.
    """

    def __init__(self, ids_V: torch.Tensor | None, vocab_size: int) -> None:
        self.ids_V, self.vocab_size = ids_V, vocab_size

    def __call__(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits `[N, vocab_size]`."""
        if self.ids_V is None:
            return logits_NV.float()
        whole_NV = logits_NV.new_full((len(logits_NV), self.vocab_size), -torch.inf, dtype=torch.float32)
        return whole_NV.index_copy_(1, self.ids_V, logits_NV.float())
