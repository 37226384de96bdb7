"""The kernels that `workers.gpu.kernels.sampling` starts, but for the search for limits."""

import triton
import triton.language as tl

from workers.gpu.kernels.limits import find_last, in_order, load_scaled, row_greatest, row_target, weigh
from workers.gpu.kernels.noise import gumbel
from workers.sampling.sample import MIN_TEMPERATURE, NO_TOKEN

PASSES = tl.constexpr(8)
_GREEDY = tl.constexpr(MIN_TEMPERATURE)
_NO_TOKEN = tl.constexpr(NO_TOKEN)


@triton.jit(do_not_specialize=("vocab", "blocks", "words"))
def greatest_kernel(
    logits_NV: tl.tensor,
    stride: tl.tensor,
    temperature_N: tl.tensor,
    bits_MW: tl.tensor,
    bits_row_N: tl.tensor,
    greatest_NB: tl.tensor,
    vocab: tl.tensor,
    blocks: tl.tensor,
    words: tl.tensor,
    BLOCK: tl.constexpr,
    HAS_BITS: tl.constexpr,
) -> None:
    """Find the greatest value of one block; infinite if one is NaN."""
    row, block = tl.program_id(0), tl.program_id(1)
    id_B = block * BLOCK + tl.arange(0, BLOCK)
    value_B = load_scaled(logits_NV, stride, temperature_N, bits_MW, bits_row_N, words, row, id_B, vocab, HAS_BITS)
    tl.store(greatest_NB + row * blocks + block, tl.max(tl.where(value_B != value_B, float("inf"), value_B), 0))


@triton.jit(do_not_specialize=("rows", "vocab", "blocks", "words"))
def ties_kernel(
    logits_NV: tl.tensor,
    stride: tl.tensor,
    temperature_N: tl.tensor,
    bits_MW: tl.tensor,
    bits_row_N: tl.tensor,
    greatest_NB: tl.tensor,
    top_k_N: tl.tensor,
    top_p_N: tl.tensor,
    min_p_N: tl.tensor,
    kth_sums: tl.tensor,
    kth_prefixes: tl.tensor,
    mass_sums: tl.tensor,
    mass_prefixes: tl.tensor,
    ties_NB3: tl.tensor,
    rows: tl.tensor,
    vocab: tl.tensor,
    blocks: tl.tensor,
    words: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_BITS: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
) -> None:
    """For the last value that top-p leaves: the mass above it, its own, and how many ids of one block have it."""
    row, block = tl.program_id(0), tl.program_id(1)
    top_p = tl.load(top_p_N + row)
    if (tl.load(temperature_N + row) < _GREEDY) | (top_p >= 1.0):
        return
    target = row_target(mass_sums, top_p_N, row, blocks, BLOCKS, True)
    last = find_last(mass_sums, mass_prefixes, row, rows, blocks, target, row * 0 + PASSES, BLOCKS)
    kth, min_p = last * 0, 0.0
    if HAS_TOP_K:
        top_k = tl.load(top_k_N + row).to(tl.int64)
        kth = find_last(kth_sums, kth_prefixes, row, rows, blocks, top_k, row * 0 + PASSES, BLOCKS)
    if HAS_MIN_P:
        min_p = tl.load(min_p_N + row)
    id_B = block * BLOCK + tl.arange(0, BLOCK)
    value_B = load_scaled(logits_NV, stride, temperature_N, bits_MW, bits_row_N, words, row, id_B, vocab, HAS_BITS)
    is_left_B, mass_B = weigh(value_B, row_greatest(greatest_NB, row, blocks, BLOCKS), kth, min_p)
    number_B = in_order(value_B)
    is_last_B = is_left_B & (number_B == last)
    at = ties_NB3 + (row * blocks + block) * 3
    tl.store(at, tl.sum(tl.where(number_B > last, mass_B, 0), 0))
    tl.store(at + 1, tl.max(tl.where(is_last_B, mass_B, 0), 0))
    tl.store(at + 2, tl.sum(is_last_B.to(tl.int64), 0))


@triton.jit
def left_by_top_p(
    is_left_B: tl.tensor,
    number_B: tl.tensor,
    last: tl.tensor,
    target: tl.tensor,
    ties_NB3: tl.tensor,
    row: tl.tensor,
    block: tl.tensor,
    blocks: tl.tensor,
    BLOCKS: tl.constexpr,
) -> tl.tensor:
    """Return which ids of one block top-p leaves: those above the last value, and the lowest of those that have it."""
    other = tl.arange(0, BLOCKS)
    at_O = ties_NB3 + (row * blocks + other) * 3
    above = tl.sum(tl.load(at_O, mask=other < blocks, other=0), 0)
    mass = tl.max(tl.load(at_O + 1, mask=other < blocks, other=0), 0)
    before = tl.sum(tl.load(at_O + 2, mask=other < block, other=0), 0)
    count = (target - above + mass - 1) // tl.maximum(mass, 1)
    is_last_B = is_left_B & (number_B == last)
    rank_B = before + tl.cumsum(is_last_B.to(tl.int32), 0) - 1
    return is_left_B & ((number_B > last) | (is_last_B & (rank_B < count)))


@triton.jit(do_not_specialize=("rows", "vocab", "blocks", "words"))
def choose_kernel(
    logits_NV: tl.tensor,
    stride: tl.tensor,
    keys_N: tl.tensor,
    temperature_N: tl.tensor,
    bits_MW: tl.tensor,
    bits_row_N: tl.tensor,
    greatest_NB: tl.tensor,
    top_k_N: tl.tensor,
    top_p_N: tl.tensor,
    min_p_N: tl.tensor,
    kth_sums: tl.tensor,
    kth_prefixes: tl.tensor,
    mass_sums: tl.tensor,
    mass_prefixes: tl.tensor,
    ties_NB3: tl.tensor,
    scores_NB: tl.tensor,
    ids_NB: tl.tensor,
    rows: tl.tensor,
    vocab: tl.tensor,
    blocks: tl.tensor,
    words: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_BITS: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
) -> None:
    """Find the best id of one block: the greatest logit over temperature plus noise, of those that the limits leave."""
    row, block = tl.program_id(0), tl.program_id(1)
    id_B = block * BLOCK + tl.arange(0, BLOCK)
    value_B = load_scaled(logits_NV, stride, temperature_N, bits_MW, bits_row_N, words, row, id_B, vocab, HAS_BITS)
    is_left_B = id_B < vocab
    if HAS_TOP_K or HAS_TOP_P or HAS_MIN_P:
        if tl.load(temperature_N + row) >= _GREEDY:
            kth, min_p = row.to(tl.int64) * 0, 0.0
            if HAS_TOP_K:
                top_k = tl.load(top_k_N + row).to(tl.int64)
                kth = find_last(kth_sums, kth_prefixes, row, rows, blocks, top_k, row * 0 + PASSES, BLOCKS)
            if HAS_MIN_P:
                min_p = tl.load(min_p_N + row)
            is_left_B, _ = weigh(value_B, row_greatest(greatest_NB, row, blocks, BLOCKS), kth, min_p)
            if HAS_TOP_P:
                if tl.load(top_p_N + row) < 1.0:
                    target = row_target(mass_sums, top_p_N, row, blocks, BLOCKS, True)
                    last = find_last(mass_sums, mass_prefixes, row, rows, blocks, target, row * 0 + PASSES, BLOCKS)
                    is_left_B = left_by_top_p(
                        is_left_B, in_order(value_B), last, target, ties_NB3, row, block, blocks, BLOCKS
                    )
    else:
        is_nan_B = value_B != value_B
        tl.store(greatest_NB + row * blocks + block, tl.max(tl.where(is_nan_B, float("inf"), value_B), 0))
    score_B = value_B.to(tl.float64)
    if tl.load(temperature_N + row) >= _GREEDY:
        score_B += gumbel(tl.load(keys_N + row), id_B)
    score_B = tl.where(is_left_B, score_B, -float("inf"))
    best = tl.max(score_B, 0)
    tl.store(scores_NB + row * blocks + block, best)
    tl.store(ids_NB + row * blocks + block, tl.min(tl.where(score_B == best, id_B, vocab), 0))


@triton.jit(do_not_specialize=("vocab", "blocks"))
def pick_kernel(
    greatest_NB: tl.tensor,
    scores_NB: tl.tensor,
    ids_NB: tl.tensor,
    ids_N: tl.tensor,
    vocab: tl.tensor,
    blocks: tl.tensor,
    BLOCKS: tl.constexpr,
) -> None:
    """Take the best of a row's blocks, the lowest id among equals; -1 if the row's greatest logit is not finite."""
    row, block = tl.program_id(0), tl.arange(0, BLOCKS)
    at_B = row * blocks + block
    score_B = tl.load(scores_NB + at_B, mask=block < blocks, other=-float("inf"))
    id_B = tl.load(ids_NB + at_B, mask=block < blocks, other=2**31 - 1)
    found = tl.min(tl.where(score_B == tl.max(score_B, 0), id_B, vocab), 0)
    greatest = row_greatest(greatest_NB, row, blocks, BLOCKS)
    is_finite = (greatest > -float("inf")) & (greatest < float("inf"))
    tl.store(ids_N + row, tl.where(is_finite, found, _NO_TOKEN).to(tl.int64))
