"""Weights in fp8 with scales: per tensor, per row, or per block (DeepSeek-V3, Qwen3-FP8, FBGEMM, AutoFP8, ModelOpt).

`X.weight` is float8_e4m3fn `[O, I]`; its scale is a number, `[O]`, `[O, 1]`, or, with blocks of *a* x *b*,
`[ceil(O / a), ceil(I / b)]`. The value is the product of both. Scales in uint8 are powers of two as e8m0: the exponent
plus 127.
"""

from dataclasses import dataclass

import torch

from protos.errors import ModelError
from workers.quantization.weight import Code, QuantizedWeight, scales_of_blocks
from workers.weights.quantized.stored import DequantizedWeight, StoredTensors

SCALES = ("weight_scale_inv", "weight_scale")
"""Names of the scale. DeepSeek calls it an inverse, but multiplies by it."""


@dataclass(frozen=True)
class Fp8:
    """See the module. `block`: rows and columns that share a scale; None: a scale per tensor or row."""

    block: tuple[int, int] | None

    def find(self, name: str, tensors: StoredTensors) -> DequantizedWeight | None:
        """See `QuantizedFormat`. Raises `ModelError` if an fp8 weight has no scale."""
        module, _, key = name.rpartition(".")
        if key != "weight" or name not in tensors or not tensors.dtype(name).startswith("F8"):
            return None
        scale = next((f"{module}.{key}" for key in SCALES if f"{module}.{key}" in tensors), None)
        if scale is None:
            raise ModelError(f"{name} is stored in fp8, but the checkpoint has no {module}.{SCALES[0]}")
        return DequantizedWeight(
            name,
            tensors.shape(name),
            lambda: self._scaled(tensors.read(name), tensors.read(scale), scale),
            lambda: self._codes(tensors.read(name), tensors.read(scale), scale),
        )

    def _codes(self, values_OI: torch.Tensor, scale: torch.Tensor, name: str) -> QuantizedWeight | None:
        if values_OI.dtype != torch.float8_e4m3fn:
            return None
        outputs, inputs = values_OI.shape
        if self.block is not None and scale.ndim == 2:
            _check_blocks(scale, (outputs, inputs), self.block, name)
            scales_OG, group = scales_of_blocks(_as_float(scale), self.block, (outputs, inputs))
            return QuantizedWeight(Code.FP8, values_OI, scales_OG, None, group)
        _check_rows(scale, outputs, name)
        scales_O1 = _as_float(scale).reshape(-1, 1).expand(outputs, 1).contiguous()
        return QuantizedWeight(Code.FP8, values_OI, scales_O1, None, inputs)

    def _scaled(self, values_OI: torch.Tensor, scale: torch.Tensor, name: str) -> torch.Tensor:
        scale = _as_float(scale)
        if self.block is not None and scale.ndim == 2:
            return values_OI.float() * _per_value(scale, tuple(values_OI.shape), self.block, name)
        _check_rows(scale, len(values_OI), name)
        return values_OI.float() * scale.reshape(-1, 1)


def _as_float(scale: torch.Tensor) -> torch.Tensor:
    return (scale.float() - 127).exp2() if scale.dtype == torch.uint8 else scale.float()


def _per_value(scale: torch.Tensor, shape: tuple[int, ...], block: tuple[int, int], name: str) -> torch.Tensor:
    """Return the scale of each value. Raises `ModelError` if there are not as many as blocks."""
    _check_blocks(scale, shape, block, name)
    rows, columns = block
    return scale.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]


def _check_rows(scale: torch.Tensor, rows: int, name: str) -> None:
    if scale.numel() not in {1, rows}:
        raise ModelError(f"{name} has {scale.numel()} scales for {rows} rows; expected one, or one a row")


def _check_blocks(scale: torch.Tensor, shape: tuple[int, ...], block: tuple[int, int], name: str) -> None:
    wanted = tuple(-(-size // each) for size, each in zip(shape, block, strict=True))
    if tuple(scale.shape) != wanted:
        raise ModelError(
            f"{name} is {list(scale.shape)}, but blocks of {list(block)} in {list(shape)} make {list(wanted)}"
        )
