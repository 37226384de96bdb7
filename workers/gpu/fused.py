"""Decoder layers whose steps between matrix products are Triton kernels (`workers.gpu.kernels.layer`).

A layer is fused if it and its parts are exactly the classes of `transformers` that are named here; others stay as they
are. Queries, keys and values are one product, and so are gate and up. The layer computes by its own code wherever its
attention is not ours, so that the check of a loaded model compares the two. One of several ranks merges its share of
the weights; the sums over ranks stay hooks of the two products that the layer calls as modules.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from workers.attention.backend import NAME, paged_attention
from workers.gpu.kernels.layer import add_rms_norm, rms_norm, rotate_, swiglu
from workers.gpu.kernels.linear import linear

Window = Callable[[Any], int | None]
"""Returns the sliding window of an attention module, when it runs: the check of a loaded model narrows windows."""
WINDOWS: dict[str, Window] = {
    "Llama": lambda _attention: None,
    "Mistral": lambda attention: attention.config.sliding_window,
    "Qwen2": lambda attention: attention.sliding_window,
    "Qwen3": lambda attention: attention.sliding_window,
}
"""Families that are known, by the first part of the names of their classes."""
ACTIVATIONS = ("torch.nn.modules.activation.SiLU", "transformers.activations.SiLUActivation")


def fuse_layers(model: nn.Module) -> int:
    """Fuse all layers of *model* that are known; return how many. Call it when weights are on their device."""
    layers = [(module, _family(module)) for module in model.modules()]
    found = [FusedLayer(module, WINDOWS[family]) for module, family in layers if family is not None]
    for each in found:
        each.layer.forward = each
    return len(found)


def _family(layer: nn.Module) -> str | None:
    """Return the family of a decoder layer that is known, whole and unchanged."""
    family = next((family for family in WINDOWS if _class(layer) == _named(family, "DecoderLayer")), None)
    return family if family is not None and _is_known(layer, family) else None


def _is_known(layer: Any, family: str) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [attention.q_norm, attention.k_norm] if family == "Qwen3" else []
    products = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    products += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    are_known = (
        _class(attention) == _named(family, "Attention")
        and _class(mlp) == _named(family, "MLP")
        and _class(mlp.act_fn) in ACTIVATIONS
        and all(_class(norm) == _named(family, "RMSNorm") for norm in norms)
        and all(type(each) is nn.Linear for each in products)
    )
    dtypes = {weight.dtype for weight in layer.parameters()}
    called = {attention.o_proj, mlp.down_proj}
    others = [part for part in layer.modules() if part not in called]
    has_hooks = any(part._forward_hooks or part._forward_pre_hooks for part in others)
    return are_known and len(dtypes) == 1 and attention.head_dim % 2 == 0 and not has_hooks


def _class(module: object) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _named(family: str, kind: str) -> str:
    return f"transformers.models.{family.lower()}.modeling_{family.lower()}.{family}{kind}"


class FusedLayer:
    """The forward of one decoder layer.

    Args:
        layer: its separate weights become views of the merged ones.
        window: of its attention.
    """

    def __init__(self, layer: Any, window: Window) -> None:
        self.layer, self._window = layer, window
        self._plain = layer.forward
        attention, mlp = layer.self_attn, layer.mlp
        self._qkv = Merged([attention.q_proj, attention.k_proj, attention.v_proj])
        self._gate_up = Merged([mlp.gate_proj, mlp.up_proj])
        size = attention.head_dim
        self._heads = len(attention.q_proj.weight) // size, len(attention.k_proj.weight) // size
        self._norms: tuple[torch.Tensor, torch.Tensor, float] | None = None
        if _class(attention) == _named("Qwen3", "Attention"):
            query_norm, key_norm = attention.q_norm, attention.k_norm
            self._norms = query_norm.weight, key_norm.weight, query_norm.variance_epsilon

    def __call__(self, hidden_states: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        """Return the hidden states `[1, T, C]` after the layer."""
        if self.layer.self_attn.config._attn_implementation != NAME or others:
            return self._plain(hidden_states, *others, **named)  # type: ignore[no-any-return]
        cos_1TD, sin_1TD = named.pop("position_embeddings")
        attention, before, after = self.layer.self_attn, self.layer.input_layernorm, self.layer.post_attention_layernorm
        hidden_TC = hidden_states[0].contiguous()
        normed_TC = rms_norm(hidden_TC, before.weight, before.variance_epsilon)
        attended_TX = self._attend(normed_TC, cos_1TD[0], sin_1TD[0], named)
        hidden_TC, normed_TC = add_rms_norm(
            hidden_TC, _product(attention.o_proj, attended_TX), after.weight, after.variance_epsilon
        )
        return _product(self.layer.mlp.down_proj, swiglu(self._gate_up(normed_TC)), hidden_TC).unsqueeze(0)

    def _attend(
        self, normed_TC: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor, named: dict[str, Any]
    ) -> torch.Tensor:
        attention, (heads, kv_heads) = self.layer.self_attn, self._heads
        qkv_TX = self._qkv(normed_TC)
        rotate_(qkv_TX, cos_TD.contiguous(), sin_TD.contiguous(), self._heads, self._norms)
        qkv_1XTD = qkv_TX.view(1, len(qkv_TX), -1, attention.head_dim).transpose(1, 2)
        query, key, value = torch.split(qkv_1XTD, [heads, kv_heads, kv_heads], 1)
        window = self._window(attention)
        others = {name: given for name, given in named.items() if name not in {"attention_mask", "past_key_values"}}
        output_1THD, _ = paged_attention(
            attention, query, key, value, None, attention.scaling, sliding_window=window, **others
        )
        return output_1THD.reshape(len(qkv_TX), -1)


def _product(layer: nn.Linear, input_TX: torch.Tensor, added_TC: torch.Tensor | None = None) -> torch.Tensor:
    """Return a layer's output, plus *added_TC*; by its own code if hooks add the parts of other ranks."""
    if not layer._forward_hooks:
        return linear(input_TX, layer.weight, layer.bias, added_TC)
    output_TC: torch.Tensor = layer(input_TX)
    return output_TC if added_TC is None else added_TC + output_TC


class Merged:
    """Several linear layers of one input as one product; their weights become views of its weight."""

    def __init__(self, parts: list[nn.Linear]) -> None:
        sizes = [len(part.weight) for part in parts]
        self._weight = torch.cat([part.weight for part in parts])
        for part, view in zip(parts, torch.split(self._weight, sizes), strict=True):
            part.weight = nn.Parameter(view, requires_grad=False)
        self._bias = _merged_bias(parts)

    def __call__(self, input_TC: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all, side by side."""
        return linear(input_TC, self._weight, self._bias)


def _merged_bias(parts: list[nn.Linear]) -> torch.Tensor | None:
    if all(part.bias is None for part in parts):
        return None
    return torch.cat([part.weight.new_zeros(len(part.weight)) if part.bias is None else part.bias for part in parts])
