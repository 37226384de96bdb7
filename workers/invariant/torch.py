"""The operators of `workers.invariant.ops` on GPUs, in torch: every kernel runs with one shape only.

A library chooses its kernel, and so the order of its sums, by the shape of its inputs. Rows are therefore computed
`TILE` at a time, the last tile padded with zeros, so the kernel and its order of operations are the same for any batch.
Values were compared with those of the CPU operators, on a CPU; this code has not run on a GPU.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F

TILE = 64


def in_tiles(work: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply *work*, `[TILE, K]` to `[TILE, X]`, to the rows of *x*, `[..., K]` to `[..., X]`."""
    rows_MK = x.reshape(-1, x.shape[-1])
    missing = -rows_MK.shape[0] % TILE
    tiles = torch.split(F.pad(rows_MK, (0, 0, 0, missing)), TILE)
    found = torch.cat([work(tile) for tile in tiles]) if tiles else work(rows_MK.new_zeros(TILE, x.shape[-1]))[:0]
    return found[: rows_MK.shape[0]].reshape(*x.shape[:-1], found.shape[-1])


def linear(
    x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, shards: int, is_partial: bool
) -> torch.Tensor:
    """See `workers.invariant.ops`."""
    sums = in_tiles(lambda tile_MK: _tree(_parts(tile_MK, weight_NK, shards)), x)
    if is_partial:
        return sums
    return (sums if bias_N is None else sums + bias_N.float()).to(x.dtype)


def _parts(tile_MK: torch.Tensor, weight_NK: torch.Tensor, shards: int) -> list[torch.Tensor]:
    """Return the sums of each shard of K, fp32 `[M, N]`. Products of half-precision numbers are exact in fp32."""
    size = weight_NK.shape[1]
    ends = [shard * size // shards for shard in range(shards + 1)]
    return [tile_MK[:, a:b].float() @ weight_NK[:, a:b].float().t() for a, b in pairwise(ends)]


def _tree(parts: list[torch.Tensor]) -> torch.Tensor:
    """Add pairs, then pairs of these sums, and so on."""
    half = len(parts) // 2
    return parts[0] if not half else _tree(parts[:half]) + _tree(parts[half:])


def grouped(
    x_MK: torch.Tensor, weight_EKN: torch.Tensor, ends_E: torch.Tensor, shards: int, is_partial: bool
) -> torch.Tensor:
    """See `workers.invariant.ops`. Waits for the device, to read where experts begin."""
    ends = [0, *ends_E.tolist()]
    parts = [
        linear(x_MK[a:b], weight_KN.t(), None, shards, is_partial)
        for weight_KN, (a, b) in zip(weight_EKN, pairwise(ends), strict=True)
    ]
    return torch.cat(parts)


def each(x: torch.Tensor, function: int) -> torch.Tensor:
    """See `workers.invariant.ops`. Every number is computed in its own GPU thread, so no tiles are needed."""
    found = _FUNCTIONS[function](x.float())
    return found.to(x.dtype).contiguous()


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


_FUNCTIONS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.exp,
    F.silu,
    torch.sigmoid,
    torch.tanh,
    F.gelu,
    _gelu_tanh,
    torch.cos,
    torch.sin,
    torch.rsqrt,
)


def mean(x: torch.Tensor) -> torch.Tensor:
    """See `workers.invariant.ops`."""
    return in_tiles(lambda tile: tile.float().mean(-1, keepdim=True).to(tile.dtype), x)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """See `workers.invariant.ops`."""
    return in_tiles(lambda tile: tile.float().softmax(-1).to(tile.dtype), x)


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """See `workers.invariant.ops`."""
    return in_tiles(lambda tile: F.layer_norm(tile, x.shape[-1:], weight, bias, epsilon), x)
