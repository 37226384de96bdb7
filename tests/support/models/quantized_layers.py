"""The values of quantised layers, read back from the layout of the kernel by arithmetic of its own."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.support.models.quantized import FP4
from workers.quantization.experts import StackedLinear
from workers.quantization.layout import LaidOut
from workers.quantization.linear import QuantizedLinear
from workers.quantization.schemes import SCHEMES
from workers.quantization.weight import Code, QuantizedWeight

UNTOUCHED = ("embed_tokens.weight", "gate.weight", "router.weight", "_bias")
"""Ends of the names of weights that are not quantised: embeddings, routers, and biases of experts."""

DTYPES = {Code.INT8: torch.int8, Code.INT4: torch.uint8, Code.FP8: torch.float8_e4m3fn}


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of *model* by name, those of quantised layers as the values that they mean.

    Experts are `[E, N, K]`, also where the model's own are transposed.
    """
    kinds = QuantizedLinear | StackedLinear
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, kinds)}
    parts = {f"{name}.{key}" for name in layers for key in ("codes", "scales", "zeros")}
    found: dict[str, torch.Tensor] = {name: weight for name, weight in model.named_parameters() if name not in parts}
    for name, layer in layers.items():
        if isinstance(layer, QuantizedLinear):
            found[f"{name}.weight"] = values(layer)
        else:
            found[name] = stacked_values(layer)
    return found


def meant(plain: Path, name: str, folder: Path) -> Path:
    """Write the values that *plain* has once it is quantised as *name* into a checkpoint of their own."""
    stored = load_file(plain / "model.safetensors")
    for key, weight in stored.items():
        if weight.ndim > 1 and not key.endswith(UNTOUCHED):
            stored[key] = _meant(SCHEMES["int8" if key.startswith("lm_head") else name], weight)
    folder.mkdir()
    (folder / "config.json").write_bytes((plain / "config.json").read_bytes())
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return folder


def _meant(scheme: Callable[[torch.Tensor], QuantizedWeight], weight: torch.Tensor) -> torch.Tensor:
    """Experts that are stored as one tensor have their inputs first (gpt-oss)."""
    if weight.ndim == 2:
        return dequantized(scheme(weight))
    return torch.stack([dequantized(scheme(expert_IO.T)).T for expert_IO in weight]).contiguous()


def values(layer: QuantizedLinear) -> torch.Tensor:
    """Return the weight `[N, K]` of *layer*, float32."""
    return _values(layer, layer.laid_out)


def stacked_values(layer: StackedLinear) -> torch.Tensor:
    """Return the weights `[E, N, K]` of *layer*, float32."""
    weights = layer.laid_out
    zeros = weights.zeros
    each = (
        LaidOut(weights.codes[e], weights.scales[e], None if zeros is None else zeros[e])
        for e in range(len(weights.codes))
    )
    return torch.stack([_values(layer, weight) for weight in each])


def _values(layer: QuantizedLinear | StackedLinear, weight: LaidOut) -> torch.Tensor:
    codes = weight.codes.detach()
    if layer.code in {Code.INT4, Code.FP4}:
        codes = torch.cat([codes & 15, codes >> 4], -1)
    codes_NK = codes.transpose(1, 2).flatten(2).flatten(0, 1)
    weight_NK = _numbers(layer.code, codes_NK)[:, : layer.in_features]
    groups_K = torch.arange(layer.in_features) // layer.group
    scales_NG = weight.scales.detach().transpose(1, 2).flatten(0, 1)
    if weight.zeros is not None:
        weight_NK = weight_NK - weight.zeros.transpose(1, 2).flatten(0, 1).float()[:, groups_K]
    return (weight_NK * _factors(scales_NG)[:, groups_K])[: layer.out_features]


def dequantized(weight: QuantizedWeight) -> torch.Tensor:
    """Return the values that *weight* means, float32 `[N, K]`."""
    groups_K = torch.arange(weight.shape[1]) // weight.group
    codes_NK = _numbers(weight.code, weight.codes_NK)
    if weight.zeros_NG is not None:
        codes_NK = codes_NK - weight.zeros_NG.float()[:, groups_K]
    return codes_NK * _factors(weight.scales_NG)[:, groups_K]


def _numbers(code: Code, codes_NK: torch.Tensor) -> torch.Tensor:
    if code is Code.FP4:
        return torch.cat([FP4, -FP4])[codes_NK.long()]
    return codes_NK.view(DTYPES[code]).float()


def _factors(scales_NG: torch.Tensor) -> torch.Tensor:
    return torch.exp2(scales_NG.float() - 127) if scales_NG.dtype == torch.uint8 else scales_NG
