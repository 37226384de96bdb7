"""Top-k, top-p and min-p without sorting: which token ids the limits of a row leave, as thresholds.

Logits over temperature are taken as whole numbers in the same order (the bits of floats). Both the k-th greatest
and the last one that top-p leaves are "the greatest t such that the weights of all numbers >= t reach a target": with
weights of 1 and a target of k, or with masses and a target of top_p times their total. So one search finds both: 8
passes of 4 bits each, and in each pass every block of the vocabulary adds up the weights above 16 candidates. Weights
are integers, so the sums do not depend on their order; they are those of `workers.sampling.sample._left_by`.

Between equal logits the lowest ids are left: the last value's number of ids follows from what is left of the target.
"""

import triton
import triton.language as tl

from workers.sampling.sample import MIN_TEMPERATURE, UNITS

PASSES = 8

_UNITS = tl.constexpr(UNITS)
_GREEDY = tl.constexpr(MIN_TEMPERATURE)
_HALF = tl.constexpr(1 << 31)


@triton.jit
def load_scaled(
    logits_NV: tl.tensor,
    stride: tl.tensor,
    temperature_N: tl.tensor,
    bits_MW: tl.tensor,
    bits_row_N: tl.tensor,
    words: tl.tensor,
    row: tl.tensor,
    id_B: tl.tensor,
    vocab: tl.tensor,
    HAS_BITS: tl.constexpr,
) -> tl.tensor:
    """Return logits over temperature, float32, greedy rows' as they are; -inf past the last id and where forbidden."""
    logit_B = tl.load(logits_NV + row.to(tl.int64) * stride + id_B, mask=id_B < vocab, other=-float("inf"))
    if HAS_BITS:
        bits_row = tl.load(bits_row_N + row)
        at_B = bits_MW + bits_row.to(tl.int64) * words + id_B // 32
        word_B = tl.load(at_B, mask=(id_B < vocab) & (bits_row >= 0), other=-1)
        is_allowed_B = ((word_B >> (id_B % 32)) & 1) != 0
        logit_B = tl.where(is_allowed_B, logit_B, logit_B - float("inf"))  # NaN stays NaN
    temperature = tl.load(temperature_N + row)
    divisor = tl.where(temperature < _GREEDY, 1.0, temperature)
    # Adding 0 makes -0.0 and 0.0 equal in their bits, too.
    return tl.div_rn(logit_B, tl.zeros_like(logit_B) + divisor) + 0.0


@triton.jit
def in_order(value_B: tl.tensor) -> tl.tensor:
    """Return int64 numbers from 0 to 2^32 - 1 in the order of float32 values."""
    bits_B = value_B.to(tl.int32, bitcast=True)
    return (bits_B ^ ((bits_B >> 31) & 0x7FFFFFFF)).to(tl.int64) + _HALF


@triton.jit
def row_greatest(greatest_NB: tl.tensor, row: tl.tensor, blocks: tl.tensor, BLOCKS: tl.constexpr) -> tl.tensor:
    """Return the greatest value of a row; infinite if one is NaN."""
    block = tl.arange(0, BLOCKS)
    return tl.max(tl.load(greatest_NB + row * blocks + block, mask=block < blocks, other=-float("inf")), 0)


@triton.jit
def weigh(value_B: tl.tensor, greatest: tl.tensor, kth: tl.tensor, min_p: tl.tensor) -> tl.tensor:
    """Return which values top-k and min-p leave, and their masses in units of 2^-34 of the greatest, int64."""
    # No id is sampled where the greatest is not finite. What is not a number is left out here.
    base = tl.where(tl.abs(greatest) < float("inf"), greatest, 0.0)
    weight_B = tl.exp((value_B - base).to(tl.float64)).to(tl.float32)
    weight_B = tl.where(weight_B <= 1.0, weight_B, 0.0)
    is_left_B = (weight_B.to(tl.float64) >= min_p) & (value_B > -float("inf")) & (in_order(value_B) >= kth)
    scaled_B = weight_B * _UNITS
    whole_B = tl.floor(scaled_B)
    # Half to even. Above 2^23 a float32 is whole.
    part_B, is_odd_B = scaled_B - whole_B, whole_B.to(tl.int64) & 1
    mass_B = whole_B.to(tl.int64) + ((part_B > 0.5) | ((part_B == 0.5) & (is_odd_B == 1))).to(tl.int64)
    return is_left_B, tl.where(is_left_B, mass_B, 0)


@triton.jit
def row_target(
    sums: tl.tensor,
    target_N: tl.tensor,
    row: tl.tensor,
    blocks: tl.tensor,
    BLOCKS: tl.constexpr,
    BY_MASS: tl.constexpr,
) -> tl.tensor:
    """Return what sums must reach: k, or the mass that top-p leaves, rounded up. 0: the limit is off.

    In the first pass, the sums above the candidate 0 are the row's total mass.
    """
    target = tl.load(target_N + row)
    if BY_MASS:
        block = tl.arange(0, BLOCKS)
        total = tl.sum(tl.load(sums + (row * blocks + block) * 16, mask=block < blocks, other=0), 0)
        wanted = tl.ceil(target * total.to(tl.float64)).to(tl.int64)
        return tl.where(target >= 1.0, 0, wanted)
    return target.to(tl.int64)


@triton.jit
def find_last(
    sums: tl.tensor,
    prefixes: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    blocks: tl.tensor,
    target: tl.tensor,
    step: tl.tensor,
    BLOCKS: tl.constexpr,
) -> tl.tensor:
    """Return the digits found in the first *step* passes, 0 if there are none, or if the limit is off."""
    found = target * 0
    if step > 0:
        if target > 0:
            block, digit = tl.arange(0, BLOCKS), tl.arange(0, 16)
            at = ((step - 1) * rows + row).to(tl.int64)
            at_BD = ((at * blocks + block) * 16)[:, None] + digit[None, :]
            sum_D = tl.sum(tl.load(sums + at_BD, mask=(block < blocks)[:, None], other=0), 0)
            last = tl.max(tl.where(sum_D >= target, digit, 0), 0).to(tl.int64)
            found = tl.load(prefixes + at) | (last << (32 - 4 * step))
    return found


@triton.jit(do_not_specialize=("rows", "vocab", "blocks", "words", "step"))
def search_kernel(
    logits_NV: tl.tensor,
    stride: tl.tensor,
    temperature_N: tl.tensor,
    bits_MW: tl.tensor,
    bits_row_N: tl.tensor,
    greatest_NB: tl.tensor,
    target_N: tl.tensor,
    min_p_N: tl.tensor,
    sums: tl.tensor,
    prefixes: tl.tensor,
    kth_sums: tl.tensor,
    kth_prefixes: tl.tensor,
    top_k_N: tl.tensor,
    rows: tl.tensor,
    vocab: tl.tensor,
    blocks: tl.tensor,
    words: tl.tensor,
    step: tl.tensor,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    BLOCKS: tl.constexpr,
    BY_MASS: tl.constexpr,
    HAS_BITS: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
) -> None:
    """One pass over one block of one row: add up the weights above 16 candidates for the next digit.

    A value is not below a candidate if its own digit is not below the candidate's. Blocks, and parts of them, that lie
    below the digits found so far add nothing: after the first passes those are most.

    `sums` is int64 `[PASSES, N, blocks, 16]`, `prefixes` int64 `[PASSES, N]`: the digits found before each pass.
    """
    row, block = tl.program_id(0), tl.program_id(1)
    if tl.load(temperature_N + row) < _GREEDY:
        return
    off = tl.load(target_N + row)
    if BY_MASS:
        if off >= 1.0:
            return
    elif off == 0:
        return
    target = row.to(tl.int64) * 0
    if step > 0:
        target = row_target(sums, target_N, row, blocks, BLOCKS, BY_MASS)
    prefix = find_last(sums, prefixes, row, rows, blocks, target, step, BLOCKS)
    at = (step * rows + row).to(tl.int64)
    if block == 0:
        tl.store(prefixes + at, prefix)
    digit_D = tl.arange(0, 16)
    shift = 28 - 4 * step
    greatest, kth, min_p = 0.0, prefix * 0, 0.0
    if BY_MASS:
        greatest = row_greatest(greatest_NB, row, blocks, BLOCKS)
        if HAS_MIN_P:
            min_p = tl.load(min_p_N + row)
        if HAS_TOP_K:
            top_k = tl.load(top_k_N + row).to(tl.int64)
            kth = find_last(kth_sums, kth_prefixes, row, rows, blocks, top_k, step * 0 + 8, BLOCKS)
    sum_DP = tl.zeros([16, PART], tl.int64)  # one sum over ids at the end: each is a round of barriers
    lowest = tl.maximum(prefix, kth)
    if in_order(tl.load(greatest_NB + row * blocks + block)) >= lowest:
        for part in range(0, BLOCK, PART):
            id_P = block * BLOCK + part + tl.arange(0, PART)
            value_P = load_scaled(
                logits_NV, stride, temperature_N, bits_MW, bits_row_N, words, row, id_P, vocab, HAS_BITS
            )
            number_P = in_order(value_P)
            if tl.max(number_P, 0) >= lowest:
                if BY_MASS:
                    _, weight_P = weigh(value_P, greatest, kth, min_p)
                else:
                    weight_P = (id_P < vocab).to(tl.int64)
                last_P = tl.where(number_P < prefix, -1, tl.minimum((number_P - prefix) >> shift, 15)).to(tl.int32)
                sum_DP += tl.where(last_P[None, :] >= digit_D[:, None], weight_P[None, :], 0)
    tl.store(sums + (at * blocks + block) * 16 + digit_D, tl.sum(sum_DP, 1))
