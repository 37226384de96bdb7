"""The Llama layer of EAGLE heads, for training: over the known tokens, and over a chain after each anchor."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Dims:
    """Dimensions of the layer; *reads* is the input width of its queries, keys and values."""

    hidden: int
    reads: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    eps: float


def dims_of(config: Any, *, reads: int, inner: float) -> Dims:
    """Return a layer like those of a Llama-like target; *reads* and *inner* are multiples of its hidden size."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    return Dims(
        hidden=hidden,
        reads=reads * hidden,
        inner=int(inner * hidden),
        heads=heads,
        kv_heads=config.num_key_value_heads or heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        theta=float(config.rope_parameters["rope_theta"]),
        eps=config.rms_norm_eps,
    )


class Entry(NamedTuple):
    """Keys and values `[B, kv_heads, T, head_dim]` of T entries."""

    keys: torch.Tensor
    values: torch.Tensor


class Attention(nn.Module):
    """Grouped attention with rotary positions, over the known tokens and a chain after each anchor."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims
        self.q_proj = nn.Linear(dims.reads, dims.heads * dims.head_dim, bias=False)
        self.k_proj = nn.Linear(dims.reads, dims.kv_heads * dims.head_dim, bias=False)
        self.v_proj = nn.Linear(dims.reads, dims.kv_heads * dims.head_dim, bias=False)
        self.o_proj = nn.Linear(dims.heads * dims.head_dim, dims.hidden, bias=False)

    def entry(self, x_BTX: torch.Tensor, positions_BT: torch.Tensor) -> Entry:
        """Return the keys and values of *x*."""
        keys = self._turned(self._split(self.k_proj(x_BTX), self.dims.kv_heads), positions_BT)
        return Entry(keys, self._split(self.v_proj(x_BTX), self.dims.kv_heads))

    def forward(
        self,
        x_BMX: torch.Tensor,
        positions_BM: torch.Tensor,
        known: Entry,
        hidden_BML: torch.Tensor,
        chain: list[Entry],
    ) -> torch.Tensor:
        """Return `[B, M, H]`: *x* attends to *known*, except for *hidden*, and to its anchor's entries in *chain*."""
        kv_heads, group = self.dims.kv_heads, self.dims.heads // self.dims.kv_heads
        queries = self._turned(self._split(self.q_proj(x_BMX), self.dims.heads), positions_BM)
        batch, _, count, size = queries.shape
        queries = queries.view(batch, kv_heads, group, count, size) * size**-0.5
        far = queries.flatten(2, 3) @ known.keys.transpose(-1, -2)
        far = far.view(batch, kv_heads, group, count, -1).masked_fill(hidden_BML[:, None, None], float("-inf"))
        near = [(queries * entry.keys[:, :, None]).sum(-1, keepdim=True) for entry in chain]
        shares = torch.cat([far, *near], -1).softmax(-1)
        out = (shares[..., : far.shape[-1]].flatten(2, 3) @ known.values).view_as(queries)
        for i, entry in enumerate(chain, far.shape[-1]):
            out = out + shares[..., i : i + 1] * entry.values[:, :, None]
        merged: torch.Tensor = self.o_proj(out.flatten(1, 2).transpose(1, 2).flatten(2))
        return merged

    def _split(self, x_BTX: torch.Tensor, heads: int) -> torch.Tensor:
        return x_BTX.view(*x_BTX.shape[:2], heads, self.dims.head_dim).transpose(1, 2)

    def _turned(self, x_BHTD: torch.Tensor, positions_BT: torch.Tensor) -> torch.Tensor:
        """Rotate the halves of each head by position (Su et al. 2021), as Llama checkpoints expect."""
        half = self.dims.head_dim // 2
        speeds = self.dims.theta ** (-torch.arange(half, device=x_BHTD.device) / half)
        angles = (positions_BT[:, None, :, None] * speeds).float()
        cos, sin = angles.cos(), angles.sin()
        first, second = x_BHTD.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class GatedMlp(nn.Module):
    """Llama's gated MLP."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dims.hidden, dims.inner, bias=False)
        self.up_proj = nn.Linear(dims.hidden, dims.inner, bias=False)
        self.down_proj = nn.Linear(dims.inner, dims.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[..., H]` to `[..., H]`."""
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """A Llama layer without its first norm; `forward` takes the residual separately."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.self_attn = Attention(dims)
        self.mlp = GatedMlp(dims)
        self.post_attention_layernorm = nn.RMSNorm(dims.hidden, dims.eps)
        for last in (self.self_attn.o_proj, self.mlp.down_proj):
            nn.init.normal_(last.weight, std=1e-3)

    def forward(self, residual_BMH: torch.Tensor, attended_BMH: torch.Tensor) -> torch.Tensor:
        """Return the output, `[B, M, H]`."""
        state = residual_BMH + attended_BMH
        out: torch.Tensor = state + self.mlp(self.post_attention_layernorm(state))
        return out


class NormedLayer(Layer):
    """EAGLE-3's layer: the embedding and the state have a norm each."""

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        self.input_layernorm = nn.RMSNorm(dims.hidden, dims.eps)
        self.hidden_norm = nn.RMSNorm(dims.hidden, dims.eps)
