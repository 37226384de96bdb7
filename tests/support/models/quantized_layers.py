"""The values of quantised layers, read back from the layout of the kernel by arithmetic of its own."""

import torch
from torch import nn

from workers.quantization.linear import QuantizedLinear
from workers.quantization.weight import Code, QuantizedWeight


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of *model* by name, those of quantised layers as the values that they mean."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}
    parts = {f"{name}.{key}" for name in layers for key in ("codes", "scales", "zeros")}
    found: dict[str, torch.Tensor] = {name: weight for name, weight in model.named_parameters() if name not in parts}
    return found | {f"{name}.weight": values(layer) for name, layer in layers.items()}


def values(layer: QuantizedLinear) -> torch.Tensor:
    """Return the weight `[N, K]` of *layer*, float32."""
    codes = layer.codes.detach()
    if layer.code is Code.INT4:
        codes = torch.cat([codes & 15, codes >> 4], -1)
    numbers = {Code.INT8: torch.int8, Code.INT4: torch.uint8, Code.FP8: torch.float8_e4m3fn}[layer.code]
    weight_NK = codes.transpose(1, 2).flatten(2).flatten(0, 1).view(numbers).float()[:, : layer.in_features]
    groups_K = torch.arange(layer.in_features) // layer.group
    scales_NG, zeros_NG = (
        numbers.transpose(1, 2).flatten(0, 1).float() if numbers is not None else torch.zeros(len(weight_NK), 1)
        for numbers in (layer.scales.detach(), layer.zeros)
    )
    if zeros_NG.shape[1] == scales_NG.shape[1]:
        weight_NK = weight_NK - zeros_NG[:, groups_K]
    return (weight_NK * scales_NG[:, groups_K])[: layer.out_features]


def dequantized(weight: QuantizedWeight) -> torch.Tensor:
    """Return the values that *weight* means, float32 `[N, K]`."""
    groups_K = torch.arange(weight.shape[1]) // weight.group
    codes_NK = weight.codes_NK.float()
    if weight.zeros_NG is not None:
        codes_NK = codes_NK - weight.zeros_NG.float()[:, groups_K]
    return codes_NK * weight.scales_NG[:, groups_K]
