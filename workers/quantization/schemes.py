"""Quantising weights: int8 and fp8 with a scale for each output, int4 with a scale and a zero point for each group."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from workers.quantization.weight import Code, QuantizedWeight

INT8_TOP, INT4_TOP, FP8_TOP = 127, 15, 448.0
GROUP = 128
TINY = torch.finfo(torch.float32).tiny


def int8(weight_NK: torch.Tensor) -> QuantizedWeight:
    """Quantise a weight `[N, K]` symmetrically."""
    weight_NK = weight_NK.float()
    scales_N1 = (weight_NK.abs().amax(1, keepdim=True) / INT8_TOP).clamp(min=TINY)
    codes_NK = (weight_NK / scales_N1).round().to(torch.int8)
    return QuantizedWeight(Code.INT8, codes_NK, scales_N1, None, weight_NK.shape[1])


def fp8(weight_NK: torch.Tensor) -> QuantizedWeight:
    """Quantise a weight `[N, K]` to float8_e4m3fn."""
    weight_NK = weight_NK.float()
    scales_N1 = (weight_NK.abs().amax(1, keepdim=True) / FP8_TOP).clamp(min=TINY)
    codes_NK = (weight_NK / scales_N1).clamp(-FP8_TOP, FP8_TOP).to(torch.float8_e4m3fn)
    return QuantizedWeight(Code.FP8, codes_NK, scales_N1, None, weight_NK.shape[1])


def int4(weight_NK: torch.Tensor, group: int = GROUP) -> QuantizedWeight:
    """Quantise a weight `[N, K]` in groups of *group* inputs, between the smallest and the largest of each."""
    weight_NK = weight_NK.float()
    inputs = weight_NK.shape[1]
    grouped_NGI = F.pad(weight_NK, (0, -inputs % group)).view(len(weight_NK), -1, group)
    low_NG1 = grouped_NGI.amin(2, keepdim=True).clamp(max=0)
    high_NG1 = grouped_NGI.amax(2, keepdim=True).clamp(min=0)
    scales_NG1 = ((high_NG1 - low_NG1) / INT4_TOP).clamp(min=TINY)
    zeros_NG1 = (-low_NG1 / scales_NG1).round().clamp(0, INT4_TOP)
    codes_NGI = (grouped_NGI / scales_NG1 + zeros_NG1).round().clamp(0, INT4_TOP).to(torch.uint8)
    return QuantizedWeight(
        Code.INT4,
        codes_NGI.flatten(1)[:, :inputs].contiguous(),
        scales_NG1.squeeze(2),
        zeros_NG1.squeeze(2).to(torch.uint8),
        group,
    )


SCHEMES: Mapping[str, Callable[[torch.Tensor], QuantizedWeight]] = {"int8": int8, "int4": int4, "fp8": fp8}
"""By the value of `quantization`."""
