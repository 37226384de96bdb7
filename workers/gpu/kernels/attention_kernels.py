"""The two attention kernels; `workers.gpu.kernels.attention` starts them."""

import triton
import triton.language as tl

from workers.gpu.kernels.attention_split import attend_split
from workers.gpu.kernels.splits import count_splits, initial, join, split_start
from workers.gpu.kernels.tiles import find_row

RUNTIME = (
    "rows",
    "table_width",
    "area",
    "words",
    "slots",
    "splits",
    "short",
    "window",
    "kv_size",
    "kv_sinks",
)
"""Integer arguments that are not compiled in: they differ from forward to forward."""


@triton.jit(do_not_specialize=RUNTIME)
def attention_kernel(
    query: tl.tensor,
    query_head: tl.tensor,
    query_token: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    output_THE: tl.tensor,
    sums: tl.tensor,
    stats: tl.tensor,
    sinks: tl.tensor,
    starts_R: tl.tensor,
    lengths_R: tl.tensor,
    offsets_R: tl.tensor,
    tables_RB: tl.tensor,
    first_R: tl.tensor,
    sizes_R: tl.tensor,
    positions_RA: tl.tensor,
    visible_TW: tl.tensor,
    first_valid_R: tl.tensor,
    rows: tl.tensor,
    table_width: tl.tensor,
    area: tl.tensor,
    words: tl.tensor,
    slots: tl.tensor,
    splits: tl.tensor,
    short: tl.tensor,
    window: tl.tensor,
    kv_size: tl.tensor,
    kv_sinks: tl.tensor,
    scaling: tl.tensor,
    softcap: tl.tensor,
    value_scale: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    KEY: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    ONE_TILE: tl.constexpr,
    IS_DIVIDED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_KV_WINDOW: tl.constexpr,
    HAS_TREES: tl.constexpr,
    FROM_BLOCK: tl.constexpr,
    CAUSAL_BLOCK: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
    MASKED_STAGES: tl.constexpr,
) -> None:
    """Attend for one tile of queries of SHARE heads, over one split if IS_DIVIDED, else over all.

    IS_DIVIDED: for rows of up to *short* tokens; results go into `sums` `[R, slots, heads, splits, VALUE]` and `stats`
    `[R, slots, heads, splits, 2]`, greatest score and total weight. Else for the other rows.
    """
    QUERIES: tl.constexpr = M // SHARE
    tile, first_head = tl.program_id(0), tl.program_id(1) * SHARE
    kv_head = first_head // (HEADS // KV_HEADS)
    if ONE_TILE:
        row, in_row = tile, 0
    else:
        row = find_row(offsets_R, tile, rows, QUERIES)
        in_row = tile - tl.load(offsets_R + row) // QUERIES - row
    length = tl.load(lengths_R + row)
    if in_row < 0 or in_row * QUERIES >= length:
        return
    is_short = length <= short
    if is_short != IS_DIVIDED:
        return
    start, offset = tl.load(starts_R + row), tl.load(offsets_R + row)
    if split_start(tl.program_id(2)) >= start + length:
        return  # the grid is made for the longest context; `join_kernel` reads no such split
    first, size, first_valid = start + length, 0, tl.load(first_valid_R + row)
    if HAS_TREES:
        first, size = tl.load(first_R + row), tl.load(sizes_R + row)
    m = tl.arange(0, M)
    query_M, head_M = in_row * QUERIES + m // SHARE, first_head + m % SHARE
    live_M = (m < QUERIES * SHARE) & (query_M < length)
    token_M, place_M = offset + query_M, start + query_M
    position_M = place_M
    if HAS_TREES:
        is_covered_M = live_M & (place_M >= first) & (place_M < first + size)
        covered_M = tl.load(positions_RA + row * area + place_M - first, mask=is_covered_M, other=0)
        position_M = tl.where(is_covered_M, covered_M, place_M)
    from_M = tl.minimum(position_M, first) if FROM_BLOCK else position_M
    end = start + tl.minimum(length, (in_row + 1) * QUERIES)
    lowest = start * 0
    if HAS_TREES:
        end = tl.where(size > 0, start + length, end)
    if HAS_WINDOW:
        lowest = tl.maximum(lowest, tl.min(tl.where(live_M, from_M, 2**30), 0) - window + 1)
    if HAS_KV_WINDOW:
        lowest = tl.maximum(lowest, tl.min(tl.where(live_M, position_M, 2**30), 0) - kv_size + 1)
    lowest = tl.minimum(lowest, first)  # positions of covered places are in no order
    settled = tl.minimum(start + in_row * QUERIES, first) // N * N
    at_M = query + first_head.to(tl.int64) * query_head + (m % SHARE) * query_head + token_M.to(tl.int64) * query_token
    d, f = tl.arange(0, D), D + tl.arange(0, F if F > 0 else 1)
    query_MD = tl.load(at_M[:, None] + d[None, :], mask=live_M[:, None] & (d < KEY)[None, :], other=0.0)
    query_MF = tl.load(at_M[:, None] + f[None, :], mask=live_M[:, None] & (f < KEY)[None, :], other=0.0)
    e = tl.arange(0, E)
    if IS_DIVIDED:
        split = tl.program_id(2)
        greatest_M, total_M, sum_ME = attend_split(
            split, query_MD, query_MF, token_M, place_M, position_M, from_M, live_M, keys, values, kv_head, KV_HEADS,
            tables_RB, table_width, row, lowest, settled, end, first, size, first_valid, positions_RA, area, visible_TW,
            words, scaling, softcap, window, kv_size, kv_sinks,
            KEY, D, F, VALUE, VALUE_STRIDE, E, BLOCK, M, N, HAS_SOFTCAP, HAS_WINDOW, HAS_KV_WINDOW, HAS_TREES,
            CAUSAL_BLOCK, VALUES_IN_KEYS, None,
        )  # fmt: skip
        found_M = ((row.to(tl.int64) * slots + query_M) * HEADS + head_M) * splits + split
        tl.store(stats + found_M * 2, greatest_M, mask=live_M)
        tl.store(stats + found_M * 2 + 1, total_M, mask=live_M)
        is_stored_M = live_M & (greatest_M != -float("inf"))
        at_ME = (found_M * VALUE)[:, None] + e[None, :]
        tl.store(sums + at_ME, sum_ME, mask=is_stored_M[:, None] & (e < VALUE)[None, :])
    else:
        greatest_M, total_M = initial(sinks, head_M, live_M, HAS_SINKS)
        sum_ME = tl.zeros([M, E], tl.float32)
        for split in range(0, count_splits(end)):
            next_greatest_M, next_total_M, next_sum_ME = attend_split(
                split, query_MD, query_MF, token_M, place_M, position_M, from_M, live_M, keys, values, kv_head,
                KV_HEADS, tables_RB, table_width, row, lowest, settled, end, first, size, first_valid, positions_RA,
                area, visible_TW, words, scaling, softcap, window, kv_size, kv_sinks,
                KEY, D, F, VALUE, VALUE_STRIDE, E, BLOCK, M, N, HAS_SOFTCAP, HAS_WINDOW, HAS_KV_WINDOW, HAS_TREES,
                CAUSAL_BLOCK, VALUES_IN_KEYS, MASKED_STAGES,
            )  # fmt: skip
            greatest_M, total_M, sum_ME = join(greatest_M, total_M, sum_ME, next_greatest_M, next_total_M, next_sum_ME)
        mean_ME = sum_ME * value_scale / tl.where(total_M == 0.0, 1.0, total_M)[:, None]
        at_ME = ((token_M.to(tl.int64) * HEADS + head_M) * VALUE)[:, None] + e[None, :]
        is_stored_ME = live_M[:, None] & (e < VALUE)[None, :]
        tl.store(output_THE + at_ME, mean_ME.to(output_THE.dtype.element_ty), mask=is_stored_ME)


@triton.jit(do_not_specialize=RUNTIME)
def join_kernel(
    output_THE: tl.tensor,
    sums: tl.tensor,
    stats: tl.tensor,
    sinks: tl.tensor,
    starts_R: tl.tensor,
    lengths_R: tl.tensor,
    offsets_R: tl.tensor,
    rows_T: tl.tensor,
    slots: tl.tensor,
    splits: tl.tensor,
    short: tl.tensor,
    value_scale: tl.tensor,
    VALUE: tl.constexpr,
    E: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    """Join what the splits of one token and head found, in order. The output of padding is 0."""
    token, head = tl.program_id(0), tl.program_id(1)
    e = tl.arange(0, E)
    at_E = output_THE + (token.to(tl.int64) * tl.num_programs(1) + head) * VALUE + e
    row = tl.load(rows_T + token)
    if row < 0:
        tl.store(at_E, tl.zeros([E], tl.float32).to(output_THE.dtype.element_ty), mask=e < VALUE)
        return
    length = tl.load(lengths_R + row)
    if length > short:
        return
    slot = row.to(tl.int64) * slots + token - tl.load(offsets_R + row)
    head_1 = head + tl.arange(0, 1)
    greatest_1, total_1 = initial(sinks, head_1, head_1 >= 0, HAS_SINKS)
    sum_1E = tl.zeros([1, E], tl.float32)
    for split in range(0, count_splits(tl.load(starts_R + row) + length)):
        found_1 = (slot * tl.num_programs(1) + head_1) * splits + split
        next_greatest_1, next_total_1 = tl.load(stats + found_1 * 2), tl.load(stats + found_1 * 2 + 1)
        is_stored_1E = (next_greatest_1 != -float("inf"))[:, None] & (e < VALUE)[None, :]
        next_sum_1E = tl.load(sums + (found_1 * VALUE)[:, None] + e[None, :], mask=is_stored_1E, other=0.0)
        greatest_1, total_1, sum_1E = join(greatest_1, total_1, sum_1E, next_greatest_1, next_total_1, next_sum_1E)
    mean_1E = sum_1E * value_scale / tl.where(total_1 == 0.0, 1.0, total_1)[:, None]
    mean_E = tl.reshape(mean_1E, [E])
    tl.store(at_E, mean_E.to(output_THE.dtype.element_ty), mask=e < VALUE)
