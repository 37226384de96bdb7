"""Parts of the attention kernels: which row and places a program works on, what its queries see, and its products.

M counts the queries of a tile, those of all heads of its program; N counts keys.
"""

import triton
import triton.language as tl

from workers.gpu.kernels.splits import LOG2_E, split_start


@triton.jit
def find_row(offsets_R: tl.tensor, tile: tl.tensor, rows: tl.tensor, QUERIES: tl.constexpr) -> tl.tensor:
    """Return the last row whose tiles begin at or before *tile*: row r has those from `offset // QUERIES + r` on.

    Tiles before those of row 0 are given to it.
    """
    low, high = tile * 0, rows
    while high - low > 1:
        middle = (low + high) // 2
        is_before = tl.load(offsets_R + middle) // QUERIES + middle <= tile
        low, high = tl.where(is_before, middle, low), tl.where(is_before, high, middle)
    return low


@triton.jit
def span(split: tl.tensor, lowest: tl.tensor, end: tl.tensor, sinks: tl.tensor, N: tl.constexpr) -> tl.tuple:
    """Return the range of places of a split that may be visible: from *lowest* to *end*, and those below *sinks*."""
    first = split_start(split)
    after = tl.minimum(split_start(split + 1), end)
    return tl.where(first < sinks, first, tl.maximum(first, lowest // N * N)), after


@triton.jit
def locate(
    tables_RB: tl.tensor,
    table_width: tl.tensor,
    row: tl.tensor,
    place_N: tl.tensor,
    is_read_N: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the cache indices of places of a row, int32."""
    block_N = tl.load(tables_RB + row * table_width + place_N // BLOCK, mask=is_read_N, other=0)
    return block_N * BLOCK + place_N % BLOCK


@triton.jit
def load_columns(
    pages: tl.tensor,
    index_N: tl.tensor,
    is_read_N: tl.tensor,
    head: tl.tensor,
    heads: tl.tensor,
    STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Load WIDTH columns of K or V from column FIRST on, `[N, WIDTH]`; 0 past SIZE and for places not read.

    STRIDE: numbers from one head to the next.
    """
    column_W = FIRST + tl.arange(0, WIDTH)
    at_NW = ((index_N.to(tl.int64) * heads + head) * STRIDE)[:, None] + column_W[None, :]
    if FIRST + WIDTH <= SIZE:
        return tl.load(pages + at_NW, mask=is_read_N[:, None], other=0.0)
    return tl.load(pages + at_NW, mask=is_read_N[:, None] & (column_W < SIZE)[None, :], other=0.0)


@triton.jit
def tanh(x_MN: tl.tensor) -> tl.tensor:
    """Return the hyperbolic tangent; by its series near 0, where a difference of numbers near 1 has few digits."""
    square_MN = x_MN * x_MN
    series_MN = (square_MN * (62.0 / 2835.0) - 17.0 / 315.0) * square_MN + 2.0 / 15.0
    near_MN = x_MN + x_MN * square_MN * (series_MN * square_MN - 1.0 / 3.0)
    return tl.where(tl.abs(x_MN) < 0.25, near_MN, 2.0 * tl.sigmoid(2.0 * x_MN) - 1.0)


@triton.jit
def capped(score_MN: tl.tensor, scaling: tl.tensor, softcap: tl.tensor, HAS_SOFTCAP: tl.constexpr) -> tl.tensor:
    """Return scores in units of log 2, scaled and soft-capped."""
    if HAS_SOFTCAP:
        return tanh(score_MN * (scaling / softcap)) * (softcap * LOG2_E)
    return score_MN * (scaling * LOG2_E)


@triton.jit
def add_keys(
    greatest_M: tl.tensor, total_M: tl.tensor, sum_ME: tl.tensor, score_MN: tl.tensor, value_NE: tl.tensor
) -> tl.tuple:
    """Add keys with their scores to an online softmax (Milakov and Gimelshein 2018)."""
    joint_M = tl.maximum(greatest_M, tl.max(score_MN, 1))
    base_M = tl.where(joint_M == -float("inf"), 0.0, joint_M)
    weight_MN = tl.exp2(score_MN - base_M[:, None])
    before_M = tl.exp2(greatest_M - base_M)
    total_M = total_M * before_M + tl.sum(weight_MN, 1)
    sum_ME = tl.dot(weight_MN.to(value_NE.dtype), value_NE, sum_ME * before_M[:, None], input_precision="ieee")
    return joint_M, total_M, sum_ME


@triton.jit
def tree_words(
    visible_TW: tl.tensor, words: tl.tensor, token_M: tl.tensor, bit: tl.tensor, live_M: tl.tensor
) -> tl.tuple:
    """Return the 64 bits of each query's mask from *bit* on, as two int32: they are spread over N keys, in registers.

    *bit* may be negative; bits below 0 are 0.
    """
    word, shift = bit >> 6, (bit & 63).to(tl.int64)
    at_M = visible_TW + token_M.to(tl.int64) * words + word
    low_M = tl.load(at_M, mask=live_M & (word >= 0) & (word < words), other=0)
    high_M = tl.load(at_M + 1, mask=live_M & (word + 1 >= 0) & (word + 1 < words), other=0)
    bits_M = (low_M.to(tl.uint64, bitcast=True) >> shift) | (high_M << 1 << (63 - shift)).to(tl.uint64, bitcast=True)
    return bits_M.to(tl.int32), (bits_M >> 32).to(tl.int32)


@triton.jit
def tree_bits(low_M: tl.tensor, high_M: tl.tensor, N: tl.constexpr) -> tl.tensor:
    """Return the first N of the 64 bits that `tree_words` found, bool `[M, N]`."""
    n = tl.arange(0, N)
    word_MN = tl.where((n < 32)[None, :], low_M[:, None], high_M[:, None])
    return ((word_MN >> (n & 31)[None, :]) & 1) != 0


@triton.jit
def is_finite(values: tl.tensor) -> tl.tensor:
    """Whether each value is neither infinite nor NaN, for values of any float type."""
    return tl.abs(values.to(tl.float32)) < float("inf")
