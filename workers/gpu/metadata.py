"""The input of one forward's attention on the device."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DeviceMetadata:
    """`AttentionMetadata` as device tensors, padded to a captured size of R rows, T tokens and B blocks.

    Padding rows have length 0, as have rows that a draft leaves out; padding tokens have row -1. What is in the other
    tensors for them is not read, but for their offsets. Tensors are contiguous.

    Attributes:
        starts_R: int32; the first place that each row feeds.
        lengths_R: int32; tokens fed by each row, 0 for padding.
        offsets_R: int32; flat index of each row's first token, ascending, those of padding rows included.
        tables_RB: int32; block ids.
        rows_T: int32; row of each token, -1 for padding.
        cache_index_T: int64; where each token's K and V go: block * block_size + offset; -1 for padding.
        first_R: int32; the first place that the row's tree mask covers; the end of the row if it has none.
        sizes_R: int32; places covered by it.
        positions_RA: int32; their positions.
        visible_TW: int64, the bits of uint64; see `workers.attention.batch.TreeMasks`.
        first_valid_R: int32; the first place whose K and V are in the cache.
        block_size: tokens of a block.
        max_length: the most tokens that a row of this captured size feeds.
        max_blocks: blocks of the longest context for which the grid is made, at most B.
    """

    starts_R: Tensor
    lengths_R: Tensor
    offsets_R: Tensor
    tables_RB: Tensor
    rows_T: Tensor
    cache_index_T: Tensor
    first_R: Tensor
    sizes_R: Tensor
    positions_RA: Tensor
    visible_TW: Tensor
    first_valid_R: Tensor
    block_size: int
    max_length: int
    max_blocks: int
