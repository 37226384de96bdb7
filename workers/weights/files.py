"""Files with weights: safetensors, or what torch saved, which is read without running what is pickled in it."""

import pickle
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from protos.errors import ModelError

SAFE = ".safetensors"
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""What safetensors calls them."""


def open_file(path: Path) -> AbstractContextManager[Any]:
    """Open a file: return what `safe_open` of safetensors returns, or a `SavedFile`.

    Raises:
        ModelError: it is damaged, or holds more than tensors.
    """
    if path.suffix != SAFE:
        return nullcontext(SavedFile(load_saved(path)))
    try:
        opened: AbstractContextManager[Any] = safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return opened


@dataclass(frozen=True)
class SavedSlice:
    """A tensor that torch saved, as safetensors' `PySafeSlice`."""

    tensor: torch.Tensor

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return [*self.tensor.shape]

    def get_dtype(self) -> str:
        """Return the dtype, as safetensors names it."""
        return DTYPES.get(self.tensor.dtype, str(self.tensor.dtype))

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return a copy of a part."""
        return self.tensor[index].clone()


@dataclass(frozen=True)
class SavedFile:
    """What torch saved in one file, with the methods of an open safetensors file."""

    tensors: Mapping[str, torch.Tensor]

    def keys(self) -> list[str]:
        """Return the names of all tensors."""
        return [*self.tensors]

    def get_slice(self, name: str) -> SavedSlice:
        """Return a tensor of which parts can be read."""
        return SavedSlice(self.tensors[name])

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor."""
        return self.tensors[name].clone()


def load_saved(path: Path) -> Mapping[str, torch.Tensor]:
    """Return the tensors in a file of `torch.save`, by name; they are mapped into memory where the format allows it.

    Raises:
        ModelError: it is damaged, or holds more than tensors by name.
    """
    content = _load(path)
    if not isinstance(content, Mapping):
        raise ModelError(f"{path} holds a {type(content).__name__}, not tensors by name")
    for name, tensor in content.items():
        if not isinstance(tensor, torch.Tensor):
            raise ModelError(f"{path}: {name} is a {type(tensor).__name__}, not a tensor")
    return {str(name): tensor for name, tensor in content.items()}


def _load(path: Path) -> Any:
    """Read a file of `torch.save`; the old format cannot be mapped into memory, and is read at once."""
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{path} holds more than tensors, which would run code when loaded, or is damaged: it is not read"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
