"""Experts in mxfp4 (OCP Microscaling), as gpt-oss is published.

`X_blocks` uint8 `[E, O, I / 32, 16]` holds two 4-bit numbers a byte, and `X_scales` uint8 `[E, O, I / 32]` an exponent
for each 32. The model's parameter X is `[E, I, O]`.
"""

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from workers.quantization.weight import QuantizedWeight
from workers.weights.quantized.stored import DequantizedWeight, StoredTensors

GROUP = 32


class Mxfp4:
    """See the module."""

    def find(self, name: str, tensors: StoredTensors) -> DequantizedWeight | None:
        """See `QuantizedFormat`."""
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        if blocks not in tensors:
            return None
        experts, outputs, groups, width = tensors.shape(blocks)
        return DequantizedWeight(
            name,
            (experts, groups * width * 2, outputs),
            lambda: _values(tensors.read(blocks), tensors.read(scales)),
            expert=lambda number: _expert(name, number, tensors),
        )


def _values(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    values_EIO: torch.Tensor = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)  # which is exact
    return values_EIO


def _expert(name: str, number: int, tensors: StoredTensors) -> DequantizedWeight:
    """Return one expert, `[O, I]`. No other is read."""
    _, outputs, groups, width = tensors.shape(f"{name}_blocks")

    def part(key: str) -> torch.Tensor:
        read: torch.Tensor = tensors.slice_of(f"{name}_{key}")[number : number + 1]
        return read

    return DequantizedWeight(
        f"expert {number} of {name}",
        (outputs, groups * width * 2),
        lambda: _values(part("blocks"), part("scales"))[0].T,
        lambda: QuantizedWeight.of_mxfp4(part("blocks")[0], part("scales")[0], GROUP),
    )
