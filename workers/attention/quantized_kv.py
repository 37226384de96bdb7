"""8-bit K and V: `int8`, or `fp8` (E4M3), with one scale for each token and K/V head.

The scale is computed from the head's own numbers when they are written. So what is stored of a token depends on nothing
but its K and V: not on the other tokens of its block or batch, nor on the order in which tokens arrive. That is what
keeps the output the same with and without speculation. A scale for each block or layer would have to be known before
the first token is written, or change stored numbers later.

`workers/native/quantized_kv.h` stores the same bits, but for the many bits of NaN.
"""

from typing import NamedTuple

import torch

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The quantised dtypes, and the largest number that each stores."""
SCALE_DTYPE = torch.bfloat16
"""With two bytes, a head of 64 numbers takes 66 bytes instead of 128. fp16 would underflow for small K or V."""
SMALLEST_SCALE = 2.0**-100
"""So that the inverse is finite. Heads of zeros have it."""


class Quantized(NamedTuple):
    """Numbers `[..., X]` divided by scales `[...]` and rounded. A scale is NaN where a number was NaN or infinite."""

    stored: torch.Tensor
    scales: torch.Tensor


def quantize(numbers_NX: torch.Tensor, dtype: torch.dtype) -> Quantized:
    """Quantise vectors `[..., X]` of any floating dtype, each with a scale of its own."""
    numbers_NX = numbers_NX.float()
    largest_N1 = numbers_NX.abs().amax(-1, keepdim=True)
    is_finite_N1 = largest_N1.isfinite()
    scales_N1 = _rounded_up((largest_N1 * (1.0 / LARGEST[dtype])).clamp(min=SMALLEST_SCALE))
    scaled_NX = torch.where(is_finite_N1, numbers_NX * scales_N1.reciprocal(), 0.0)
    stored_NX = (scaled_NX.round() if dtype == torch.int8 else scaled_NX).to(dtype)
    scales_N1 = torch.where(is_finite_N1, scales_N1, torch.nan)
    return Quantized(stored_NX, scales_N1.to(SCALE_DTYPE).squeeze(-1))


def dequantize(stored_NX: torch.Tensor, scales_N: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers, rounded once to *dtype*."""
    exact = torch.float32 if dtype == torch.float16 else dtype  # fp16 does not hold every scale
    return (stored_NX.to(exact) * scales_N.to(exact).unsqueeze(-1)).to(dtype)


def _rounded_up(scales: torch.Tensor) -> torch.Tensor:
    """Round positive fp32 numbers up to `SCALE_DTYPE`: rounded down, the largest number would not fit."""
    return ((scales.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
