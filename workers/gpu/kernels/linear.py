"""Linear layers of a single token: a product that reads its weight once, as fast as memory gives it.

cuBLAS multiplies matrices; of one row it reads small weights at half of the memory's bandwidth.
"""

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

SHORT = (4, 1024)
"""Outputs of a program, and inputs that are read at a time."""
LONG = (8, 512)
"""The same for rows of more than `LONG_INPUTS`."""
LONG_INPUTS = 8192
FEWEST_INPUTS = 512
"""Rows of fewer are left to torch."""


@triton.jit
def row_kernel(
    input_K: tl.tensor,
    weight_NK: tl.tensor,
    bias_N: tl.tensor,
    added_N: tl.tensor,
    output_N: tl.tensor,
    outputs: tl.tensor,
    SIZE: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
) -> None:
    """Compute N outputs, in float32; add the bias and *added_N* where they are given, and round once."""
    n, k = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, K)
    is_output_N = n < outputs
    at_NK = weight_NK + n.to(tl.int64)[:, None] * SIZE + k[None, :]
    sum_NK = tl.zeros([N, K], tl.float32)
    for first in range(0, SIZE, K):
        if SIZE % K == 0:
            value_K = tl.load(input_K + first + k)
            weight_here_NK = tl.load(at_NK + first, mask=is_output_N[:, None], other=0.0)
        else:
            is_input_K = first + k < SIZE
            value_K = tl.load(input_K + first + k, mask=is_input_K, other=0.0)
            weight_here_NK = tl.load(at_NK + first, mask=is_output_N[:, None] & is_input_K[None, :], other=0.0)
        sum_NK += weight_here_NK.to(tl.float32) * value_K.to(tl.float32)[None, :]
    total_N = tl.sum(sum_NK, 1)
    if bias_N is not None:
        total_N += tl.load(bias_N + n, mask=is_output_N, other=0.0).to(tl.float32)
    if added_N is not None:
        total_N += tl.load(added_N + n, mask=is_output_N, other=0.0).to(tl.float32)
    tl.store(output_N + n, total_N.to(output_N.dtype.element_ty), mask=is_output_N)


def linear(
    input_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    added_TN: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `F.linear(input, weight, bias) + added`, `[T, N]`; all of one dtype, and contiguous.

    Sums are rounded once, after everything was added.
    """
    outputs, size = weight_NK.shape
    if len(input_TK) != 1 or size < FEWEST_INPUTS:
        if added_TN is None:
            return F.linear(input_TK, weight_NK, bias_N)
        return torch.addmm(added_TN if bias_N is None else added_TN + bias_N, input_TK, weight_NK.T)
    block, read = LONG if size > LONG_INPUTS else SHORT
    output_1N = input_TK.new_empty(1, outputs)
    row_kernel[(triton.cdiv(outputs, block),)](
        input_TK, weight_NK, bias_N, added_TN, output_1N, outputs, SIZE=size, N=block, K=read, num_warps=4, num_stages=3
    )
    return output_1N
