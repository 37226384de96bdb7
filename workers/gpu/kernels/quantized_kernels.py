"""The kernels of `workers.gpu.kernels.quantized`. N counts outputs of a tile, M its rows, B the bytes of one output."""

import triton
import triton.language as tl

from workers.gpu.kernels.codes import decoded, load_scales, load_zeros

ONE, ALONE, GROUPED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Which weight a tile of rows has: the only one, that of its single row, or that of an expert."""


@triton.jit
def rows_of_tile(
    ids_S: tl.tensor,
    order_S: tl.tensor,
    bounds_E1: tl.tensor,
    tiles_E: tl.tensor,
    tile: tl.tensor,
    rows: tl.tensor,
    experts: tl.tensor,
    KIND: tl.constexpr,
    M: tl.constexpr,
) -> tl.tuple:
    """Return the expert of a tile, its rows of the result, and which of them there are.

    Expert e has the rows of *order_S* from `bounds[e]` to `bounds[e + 1]`. Its tiles end at `tiles[e]`, where those of
    the next begin.
    """
    m_M = tl.arange(0, M)
    if KIND == ONE:
        found = tile * 0, tile * M + m_M, tile * M + m_M < rows
    elif KIND == ALONE:
        found = tl.load(ids_S + tile), tile + m_M, m_M < 1
    else:
        low, high = tile * 0, experts  # the first expert whose tiles end after this one; *experts* if there is none
        while low < high:
            middle = (low + high) // 2
            is_after = tl.load(tiles_E + middle) > tile
            low, high = tl.where(is_after, low, middle + 1), tl.where(is_after, middle, high)
        expert = tl.minimum(low, experts - 1)
        begin, end = tl.load(bounds_E1 + expert), tl.load(bounds_E1 + expert + 1)
        own = tile - tl.load(tiles_E + expert) + (end - begin + M - 1) // M
        place_M = begin + own * M + m_M
        is_row_M = place_M < end
        found = low, tl.load(order_S + place_M, mask=is_row_M, other=0).to(tl.int32), is_row_M
    return found


@triton.jit
def load_inputs(
    x: tl.tensor, k_B: tl.tensor, inputs: tl.tensor, is_row_M: tl.tensor, IS_EVEN: tl.constexpr
) -> tl.tensor:
    """Load activations from pointers to rows, `[B, M]`; 0 for rows that are none, and past the last input."""
    if IS_EVEN:
        return tl.trans(tl.load(x + k_B[None, :], mask=is_row_M[:, None], other=0.0))
    return tl.trans(tl.load(x + k_B[None, :], mask=is_row_M[:, None] & (k_B < inputs)[None, :], other=0.0))


@triton.jit(do_not_specialize=["rows"])  # else some numbers of rows have kernels of their own
def product_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    ids_S: tl.tensor,
    order_S: tl.tensor,
    bounds_E1: tl.tensor,
    tiles_E: tl.tensor,
    rows: tl.tensor,
    inputs: tl.tensor,
    columns: tl.tensor,
    padded: tl.tensor,
    x_stride: tl.tensor,
    group: tl.tensor,
    groups: tl.tensor,
    span: tl.tensor,
    repeats: tl.tensor,
    experts: tl.tensor,
    CODE: tl.constexpr,
    BYTES: tl.constexpr,
    KIND: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Multiply one tile of rows with one tile of outputs, over one span of inputs.

    The output is `[spans, rows, columns]`. PART inputs have one scale, and are multiplied at once; PARTS of them are a
    step. A block of 32 inputs has BYTES.
    """
    IS_PACKED: tl.constexpr = BYTES == 16
    WIDTH: tl.constexpr = PART * BYTES // 32
    DTYPE: tl.constexpr = x.dtype.element_ty
    expert, row_M, is_row_M = rows_of_tile(ids_S, order_S, bounds_E1, tiles_E, tl.program_id(1), rows, experts, KIND, M)
    if (expert < 0) | (expert >= experts):
        return
    expert = expert.to(tl.int64)
    blocks = (inputs + 31) // 32
    codes += expert * blocks * padded * BYTES
    n_N, b_B = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, WIDTH)
    x_M1 = x + ((row_M // repeats).to(tl.int64) * x_stride)[:, None]
    code_NB = n_N[:, None] * BYTES + (b_B // BYTES * padded * BYTES + b_B % BYTES)[None, :]
    k_B = b_B // BYTES * 32 + b_B % BYTES  # the input of the low half where a byte has two
    group_N = expert * groups * padded + n_N
    zero_N = load_zeros(zeros, group_N, HAS_ZEROS)
    sum_NM = tl.zeros((N, M), tl.float32)
    first = tl.program_id(2) * span
    # With a number of stages of its own, a loop pipelines scales and zero points, too, not only what is multiplied.
    for step in tl.range(first, tl.minimum(first + span, inputs), PART * PARTS, num_stages=STAGES):
        for part in tl.static_range(PARTS):
            at = step + part * PART
            codes_here = codes + (at // 32).to(tl.int64) * (padded * BYTES)
            if IS_EVEN:
                both_NB = tl.load(codes_here + code_NB)
            else:
                is_read_1B = (at // 32 + b_B // BYTES < blocks)[None, :]
                both_NB = tl.load(codes_here + code_NB, mask=is_read_1B, other=0)
            here_NM = sum_NM
            if HAS_GROUPS:
                group_N = (expert * groups + tl.minimum(at // group, groups - 1)) * padded + n_N
                zero_N = load_zeros(zeros, group_N, HAS_ZEROS)
                here_NM = tl.zeros((N, M), tl.float32)
            low_NB = both_NB & 15 if IS_PACKED else both_NB
            x_BM = load_inputs(x_M1, at + k_B, inputs, is_row_M, IS_EVEN)
            here_NM = tl.dot(decoded(low_NB, zero_N, CODE, DTYPE), x_BM, here_NM, input_precision="ieee")
            if IS_PACKED:
                x_BM = load_inputs(x_M1, at + 16 + k_B, inputs, is_row_M, IS_EVEN)
                here_NM = tl.dot(decoded(both_NB >> 4, zero_N, CODE, DTYPE), x_BM, here_NM, input_precision="ieee")
            if HAS_GROUPS:
                sum_NM += here_NM * load_scales(scales, group_N, CODE)[:, None]
            else:
                sum_NM = here_NM
    if not HAS_GROUPS:
        sum_NM *= load_scales(scales, group_N, CODE)[:, None]
    if HAS_BIAS:
        bias_N = tl.load(bias + expert * columns + n_N, mask=n_N < columns, other=0.0)
        sum_NM += bias_N.to(tl.float32)[:, None]
    row_M = row_M.to(tl.int64) + tl.program_id(2).to(tl.int64) * rows
    is_stored_NM = (n_N < columns)[:, None] & is_row_M[None, :]
    tl.store(output + row_M[None, :] * columns + n_N[:, None], sum_NM.to(output.dtype.element_ty), mask=is_stored_NM)


@triton.jit(do_not_specialize=["rows"])
def join_kernel(
    sums_PRN: tl.tensor,
    bias_N: tl.tensor,
    output_RN: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    SPANS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add the sums of all spans of one row, in order, and the bias."""
    row, n_N = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_real_N, at_N = n_N < columns, row * columns + n_N
    sum_N = tl.load(sums_PRN + at_N, mask=is_real_N, other=0.0)
    for span in tl.static_range(1, SPANS):
        sum_N += tl.load(sums_PRN + span * rows.to(tl.int64) * columns + at_N, mask=is_real_N, other=0.0)
    if HAS_BIAS:
        sum_N += tl.load(bias_N + n_N, mask=is_real_N, other=0.0).to(tl.float32)
    tl.store(output_RN + at_N, sum_N.to(output_RN.dtype.element_ty), mask=is_real_N)
