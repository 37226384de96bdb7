"""Paged attention: decode, chains, trees and chunks of prompts by one kernel, over `workers.attention.kv.KVCache`.

A program takes the queries of one K/V head of one row, all query heads that share it together, and goes through the
row's blocks as its table lists them, with an online softmax. Rows that feed few tokens have a program for each split of
their keys, and a second kernel joins these; rows with long chunks have one program for each tile of queries. Both give
the same result (`workers.gpu.kernels.splits`). Nothing depends on the other rows of the batch.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from protos.config.kv_window import KVWindow
from workers.attention.backend import Options
from workers.gpu.kernels.attention_kernels import attention_kernel, join_kernel
from workers.gpu.kernels.splits import num_splits
from workers.gpu.metadata import DeviceMetadata

SHORT = 64
"""If no row feeds more tokens than this, the keys of all of them are divided by splits."""
SHORT_BESIDE_CHUNKS = 8
"""Else, those of rows that feed no more than this."""
MAX_WORKSPACE_BYTES = 256 << 20
"""Nothing is divided if what the splits find takes more."""
LONG_TILE, WIDE_LONG_TILE = 64, 32
"""Most queries of a tile: with keys or values wider than `WIDE`, fewer stay in registers."""
WIDE = 192
MANY_KEYS, KEYS = 64, 32
"""Keys read at a time, whatever the tile: an online softmax depends on it, in the last bits. See `reads_many`."""
WIDE_BYTES = 256
SMALLEST = 16
"""Tensor cores multiply no smaller matrices."""


class LayerPages(NamedTuple):
    """K and V of one layer.

    Attributes:
        keys, values: `[num_blocks, block_size, kv_heads, size]`, contiguous; of the queries' dtype, or float8_e4m3fn.
        key_scale, value_scale: what stored numbers are multiplied by.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0


@dataclass(frozen=True)
class Shape:
    """What the kernels are compiled for.

    Attributes:
        heads, kv_heads, key_size, value_size: of the layer.
        block_size: of the cache.
        options: which options the layer has; their values do not matter, but for the two of blocks.
        has_kv_window, has_trees: whether there are any in the forward.
        reads_many: whether `MANY_KEYS` are read at a time.
    """

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    block_size: int
    options: Options
    has_kv_window: bool = False
    has_trees: bool = True
    reads_many: bool = True

    @property
    def share(self) -> int:
        """Query heads of a K/V head."""
        return self.heads // self.kv_heads

    def tile(self, length: int) -> int:
        """Return the number of queries of a tile for rows that feed up to *length* tokens."""
        smallest = max(SMALLEST, power_of_two(self.share))
        largest = WIDE_LONG_TILE if max(self.key_size, self.value_size) > WIDE else LONG_TILE
        return max(smallest, min(power_of_two(length * self.share), largest))

    def constants(self, tile: int) -> dict[str, Any]:
        """Return the arguments that are compiled in."""
        whole = 1 << (self.key_size.bit_length() - 1)
        first = whole if self.key_size >= SMALLEST else SMALLEST
        rest = max(0, self.key_size - first)
        return {
            "KV_HEADS": self.kv_heads,
            "SHARE": self.share,
            "KEY": self.key_size,
            "D": first,
            "F": max(SMALLEST, power_of_two(rest)) if rest else 0,
            "VALUE": self.value_size,
            "E": max(SMALLEST, power_of_two(self.value_size)),
            "BLOCK": self.block_size,
            "M": tile,
            "N": MANY_KEYS if self.reads_many else KEYS,
            "HAS_SINKS": self.options.sinks_H is not None,
            "HAS_SOFTCAP": self.options.softcap != 0.0,
            "HAS_WINDOW": self.options.window > 0,
            "HAS_KV_WINDOW": self.has_kv_window,
            "HAS_TREES": self.has_trees,
            "FROM_BLOCK": self.options.window_from_block and self.has_trees,
            "CAUSAL_BLOCK": self.options.causal_block and self.has_trees,
        }

    def settings(self, tile: int) -> dict[str, Any]:
        """Return the compiler's settings.

        Multiplications and additions are not fused: whether they are differs from kernel to kernel, and both must give
        the same result.
        """
        if self.reads_many:
            return {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}
        is_large = tile * max(self.key_size, self.value_size) >= LONG_TILE * 128
        return {"num_warps": 8 if is_large else 4, "num_stages": 2 if is_large else 3, "enable_fp_fusion": False}


@functools.cache
def reads_many(device: torch.device, key_bytes: int) -> bool:
    """Return whether a device reads `MANY_KEYS` of so many bytes at a time: a tenth to a third faster on an H200.

    Before sm_90 the tiles of chunks would not stay in registers, and wider keys not in shared memory.
    """
    has_registers = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)
    return has_registers and key_bytes <= WIDE_BYTES


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below *number*, at least 1."""
    return 1 << max(0, number - 1).bit_length()


def paged_attention(
    query_HTD: torch.Tensor,
    pages: LayerPages,
    metadata: DeviceMetadata,
    options: Options,
    kv_window: KVWindow | None = None,
) -> torch.Tensor:
    """Attend over the cache, where K and V of this forward are already; return a contiguous `[T, heads, value_size]`.

    Padding tokens get 0. Scores and sums are float32. NaN or infinite K and V of a token reach only the tokens that
    attend to it.

    Args:
        query_HTD: float32, bfloat16 or float16, any strides, last dimension contiguous.
        pages: the layer's K and V.
        metadata: the rows. Without trees, `visible_TW` may have no column.
        options: of the layer.
        kv_window: see `AttentionMetadata`.
    """
    return _Launch(query_HTD, pages, metadata, options, kv_window).run()


class _Launch:
    """One call of `paged_attention`."""

    def __init__(
        self,
        query_HTD: torch.Tensor,
        pages: LayerPages,
        metadata: DeviceMetadata,
        options: Options,
        kv_window: KVWindow | None,
    ) -> None:
        self._query_HTD, self._pages, self._metadata = query_HTD, pages, metadata
        self._options, self._kv_window = options, kv_window
        _, self._block_size, kv_heads, key_size = pages.keys.shape
        heads, self._tokens, _ = query_HTD.shape
        has_trees = metadata.visible_TW.shape[1] > 0
        self._shape = Shape(
            heads,
            kv_heads,
            key_size,
            pages.values.shape[3],
            self._block_size,
            options,
            kv_window is not None,
            has_trees,
            reads_many(query_HTD.device, max(key_size, pages.values.shape[3]) * query_HTD.element_size()),
        )
        self._rows = len(metadata.starts_R)
        self._splits = num_splits(metadata.max_blocks * self._block_size)

    def run(self) -> torch.Tensor:
        shape, length = self._shape, self._metadata.max_length
        size = (self._tokens, shape.heads, shape.value_size)
        slots = self._slots()
        if not slots:
            output_THE = self._query_HTD.new_zeros(size)
            self._attend(output_THE, output_THE, output_THE, slots)
            return output_THE
        output_THE = self._query_HTD.new_empty(size)
        found = (self._rows, slots, shape.heads, self._splits)
        sums = self._query_HTD.new_empty((*found, shape.value_size), dtype=torch.float32)
        stats = self._query_HTD.new_empty((*found, 2), dtype=torch.float32)
        self._attend(output_THE, sums, stats, slots, is_divided=True)
        self._join(output_THE, sums, stats, slots)
        if length > slots:
            self._attend(output_THE, sums, stats, slots)
        return output_THE

    def _slots(self) -> int:
        """Return the most tokens that a row feeds whose keys are divided by splits; 0: none are divided."""
        length = self._metadata.max_length
        slots = length if length <= SHORT else SHORT_BESIDE_CHUNKS
        each = self._shape.heads * self._splits * (self._shape.value_size + 2) * 4
        return slots if self._splits > 1 and self._rows * slots * each <= MAX_WORKSPACE_BYTES else 0

    def _attend(
        self, output_THE: torch.Tensor, sums: torch.Tensor, stats: torch.Tensor, slots: int, *, is_divided: bool = False
    ) -> None:
        shape, data, options = self._shape, self._metadata, self._options
        length = slots if is_divided else data.max_length
        tile = shape.tile(length)
        queries = tile // shape.share
        is_one_tile = data.max_length <= queries
        tiles = self._rows if is_one_tile else self._tokens // queries + self._rows
        size, num_sinks = self._kv_window or (0, 0)
        attention_kernel[(tiles, shape.kv_heads, self._splits if is_divided else 1)](
            self._query_HTD,
            self._query_HTD.stride(0),
            self._query_HTD.stride(1),
            self._pages.keys,
            self._pages.values,
            output_THE,
            sums,
            stats,
            options.sinks_H,
            data.starts_R,
            data.lengths_R,
            data.offsets_R,
            data.tables_RB,
            data.first_R,
            data.sizes_R,
            data.positions_RA,
            data.visible_TW,
            data.first_valid_R,
            self._rows,
            self._tokens,
            data.tables_RB.shape[1],
            data.positions_RA.shape[1],
            data.visible_TW.shape[1],
            slots,
            self._splits,
            slots,
            options.window,
            size,
            num_sinks,
            options.scaling * self._pages.key_scale,
            options.softcap,
            self._pages.value_scale,
            ONE_TILE=is_one_tile,
            IS_DIVIDED=is_divided,
            **shape.constants(tile),
            **shape.settings(tile),
        )

    def _join(self, output_THE: torch.Tensor, sums: torch.Tensor, stats: torch.Tensor, slots: int) -> None:
        data, constants = self._metadata, self._shape.constants(SMALLEST)
        join_kernel[(self._tokens, self._shape.heads)](
            output_THE,
            sums,
            stats,
            self._options.sinks_H,
            data.starts_R,
            data.lengths_R,
            data.offsets_R,
            data.rows_T,
            slots,
            self._splits,
            slots,
            self._pages.value_scale,
            num_warps=1,
            enable_fp_fusion=False,
            **{name: constants[name] for name in ("VALUE", "E", "HAS_SINKS")},
        )
