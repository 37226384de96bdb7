"""GPTQ weights (Frantar et al. 2022) as AutoGPTQ and GPTQModel store them.

`X.qweight` int32 `[I * bits / 32, O]` packs consecutive inputs into one integer, lowest bits first; `X.qzeros` int32
`[G, O * bits / 32]` packs consecutive outputs; `X.scales` `[G, O]`; `X.g_idx` int32 `[I]` is the group of each input
(without it, groups are consecutive). Zero points are stored less one, except by the format "gptq_v2"; one is taken from
all zero points of an integer in one subtraction, which borrows across them.
"""

from dataclasses import dataclass

import torch

from workers.weights.quantized.stored import DequantizedWeight, StoredTensors


@dataclass(frozen=True)
class Gptq:
    """See the module. *zero_shift* is added to stored zero points; *group_size* counts inputs, -1: all."""

    bits: int
    group_size: int
    zero_shift: int

    def find(self, name: str, tensors: StoredTensors) -> DequantizedWeight | None:
        """See `QuantizedFormat`."""
        module, _, key = name.rpartition(".")
        packed = f"{module}.qweight"
        if key != "weight" or packed not in tensors:
            return None
        rows, outputs = tensors.shape(packed)
        return DequantizedWeight(name, (outputs, rows * 32 // self.bits), lambda: self._values(module, tensors))

    def _values(self, module: str, tensors: StoredTensors) -> torch.Tensor:
        weight_IO = self._unpacked(tensors.read(f"{module}.qweight").T).T
        ones = 0xFFFFFFFF // ((1 << self.bits) - 1)
        zeros_GO = self._unpacked(tensors.read(f"{module}.qzeros") + self.zero_shift * ones)
        scales_GO = tensors.read(f"{module}.scales").float()
        group_I = self._groups(f"{module}.g_idx", tensors, len(weight_IO))
        return ((weight_IO - zeros_GO[group_I]) * scales_GO[group_I]).T

    def _groups(self, name: str, tensors: StoredTensors, inputs: int) -> torch.Tensor:
        if name in tensors:
            return tensors.read(name).long()
        return torch.arange(inputs) // (self.group_size if self.group_size > 0 else inputs)

    def _unpacked(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the integers packed in the last dimension of int32 `[N, M]`: `[N, M * 32 / bits]`."""
        shifts = torch.arange(0, 32, self.bits)
        return (packed[..., None] >> shifts & (1 << self.bits) - 1).flatten(1)
