"""GPTQ weights (Frantar et al. 2022) as AutoGPTQ and GPTQModel store them.

`X.qweight` int32 `[I * bits / 32, O]` packs consecutive inputs into one integer, lowest bits first; `X.qzeros` int32
`[G, O * bits / 32]` packs consecutive outputs; `X.scales` `[G, O]`; `X.g_idx` int32 `[I]` is the group of each input
(without it, groups are consecutive). Zero points are stored less one, except by the format "gptq_v2"; one is taken from
all zero points of an integer in one subtraction, which borrows across them.
"""

from dataclasses import dataclass

import torch

from workers.quantization.weight import Code, QuantizedWeight
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
        shape = outputs, rows * 32 // self.bits
        return DequantizedWeight(
            name, shape, lambda: self._values(module, tensors), lambda: self._codes(module, tensors)
        )

    def _values(self, module: str, tensors: StoredTensors) -> torch.Tensor:
        weight_IO, zeros_GO, scales_GO, group_I = self._parts(module, tensors)
        return ((weight_IO - zeros_GO[group_I]) * scales_GO[group_I]).T

    def _codes(self, module: str, tensors: StoredTensors) -> QuantizedWeight | None:
        """2 bits become 4. 8 bits need zero points in the middle; groups have to be consecutive."""
        weight_IO, zeros_GO, scales_GO, group_I = self._parts(module, tensors)
        inputs = len(weight_IO)
        group = self.group_size if self.group_size > 0 else inputs
        middle = 1 << self.bits - 1
        if not torch.equal(group_I, torch.arange(inputs) // group) or (self.bits == 8 and (zeros_GO != middle).any()):
            return None
        scales_OG = scales_GO.T.contiguous()
        if self.bits == 8:
            codes_OI = (weight_IO.T - middle).to(torch.int8).contiguous()
            return QuantizedWeight(Code.INT8, codes_OI, scales_OG, None, group)
        codes_OI, zeros_OG = (numbers.T.to(torch.uint8).contiguous() for numbers in (weight_IO, zeros_GO))
        return QuantizedWeight(Code.INT4, codes_OI, scales_OG, zeros_OG, group)

    def _parts(
        self, module: str, tensors: StoredTensors
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the integers `[I, O]`, zero points and scales `[G, O]`, and the group of each input."""
        weight_IO = self._unpacked(tensors.read(f"{module}.qweight").T).T
        ones = 0xFFFFFFFF // ((1 << self.bits) - 1)
        zeros_GO = self._unpacked(tensors.read(f"{module}.qzeros") + self.zero_shift * ones)
        scales_GO = tensors.read(f"{module}.scales").float()
        return weight_IO, zeros_GO, scales_GO, self._groups(f"{module}.g_idx", tensors, len(weight_IO))

    def _groups(self, name: str, tensors: StoredTensors, inputs: int) -> torch.Tensor:
        if name in tensors:
            return tensors.read(name).long()
        return torch.arange(inputs) // (self.group_size if self.group_size > 0 else inputs)

    def _unpacked(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the integers packed in the last dimension of int32 `[N, M]`: `[N, M * 32 / bits]`."""
        shifts = torch.arange(0, 32, self.bits)
        return (packed[..., None] >> shifts & (1 << self.bits) - 1).flatten(1)
