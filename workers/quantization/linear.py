"""A linear layer over a quantised weight, and an embedding over the same weight."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from workers.quantization.layer import QuantizedLayer
from workers.quantization.layout import lay_out, rows_of
from workers.quantization.products import LinearOnCpu, linear, runs_on_cpu
from workers.quantization.weight import Code, QuantizedWeight


class QuantizedLinear(QuantizedLayer):
    """Takes the place of `nn.Linear`. `bias`: `[N]`, in the dtype of inputs, or None; it may be set later.

    Products and sums are fp32. The results for a row depend on no other row, to the bit. On GPUs products of many rows
    may differ from those of few in the last bits (`workers.gpu.kernels.quantized`).
    """

    bias: nn.Parameter | None

    def __init__(self, weight: QuantizedWeight, bias: nn.Parameter | None = None) -> None:
        super().__init__(weight, lay_out(weight))
        self.register_parameter("bias", bias)
        self._on_cpu: LinearOnCpu | None = None  # made by the first call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[..., N]` for `[..., K]`."""
        if runs_on_cpu(x):
            if self._on_cpu is None:
                self._on_cpu = LinearOnCpu(self.laid_out, self.bias, self.out_features, self.group, self.code)
            return self._on_cpu(x)
        return linear(x, self.laid_out, self.bias, self.out_features, self.group, self.code)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a parameter is used from the next call on."""
        if isinstance(value, nn.Parameter):
            self._on_cpu = None
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        self._on_cpu = None
        moved: Self = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return moved


class QuantizedEmbedding(nn.Module):
    """Takes the place of an `nn.Embedding` whose weight is that of *head*, in int8. Embeddings are of *dtype*."""

    def __init__(self, head: QuantizedLinear, dtype: torch.dtype) -> None:
        super().__init__()
        assert head.code is Code.INT8 and head.scales.shape[-2] == 1, "one scale a row"
        self.num_embeddings, self.embedding_dim, self._dtype = head.out_features, head.in_features, dtype
        self.codes, self.scales = head.codes, head.scales

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return `[..., H]`."""
        return rows_of(self.codes, self.scales, ids)[..., : self.embedding_dim].to(self._dtype)
