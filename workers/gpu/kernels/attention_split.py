"""Attention of one tile of queries over one split of the keys of its row."""

import triton
import triton.language as tl

from workers.gpu.kernels.tiles import add_keys, capped, is_finite, load_columns, locate, span, tree_bits, tree_words


@triton.jit
def attend_split(
    split: tl.tensor,
    query_MD: tl.tensor,
    query_MF: tl.tensor,
    token_M: tl.tensor,
    place_M: tl.tensor,
    position_M: tl.tensor,
    from_M: tl.tensor,
    live_M: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    kv_head: tl.tensor,
    kv_heads: tl.tensor,
    tables_RB: tl.tensor,
    table_width: tl.tensor,
    row: tl.tensor,
    lowest: tl.tensor,
    settled: tl.tensor,
    end: tl.tensor,
    first: tl.tensor,
    size: tl.tensor,
    first_valid: tl.tensor,
    positions_RA: tl.tensor,
    area: tl.tensor,
    visible_TW: tl.tensor,
    words: tl.tensor,
    scaling: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    kv_size: tl.tensor,
    kv_sinks: tl.tensor,
    KEY: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_KV_WINDOW: tl.constexpr,
    HAS_TREES: tl.constexpr,
    CAUSAL_BLOCK: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
    MASKED_STAGES: tl.constexpr,
) -> tl.tuple:
    """Return the greatest score, the total weight and the weighted sum of values, of each of M queries.

    Keys of size KEY are multiplied in two parts, of D and F columns (F may be 0), both powers of two: padding 192 to
    256 would cost a third more.

    Args:
        split: which places; see `workers.gpu.kernels.splits`.
        query_MD, query_MF: the two parts of the queries.
        token_M, place_M, position_M: flat index, place and position of each query.
        from_M: the position from which its window counts back.
        live_M: which queries there are.
        lowest: the first place, sinks apart, that any of the queries sees.
        settled: all queries see all places before it that their windows hold: known tokens before the first query; a
            multiple of N.
        end: the place after the last that any of the queries sees.
        first, size, first_valid, positions_RA, visible_TW: the row's; see `DeviceMetadata`.
        kv_size, kv_sinks: the KV window; sinks are 0 without one.
        VALUES_IN_KEYS: the first D columns of the keys are the values, with columns after VALUE that are not used.
        MASKED_STAGES: `num_stages` of the keys from *settled* on; None: the launch's.
    """
    greatest_M = tl.full([M], -float("inf"), tl.float32)
    total_M = tl.zeros([M], tl.float32)
    sum_ME = tl.zeros([M, E], tl.float32)
    at, after = span(split, lowest, end, kv_sinks, N)
    for tile in range(at, tl.minimum(after, settled), N):
        place_N = tile + tl.arange(0, N)
        is_read_N = place_N >= first_valid
        if HAS_WINDOW or HAS_KV_WINDOW:
            is_read_N &= (place_N >= lowest) | (place_N < kv_sinks)
        index_N = locate(tables_RB, table_width, row, place_N, is_read_N, BLOCK)
        key_ND = load_columns(keys, index_N, is_read_N, kv_head, kv_heads, KEY, KEY, 0, D).to(query_MD.dtype)
        score_MN = tl.dot(query_MD, tl.trans(key_ND), input_precision="ieee")
        if F > 0:
            key_NF = load_columns(keys, index_N, is_read_N, kv_head, kv_heads, KEY, KEY, D, F).to(query_MD.dtype)
            score_MN = tl.dot(query_MF, tl.trans(key_NF), score_MN, input_precision="ieee")
        if VALUES_IN_KEYS:
            value_NE = key_ND
        else:
            value_NE = load_columns(values, index_N, is_read_N, kv_head, kv_heads, VALUE_STRIDE, VALUE, 0, E)
            value_NE = value_NE.to(query_MD.dtype)
        is_seen_MN = is_read_N[None, :]
        if HAS_WINDOW:
            is_seen_MN = is_seen_MN & (from_M[:, None] - place_N[None, :] < window)
        if HAS_KV_WINDOW:
            is_recent_MN = position_M[:, None] - place_N[None, :] < kv_size
            is_seen_MN = is_seen_MN & (is_recent_MN | (place_N < kv_sinks)[None, :])
        score_MN = tl.where(is_seen_MN, capped(score_MN, scaling, softcap, HAS_SOFTCAP), -float("inf"))
        greatest_M, total_M, sum_ME = add_keys(greatest_M, total_M, sum_ME, score_MN, value_NE)
    for tile in tl.range(tl.maximum(at, settled), after, N, num_stages=MASKED_STAGES):
        place_N = tile + tl.arange(0, N)
        is_read_N = (place_N >= first_valid) & (place_N < end)
        if HAS_WINDOW or HAS_KV_WINDOW:
            is_read_N &= (place_N >= lowest) | (place_N < kv_sinks)
        index_N = locate(tables_RB, table_width, row, place_N, is_read_N, BLOCK)
        if VALUES_IN_KEYS:
            key_ND = load_columns(keys, index_N, is_read_N, kv_head, kv_heads, KEY, KEY, 0, D).to(query_MD.dtype)
            value_NE = key_ND
        else:  # before the keys: they would take registers beside the scores
            value_NE = load_columns(values, index_N, is_read_N, kv_head, kv_heads, VALUE_STRIDE, VALUE, 0, E)
            value_NE = value_NE.to(query_MD.dtype)
        # A draft token's K and V may be NaN or infinite. A weight of 0 times NaN is NaN: they must not reach queries
        # that do not see them.
        is_finite_N = tl.min(is_finite(value_NE).to(tl.int32), 1)
        value_NE = tl.where(is_finite(value_NE), value_NE, 0.0)
        if not VALUES_IN_KEYS:
            key_ND = load_columns(keys, index_N, is_read_N, kv_head, kv_heads, KEY, KEY, 0, D).to(query_MD.dtype)
        score_MN = tl.dot(query_MD, tl.trans(key_ND), input_precision="ieee")
        if F > 0:
            key_NF = load_columns(keys, index_N, is_read_N, kv_head, kv_heads, KEY, KEY, D, F).to(query_MD.dtype)
            score_MN = tl.dot(query_MF, tl.trans(key_NF), score_MN, input_precision="ieee")
        is_seen_MN = place_N[None, :] <= place_M[:, None]
        position_N = place_N
        if HAS_TREES:
            inside_N = place_N - first
            low_M, high_M = tree_words(visible_TW, words, token_M, tile - first, live_M)
            is_covered_N = (inside_N >= 0) & (inside_N < size)
            in_tree_MN = tree_bits(low_M, high_M, N) & is_covered_N[None, :]
            is_seen_MN = tl.where((inside_N < 0)[None, :], is_seen_MN, in_tree_MN)
            if HAS_WINDOW or HAS_KV_WINDOW or CAUSAL_BLOCK:
                covered_N = tl.load(positions_RA + row * area + inside_N, mask=is_covered_N, other=0)
                position_N = tl.where(is_covered_N, covered_N, place_N)
        is_seen_MN &= is_read_N[None, :]
        if CAUSAL_BLOCK:
            is_seen_MN &= position_N[None, :] <= position_M[:, None]
        if HAS_WINDOW:
            is_seen_MN &= from_M[:, None] - position_N[None, :] < window
        if HAS_KV_WINDOW:
            is_recent_MN = position_M[:, None] - position_N[None, :] < kv_size
            is_seen_MN &= is_recent_MN | (position_N < kv_sinks)[None, :]
        score_MN = capped(score_MN, scaling, softcap, HAS_SOFTCAP)
        is_broken_MN = (is_finite_N == 0)[None, :] | (is_finite(score_MN) == 0)
        score_MN = tl.where(is_broken_MN, float("nan"), score_MN)
        score_MN = tl.where(is_seen_MN, score_MN, -float("inf"))
        greatest_M, total_M, sum_ME = add_keys(greatest_M, total_M, sum_ME, score_MN, value_NE)
    return greatest_M, total_M, sum_ME
