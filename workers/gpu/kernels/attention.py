"""Paged attention: decode, chains, trees and chunks of prompts by one kernel, over `workers.attention.kv.KVCache`.

A program takes the queries of one K/V head of one row, all query heads that share it together (up to 16 where keys are
wider than 256), and goes through the row's blocks as its table lists them, with an online softmax. Rows that feed few
tokens have a program for each split of their keys, and a second kernel joins these; rows with long chunks have one
program for each tile of queries. Both give the same result (`workers.gpu.kernels.splits`). Nothing depends on the other
rows of the batch.
"""

from typing import NamedTuple

import torch

from protos.config.kv_window import KVWindow
from workers.attention.backend import Options
from workers.gpu.kernels.attention_kernels import attention_kernel, join_kernel
from workers.gpu.kernels.shape import SMALLEST, Shape, arch
from workers.gpu.kernels.splits import num_splits
from workers.gpu.metadata import DeviceMetadata

SHORT = 65
"""If no row feeds more tokens than this, the keys of all of them are divided by splits: a token, and the most draft
tokens that graphs verify."""
SHORT_BESIDE_CHUNKS = 8
"""Else, those of rows that feed no more than this."""
MAX_WORKSPACE_BYTES = 256 << 20
"""For what the splits find. The keys of rows that feed more tokens than have room are not divided."""


class LayerPages(NamedTuple):
    """K and V of one layer.

    Attributes:
        keys, values: `[num_blocks, block_size, kv_heads, size]`, contiguous; of the queries' dtype, or float8_e4m3fn.
        key_scale, value_scale: what stored numbers are multiplied by.
        values_in_keys: `values` are the first numbers of `keys`, a view, with the keys' scale.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0
    values_in_keys: bool = False


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
            query_HTD.element_size(),
            arch(query_HTD.device),
            pages.values_in_keys,
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
        if self._splits == 1:
            return 0
        length = self._metadata.max_length
        slots = length if length <= SHORT else SHORT_BESIDE_CHUNKS
        each = self._shape.heads * self._splits * (self._shape.value_size + 2) * 4
        return min(slots, MAX_WORKSPACE_BYTES // (self._rows * each))

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
        attention_kernel[(tiles, shape.heads // shape.share, self._splits if is_divided else 1)](
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
