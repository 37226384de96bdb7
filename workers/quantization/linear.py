"""A linear layer over a quantised weight, and an embedding over the same weight."""

import torch
from torch import nn

from workers.quantization.operators import linear
from workers.quantization.weight import Code, LaidOut, QuantizedWeight, lay_out


class QuantizedLinear(nn.Module):
    """Takes the place of `nn.Linear`. `bias`: `[N]`, in the dtype of inputs, or None; it may be set later.

    Products and sums are fp32. The results for a row depend on no other row, to the bit.
    """

    zeros: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, weight: QuantizedWeight, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.code, self.group = weight.code, weight.group
        laid_out = lay_out(weight)
        self.codes, self.scales = frozen(laid_out.codes), frozen(laid_out.scales)
        self.register_parameter("zeros", None if laid_out.zeros is None else frozen(laid_out.zeros))
        self.register_parameter("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[..., N]` for `[..., K]`."""
        return linear(x, self.laid_out, self.bias, self.out_features, self.group, self.code)

    @property
    def laid_out(self) -> LaidOut:
        """The weight."""
        return LaidOut(self.codes, self.scales, self.zeros)

    def extra_repr(self) -> str:
        """Describe it."""
        return f"{self.in_features}, {self.out_features}, {self.code.name.lower()}, group={self.group}"


class QuantizedEmbedding(nn.Module):
    """Takes the place of an `nn.Embedding` whose weight is that of *head*, in int8. Embeddings are of *dtype*."""

    def __init__(self, head: QuantizedLinear, dtype: torch.dtype) -> None:
        super().__init__()
        assert head.code is Code.INT8 and head.scales.shape[1] == 1, "one scale a row"
        self.num_embeddings, self.embedding_dim, self._dtype = head.out_features, head.in_features, dtype
        self.codes, self.scales = head.codes, head.scales

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return `[..., H]`."""
        return _rows(self.codes, self.scales, ids)[..., : self.embedding_dim].to(self._dtype)


def _rows(codes: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    panel, row = ids // codes.shape[2], ids % codes.shape[2]
    found = codes.view(torch.int8).transpose(1, 2)[panel, row].flatten(-2).float()
    return found * scales[panel, 0, row].unsqueeze(-1)


def frozen(tensor: torch.Tensor) -> nn.Parameter:
    """Return *tensor* as a parameter that is not trained, of whatever dtype."""
    return nn.Parameter(tensor, requires_grad=False)
