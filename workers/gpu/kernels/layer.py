"""What a decoder layer does between its matrix products: RMSNorm, rotary positions, SwiGLU; one kernel each.

They round where `transformers`' modules round: each product and each sum is rounded to the dtype of the hidden states,
and the mean of squares is taken in float32. Only the order of that mean, and of a product that a GPU joins with a sum,
may differ.
"""

import torch
import triton
import triton.language as tl

from workers.gpu.kernels.shape import power_of_two

MOST = 1024
"""Elements of one program of SwiGLU."""
WIDE = 2048
"""Rows of so many elements take 8 warps."""


@triton.jit
def rounded_product(a_X: tl.tensor, b_X: tl.tensor, like_X: tl.tensor) -> tl.tensor:
    """Return a * b, computed in float32, rounded to the dtype of *like_X*."""
    return (a_X.to(tl.float32) * b_X.to(tl.float32)).to(like_X.dtype)


@triton.jit
def rounded_sum(a_X: tl.tensor, b_X: tl.tensor, like_X: tl.tensor) -> tl.tensor:
    """Return a + b, computed in float32, rounded to the dtype of *like_X*."""
    return (a_X.to(tl.float32) + b_X.to(tl.float32)).to(like_X.dtype)


@triton.jit
def norm_kernel(
    hidden_TC: tl.tensor,
    added_TC: tl.tensor,
    weight_C: tl.tensor,
    sum_TC: tl.tensor,
    output_TC: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_ADDED: tl.constexpr,
) -> None:
    """Add, store the sum, and normalise one token's hidden state."""
    token, c = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    is_real_C, at_C = c < SIZE, token * SIZE + c
    hidden_C = tl.load(hidden_TC + at_C, mask=is_real_C, other=0.0)
    if HAS_ADDED:
        hidden_C = rounded_sum(hidden_C, tl.load(added_TC + at_C, mask=is_real_C, other=0.0), hidden_C)
        tl.store(sum_TC + at_C, hidden_C, mask=is_real_C)
    value_C = hidden_C.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value_C * value_C, 0) / SIZE + eps)
    normed_C = (value_C * scale).to(hidden_C.dtype)
    weight_here_C = tl.load(weight_C + c, mask=is_real_C, other=0.0)
    tl.store(output_TC + at_C, rounded_product(weight_here_C, normed_C, hidden_C), mask=is_real_C)


@triton.jit
def rotate_kernel(
    qkv_TX: tl.tensor,
    cos_TD: tl.tensor,
    sin_TD: tl.tensor,
    query_weight_D: tl.tensor,
    key_weight_D: tl.tensor,
    eps: tl.tensor,
    heads: tl.tensor,
    width: tl.tensor,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> None:
    """Normalise one head of one token if the model does, then rotate it, in place."""
    token, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, PADDED)
    is_real_D, at_D = d < HALF, token * width + head * 2 * HALF + d
    left_D = tl.load(qkv_TX + at_D, mask=is_real_D, other=0.0)
    right_D = tl.load(qkv_TX + at_D + HALF, mask=is_real_D, other=0.0)
    if HAS_NORM:
        a_D, b_D = left_D.to(tl.float32), right_D.to(tl.float32)
        scale = tl.rsqrt((tl.sum(a_D * a_D, 0) + tl.sum(b_D * b_D, 0)) / (2 * HALF) + eps)
        weight_D = query_weight_D
        if head >= heads:
            weight_D = key_weight_D
        left_weight_D = tl.load(weight_D + d, mask=is_real_D, other=0.0)
        right_weight_D = tl.load(weight_D + HALF + d, mask=is_real_D, other=0.0)
        left_D = rounded_product(left_weight_D, (a_D * scale).to(left_D.dtype), left_D)
        right_D = rounded_product(right_weight_D, (b_D * scale).to(right_D.dtype), right_D)
    angle_D = token * 2 * HALF + d
    left_cos_D = tl.load(cos_TD + angle_D, mask=is_real_D, other=0.0)
    right_cos_D = tl.load(cos_TD + angle_D + HALF, mask=is_real_D, other=0.0)
    left_sin_D = tl.load(sin_TD + angle_D, mask=is_real_D, other=0.0)
    right_sin_D = tl.load(sin_TD + angle_D + HALF, mask=is_real_D, other=0.0)
    negated_D = -right_D.to(tl.float32)
    new_left_D = rounded_sum(
        rounded_product(left_D, left_cos_D, left_D), rounded_product(negated_D, left_sin_D, left_D), left_D
    )
    new_right_D = rounded_sum(
        rounded_product(right_D, right_cos_D, left_D), rounded_product(left_D, right_sin_D, left_D), left_D
    )
    tl.store(qkv_TX + at_D, new_left_D, mask=is_real_D)
    tl.store(qkv_TX + at_D + HALF, new_right_D, mask=is_real_D)


@triton.jit
def swiglu_kernel(gate_up_TX: tl.tensor, output_TI: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Multiply one block of silu(gate) by up."""
    token, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real_I = i < SIZE
    gate_I = tl.load(gate_up_TX + token * 2 * SIZE + i, mask=is_real_I, other=0.0)
    up_I = tl.load(gate_up_TX + token * 2 * SIZE + SIZE + i, mask=is_real_I, other=0.0)
    value_I = gate_I.to(tl.float32)
    silu_I = (value_I / (1.0 + tl.exp(-value_I))).to(gate_I.dtype)
    tl.store(output_TI + token * SIZE + i, rounded_product(silu_I, up_I, gate_I), mask=is_real_I)


def rms_norm(hidden_TC: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMSNorm of hidden states, of any leading dimensions; all tensors are of one dtype and contiguous."""
    output_TC = torch.empty_like(hidden_TC)
    _start_norm(hidden_TC, None, weight_C, hidden_TC, output_TC, eps)
    return output_TC


def add_rms_norm(
    hidden_TC: torch.Tensor, added_TC: torch.Tensor, weight_C: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of two hidden states, and its RMSNorm. See `rms_norm`."""
    sum_TC, output_TC = torch.empty_like(hidden_TC), torch.empty_like(hidden_TC)
    _start_norm(hidden_TC, added_TC, weight_C, sum_TC, output_TC, eps)
    return sum_TC, output_TC


def _start_norm(
    hidden_TC: torch.Tensor,
    added_TC: torch.Tensor | None,
    weight_C: torch.Tensor,
    sum_TC: torch.Tensor,
    output_TC: torch.Tensor,
    eps: float,
) -> None:
    size = len(weight_C)
    norm_kernel[(hidden_TC.numel() // size,)](
        hidden_TC,
        added_TC,
        weight_C,
        sum_TC,
        output_TC,
        eps,
        SIZE=size,
        PADDED=power_of_two(size),
        HAS_ADDED=added_TC is not None,
        num_warps=warps(size),
    )


def warps(size: int) -> int:
    """Return the warps of a program that normalises *size* elements."""
    return 8 if size >= WIDE else 4


def rotate_(
    qkv_TX: torch.Tensor,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    heads: tuple[int, int],
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> None:
    """Rotate queries and keys in place, halves as pairs (the convention of `transformers`).

    Args:
        qkv_TX: each token's queries, keys and values, contiguous: `[T, (heads + 2 * kv_heads) * D]`.
        cos_TD, sin_TD: of each token's position, of the same dtype, contiguous.
        heads: of queries, and of keys.
        norms: weights `[D]` and epsilon of the RMSNorm of each head of the queries, and of the keys, that precedes.
    """
    tokens, size = cos_TD.shape
    query_weight_D, key_weight_D, eps = (None, None, 0.0) if norms is None else norms
    rotate_kernel[(tokens, sum(heads))](
        qkv_TX,
        cos_TD,
        sin_TD,
        query_weight_D,
        key_weight_D,
        eps,
        heads[0],
        qkv_TX.shape[1],
        HALF=size // 2,
        PADDED=power_of_two(size // 2),
        HAS_NORM=norms is not None,
        num_warps=1,
    )


def swiglu(gate_up_TX: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, `[T, I]`, of each token's gate and up values, contiguous: `[T, 2 * I]`."""
    tokens, size = gate_up_TX.shape[0], gate_up_TX.shape[1] // 2
    output_TI = gate_up_TX.new_empty(tokens, size)
    block = min(MOST, power_of_two(size))
    swiglu_kernel[(tokens, -(-size // block))](gate_up_TX, output_TI, SIZE=size, BLOCK=block)
    return output_TI
