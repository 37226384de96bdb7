"""The paged KV cache: K and V of every layer in blocks."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from protos.config.engine import KVCacheDtype
from protos.layers import LayerShape
from workers.attention.quantized_kv import LARGEST, SCALE_DTYPE, dequantize, quantize

STORED = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


def stored_dtype(wanted: KVCacheDtype, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the cached K and V of a model that computes in *dtype*."""
    return STORED.get(wanted, dtype)


def bytes_per_token(shapes: Seq[LayerShape], stored: torch.dtype) -> int:
    """Return the bytes of one token in all layers; each K/V head of a quantised one has a scale for K and one for V."""
    scale = SCALE_DTYPE.itemsize if stored in LARGEST else 0
    parts = [shape.kv_heads * (1 if shape.values_in_keys else 2) for shape in shapes]
    return sum(
        shape.elements_per_token * stored.itemsize + num * scale for shape, num in zip(shapes, parts, strict=True)
    )


def bytes_per_block(shapes: Seq[LayerShape], block_size: int, stored: torch.dtype) -> int:
    """Return the bytes of one block in all layers."""
    return block_size * bytes_per_token(shapes, stored)


@dataclass(frozen=True)
class Pages:
    """K or V of one layer.

    Attributes:
        stored: `[num_blocks, block_size, kv_heads, size]`.
        scales: bf16 `[num_blocks, block_size, kv_heads]`; None if the dtype is not quantised.
    """

    stored: torch.Tensor
    scales: torch.Tensor | None

    @classmethod
    def zeros(cls, *shape: int, dtype: torch.dtype, device: torch.device) -> "Pages":
        """Allocate. Zeros, since uninitialized memory could hold NaNs.

        The operating system allocates memory only when it is written.
        """
        scales = torch.zeros(shape[:-1], dtype=SCALE_DTYPE, device=device) if dtype in LARGEST else None
        return cls(torch.zeros(shape, dtype=dtype, device=device), scales)

    def first(self, size: int) -> "Pages":
        """Return the first *size* numbers of each head, a view with the same scales."""
        return Pages(self.stored[..., :size], self.scales)

    def write(self, index_T: torch.Tensor, new_TGX: torch.Tensor) -> None:
        """Store T tokens `[T, kv_heads, size]` at cache indices (block * block_size + offset)."""
        if self.scales is None:
            self.stored.flatten(0, 1).index_copy_(0, index_T, new_TGX.to(self.stored.dtype))
            return
        stored_TGX, scales_TG = quantize(new_TGX, self.stored.dtype)
        _as_bits(self.stored).flatten(0, 1).index_copy_(0, index_T, _as_bits(stored_TGX))
        self.scales.flatten(0, 1).index_copy_(0, index_T, scales_TG)

    def blocks(self, blocks_N: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a copy of some blocks in *dtype*, `[N, block_size, kv_heads, size]`."""
        stored = _by_index(self.stored, blocks_N)
        if self.scales is None:
            return stored.to(dtype)
        return dequantize(stored, self.scales.index_select(0, blocks_N), dtype)

    def tokens(self, index_N: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a copy of the tokens at cache indices in *dtype*, `[N, kv_heads, size]`."""
        stored = _by_index(self.stored.flatten(0, 1), index_N)
        if self.scales is None:
            return stored.to(dtype)
        return dequantize(stored, self.scales.flatten(0, 1).index_select(0, index_N), dtype)

    def move(self, from_M: torch.Tensor, to_M: torch.Tensor) -> None:
        """Copy tokens between cache indices, with their scales: nothing is rounded again."""
        for part in (self.stored,) if self.scales is None else (self.stored, self.scales):
            flat = _as_bits(part).flatten(0, 1)
            flat.index_copy_(0, to_M, flat.index_select(0, from_M))


def _by_index(numbers: torch.Tensor, index_N: torch.Tensor) -> torch.Tensor:
    return _as_bits(numbers).index_select(0, index_N).view(numbers.dtype)


def _as_bits(numbers: torch.Tensor) -> torch.Tensor:
    """Return fp8 as bytes, since torch does not copy fp8 by index on all devices."""
    return numbers.view(torch.uint8) if numbers.dtype == torch.float8_e4m3fn else numbers


class KVCache:
    """K and V of all layers.

    A block holds `block_size` tokens, token-major and contiguous, so gathering blocks is a few large copies. All
    positions are kept; sliding windows only mask them.

    Attributes:
        dtype: of the stored numbers; see `stored_dtype`.
        keys: one `[num_blocks, block_size, kv_heads, key_size]` a layer.
        values: one `[num_blocks, block_size, kv_heads, value_size]` a layer; a view of its keys if they hold it.
        key_pages, value_pages: the same with their scales.
    """

    def __init__(
        self, shapes: Seq[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shapes = tuple(shapes)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.dtype, self.device = dtype, device

        def pages(shape: LayerShape, size: int) -> Pages:
            return Pages.zeros(num_blocks, block_size, shape.kv_heads, size, dtype=dtype, device=device)

        self.key_pages = [pages(shape, shape.key_size) for shape in shapes]
        self.value_pages = [
            keys.first(shape.value_size) if shape.values_in_keys else pages(shape, shape.value_size)
            for keys, shape in zip(self.key_pages, shapes, strict=True)
        ]
        separate = [pages for pages, shape in zip(self.value_pages, shapes, strict=True) if not shape.values_in_keys]
        self._stored = (*self.key_pages, *separate)
        self.keys = [pages.stored for pages in self.key_pages]
        self.values = [pages.stored for pages in self.value_pages]

    def write(self, layer: int, index_T: torch.Tensor, key_TGD: torch.Tensor, value_TGE: torch.Tensor) -> None:
        """Store K and V of T tokens at cache indices."""
        self.key_pages[layer].write(index_T, key_TGD)
        if not self.shapes[layer].values_in_keys:
            self.value_pages[layer].write(index_T, value_TGE)

    def move(self, moves_M2: npt.NDArray[np.int64]) -> None:
        """Copy K and V of all layers between cache indices (block * block_size + offset); `[M, 2]`, from and to.

        All are read before the first is written, so an index may be both. No index may be written twice.
        """
        self.move_on_device(torch.from_numpy(moves_M2).to(self.keys[0].device).unbind(1))

    def move_on_device(self, moves: Seq[torch.Tensor]) -> None:
        """As `move`, for indices on the device, int64 `[M]`: from and to. Equal moves may be repeated."""
        from_M, to_M = moves
        for pages in self._stored:
            pages.move(from_M, to_M)
