"""Access to the tensors of a checkpoint, and a weight that is stored quantised."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from protos.errors import ModelError
from workers.quantization.weight import QuantizedWeight

ERRORS = (RuntimeError, ValueError, LookupError, TypeError, AssertionError)
"""What reading damaged or missing parts raises, in libraries, too."""

PARTS = ("weight", "weight_scale_inv", "weight_scale", "weight_zero_point", "weight_packed", "weight_shape",
         "weight_global_scale", "weight_g_idx", "qweight", "qzeros", "scales", "g_idx")  # fmt: skip
"""What formats store for one module."""


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of an open checkpoint. `files`: the open file of each; see `open_file`."""

    files: Mapping[str, Any]

    def __contains__(self, name: object) -> bool:
        return name in self.files

    def slice_of(self, name: str) -> Any:
        """Return the `PySafeSlice` or `SavedSlice` of a tensor, which reads parts of it."""
        return self.files[name].get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return tuple(self.slice_of(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor, as safetensors names it: "F32", "F8_E4M3", ..."""
        return str(self.slice_of(name).get_dtype())

    def read(self, name: str) -> torch.Tensor:
        """Return a whole tensor. Raises `ModelError` if the checkpoint has none of that name."""
        if name not in self.files:
            raise ModelError(f"the quantised checkpoint lacks {name}")
        tensor: torch.Tensor = self.files[name].get_tensor(name)
        return tensor


@dataclass(frozen=True)
class DequantizedWeight:
    """A `StoredWeight` whose values are computed when it is read.

    Attributes:
        name: for messages.
        shape: of the values.
        dequantize: computes all of them.
        codes: returns the stored numbers; None where they have no form in which a layer computes with them.
        expert: returns one of several experts `[N, K]` that are stored as one weight; None: it is not of experts.
    """

    name: str
    shape: tuple[int, ...]
    dequantize: Callable[[], torch.Tensor]
    codes: Callable[[], QuantizedWeight | None] = lambda: None
    expert: "Callable[[int], DequantizedWeight] | None" = None

    def read(self, dim: int, start: int, stop: int) -> torch.Tensor:
        """See `StoredWeight`. Raises `ModelError` if the tensors do not fit together."""
        return self._values.narrow(dim, start, stop - start).contiguous()

    def quantized(self) -> QuantizedWeight | None:
        """Return the numbers as they are stored; None if only their values can be computed with.

        Raises:
            ModelError: the tensors do not fit together.
        """
        try:
            weight = self.codes()
        except ERRORS as error:
            raise ModelError(f"{self.name} cannot be read: {' '.join(str(error).split())[:300]}") from error
        if weight is None or not weight.is_suitable:
            return None
        if weight.shape != self.shape or not weight.is_complete:
            raise ModelError(f"{self.name} is {list(self.shape)}, but its parts do not fit: {weight.described}")
        return weight

    @cached_property
    def _values(self) -> torch.Tensor:
        try:
            values = self.dequantize()
        except ERRORS as error:
            raise ModelError(f"{self.name} cannot be dequantised: {' '.join(str(error).split())[:300]}") from error
        if values.shape != self.shape:
            raise ModelError(f"{self.name} is dequantised to {list(values.shape)}, but should be {list(self.shape)}")
        return values


class QuantizedFormat(Protocol):
    """How one method of quantisation stores weights."""

    def find(self, name: str, tensors: StoredTensors) -> DequantizedWeight | None:
        """Return the weight *name* (a parameter's full name); None if it is not stored quantised."""
        ...


def parts_of(name: str, tensors: StoredTensors) -> list[str]:
    """Return the tensors that a quantised weight *name* is stored as."""
    module = name.rpartition(".")[0]
    possible = (*(f"{module}.{part}" for part in PARTS), f"{name}_blocks", f"{name}_scales")
    return [part for part in possible if part in tensors]
