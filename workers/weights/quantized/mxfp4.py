"""Experts in mxfp4 (OCP Microscaling), as gpt-oss is published.

`X_blocks` uint8 `[E, O, I / 32, 16]` holds two 4-bit numbers a byte, and `X_scales` uint8 `[E, O, I / 32]` an exponent
for each 32. The model's parameter X is `[E, I, O]`.
"""

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from workers.weights.quantized.stored import DequantizedWeight, StoredTensors


class Mxfp4:
    """See the module."""

    def find(self, name: str, tensors: StoredTensors) -> DequantizedWeight | None:
        """See `QuantizedFormat`."""
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        if blocks not in tensors:
            return None
        experts, outputs, groups, width = tensors.shape(blocks)
        return DequantizedWeight(
            name, (experts, groups * width * 2, outputs), lambda: _values(tensors.read(blocks), tensors.read(scales))
        )


def _values(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    values_EIO: torch.Tensor = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)  # which is exact
    return values_EIO
