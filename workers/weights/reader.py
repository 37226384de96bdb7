"""Reads slices of weights from a checkpoint, by the names of the model's parameters.

Only requested slices are read, so a rank never holds more than its shard; quantised weights are dequantised one by one.
Some names in checkpoints differ from the model's: with or without the base model's prefix, or with a wrapper's, and
experts or convolutions stored one by one that are one tensor in the model.
"""

import re
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError

from protos.errors import ModelError
from workers.quantization.weight import QuantizedWeight
from workers.weights.files import open_file
from workers.weights.hub import weight_files
from workers.weights.quantized.formats import format_of
from workers.weights.quantized.stored import DequantizedWeight, QuantizedFormat, StoredTensors, parts_of
from workers.weights.renaming import Renaming, read_renaming
from workers.weights.wrapped import PREFIXES

if TYPE_CHECKING:
    from workers.weights.partition import TensorSlice

EXPERTS = re.compile(r"(?P<experts>.*\.experts)\.(?P<weight>gate_up_proj|up_proj|down_proj)")
ROWS_COMPARED = 4096
CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")
"""Stored parts of a weight `conv1d`, in order."""


class StoredWeight(Protocol):
    """One weight of the model in the checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its whole shape."""
        ...

    def read(self, dim: int, start: int, stop: int) -> torch.Tensor:
        """Return the rows *start* to *stop* of dimension *dim*; of a number, itself."""
        ...

    def quantized(self) -> QuantizedWeight | None:
        """Return the numbers as they are stored; None if its values alone can be computed with."""
        ...


@dataclass(frozen=True)
class PlainWeight:
    """A weight that is stored as one tensor. `tensor` is its `PySafeSlice`, or a `SavedSlice`."""

    tensor: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """See `StoredWeight`."""
        return tuple(self.tensor.get_shape())

    def read(self, dim: int, start: int, stop: int) -> torch.Tensor:
        """See `StoredWeight`."""
        index = (*(slice(None),) * dim, slice(start, stop)) if self.shape else ...
        part: torch.Tensor = self.tensor[index]
        return part.contiguous()  # columns may be a view of the mapped file, which would keep all of it in memory

    def quantized(self) -> QuantizedWeight | None:
        """See `StoredWeight`."""
        return None


@dataclass(frozen=True)
class JoinedRows:
    """The rows of several weights, one after another."""

    parts: Seq[StoredWeight]

    @property
    def shape(self) -> tuple[int, ...]:
        """See `StoredWeight`."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    def read(self, dim: int, start: int, stop: int) -> torch.Tensor:
        """See `StoredWeight`."""
        if dim > 0:
            return torch.cat([part.read(dim, start, stop) for part in self.parts])
        found = []
        offset = 0
        for part in self.parts:
            rows = part.shape[0]
            first, last = max(start - offset, 0), min(stop - offset, rows)
            if first < last:
                found.append(part.read(0, first, last))
            offset += rows
        return torch.cat(found)

    def quantized(self) -> QuantizedWeight | None:
        """See `StoredWeight`."""
        first, *others = (part.quantized() for part in self.parts)
        for other in others:
            first = None if first is None or other is None else first.joined(other)
        return first


@dataclass(frozen=True)
class StackedExperts:
    """Experts stored one by one, each as consecutive parts: `parts_EP[e][p]`."""

    parts_EP: Seq[Seq[StoredWeight]]

    @property
    def shape(self) -> tuple[int, ...]:
        """See `StoredWeight`."""
        first = [part.shape for part in self.parts_EP[0]]
        return (len(self.parts_EP), sum(shape[0] for shape in first), *first[0][1:])

    def read(self, dim: int, start: int, stop: int) -> torch.Tensor:
        """See `StoredWeight`."""
        if dim == 0:
            return torch.stack([JoinedRows(parts).read(0, 0, self.shape[1]) for parts in self.parts_EP[start:stop]])
        return torch.stack([JoinedRows(parts).read(dim - 1, start, stop) for parts in self.parts_EP])

    def quantized(self) -> QuantizedWeight | None:
        """See `StoredWeight`."""
        return None


@dataclass(frozen=True)
class OneExpert:
    """One of the experts that are stored as one tensor, as a weight `[N, K]`; *outputs*: the dimension of N in it."""

    stored: StoredWeight
    number: int
    outputs: int

    @property
    def shape(self) -> tuple[int, ...]:
        """See `StoredWeight`."""
        return self.stored.shape[self.outputs], self.stored.shape[3 - self.outputs]

    def read(self, dim: int, start: int, stop: int) -> torch.Tensor:
        """See `StoredWeight`."""
        weight = self.stored.read(0, self.number, self.number + 1)[0]
        return (weight if self.outputs == 1 else weight.T).narrow(dim, start, stop - start)

    def quantized(self) -> QuantizedWeight | None:
        """See `StoredWeight`."""
        return None


class Checkpoint:
    """An open checkpoint. See `open_checkpoint`."""

    def __init__(
        self, tensors: StoredTensors, renaming: Renaming, prefix: str, quantized: QuantizedFormat | None
    ) -> None:
        self._tensors, self._renaming, self._prefix, self._quantized = tensors, renaming, prefix + ".", quantized
        self._found: set[str] = set()

    def find(self, name: str) -> StoredWeight | None:
        """Return the weight *name* of the model; None if the checkpoint has none."""
        candidates = list(self._names(name))
        found = (find(candidate) for find in (self._one, self._experts, self._convolutions) for candidate in candidates)
        return next((weight for weight in found if weight is not None), None)

    def find_experts(self, name: str, outputs: int) -> Seq[StoredWeight]:
        """Return each expert of the weight *name*, whose dimension *outputs*, 1 or 2, is N, as `[N, K]`."""
        stored = self.find(name)
        if stored is None:
            return ()
        numbers = range(stored.shape[0])
        if isinstance(stored, StackedExperts) and outputs == 1:
            return [JoinedRows(parts) for parts in stored.parts_EP]
        if isinstance(stored, DequantizedWeight) and stored.expert is not None:
            return [stored.expert(number) for number in numbers]
        return [OneExpert(stored, number, outputs) for number in numbers]

    def unread(self) -> list[str]:
        """Return the names of the tensors that are part of no weight that was found.

        GPTQ stores a bias for every layer; those that are zeros need not be found.
        """
        biases = {f"{module}.bias" for module in (name.removesuffix(".qweight") for name in self._found)}
        left = sorted(self._tensors.files.keys() - self._found)
        return [name for name in left if name not in biases or self._tensors.read(name).any()]

    def _names(self, name: str) -> Iterator[str]:
        stripped = name.removeprefix(self._prefix)
        yield from (name, stripped, self._prefix + name)
        if name.startswith(self._prefix):
            yield from (prefix + stripped for prefix in PREFIXES)
        yield f"language_model.{name}"

    def _one(self, name: str) -> StoredWeight | None:
        candidates = (name, self._renaming.stored.get(name, name))
        return next((weight for weight in map(self._stored, candidates) if weight is not None), None)

    def _stored(self, stored: str) -> StoredWeight | None:
        quantized = None if self._quantized is None else self._quantized.find(stored, self._tensors)
        if quantized is not None:
            self._found.update(parts_of(stored, self._tensors))
            return quantized
        if stored not in self._tensors:
            return None
        self._found.add(stored)
        return PlainWeight(self._tensors.slice_of(stored))

    def _experts(self, name: str) -> StackedExperts | None:
        match = EXPERTS.fullmatch(name)
        if match is None:
            return None
        parts = self._renaming.parts.get(match["weight"])
        if parts is None:
            return None
        parts_EP: list[Seq[StoredWeight]] = []
        while True:
            found = [self._one(f"{match['experts']}.{len(parts_EP)}.{part}.weight") for part in parts]
            complete = [part for part in found if part is not None]
            if len(complete) < len(parts):
                return StackedExperts(parts_EP) if parts_EP and not complete else None
            parts_EP.append(complete)

    def _convolutions(self, name: str) -> JoinedRows | None:
        owner, _, weight = name.rpartition(".conv1d.")
        found = [self._one(f"{owner}.{part}.{weight}") for part in CONVOLUTIONS if owner]
        parts = [part for part in found if part is not None]
        return JoinedRows(parts) if len(parts) == len(CONVOLUTIONS) else None


@contextmanager
def open_checkpoint(folder: Path, config: Any, prefix: str) -> Iterator[Checkpoint]:
    """Open the checkpoint in *folder*.

    Args:
        folder: with weights where `weight_files` finds them.
        config: its `transformers` config.
        prefix: of the names of the base model's parameters.

    Raises:
        ModelError: a file is damaged, or its quantisation is not supported. Raised while weights are read, too.
    """
    quantized = format_of(getattr(config, "quantization_config", None))
    with open_tensors(folder) as tensors:
        yield Checkpoint(tensors, read_renaming(str(config.model_type), tensors.files), prefix, quantized)


@contextmanager
def open_tensors(folder: Path) -> Iterator[StoredTensors]:
    """Open the files of the checkpoint in *folder*. Raises `ModelError` as `open_checkpoint`."""
    with ExitStack() as files:
        stored: dict[str, Any] = {}
        for path in weight_files(folder, folder.name):
            file = files.enter_context(open_file(path))
            stored.update(dict.fromkeys(file.keys(), file))
        try:
            yield StoredTensors(stored)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"the weights in {folder} cannot be read: {error}") from error


def read_slice(stored: StoredWeight, part: "TensorSlice | None", dtype: torch.dtype) -> torch.Tensor:
    """Return a slice of *stored* (None: all of it) as *dtype*."""
    if part is None:
        return stored.read(0, 0, stored.shape[0] if stored.shape else 1).to(dtype)
    found = [stored.read(part.dim, start, stop) for start, stop in part.ranges if start < stop]
    missing = part.length - sum(tensor.shape[part.dim] for tensor in found)
    if missing:
        shape = [*stored.shape]
        shape[part.dim] = missing
        found.append(torch.zeros(shape, dtype=dtype))
    return (found[0] if len(found) == 1 else torch.cat(found, part.dim)).to(dtype)


def are_equal(first: StoredWeight | None, second: StoredWeight | None) -> bool:
    """Return whether two weights have the same values, or one of them is not stored."""
    if first is None or second is None:
        return True
    blocks = ((start, min(start + ROWS_COMPARED, first.shape[0])) for start in range(0, first.shape[0], ROWS_COMPARED))
    return first.shape == second.shape and all(
        torch.equal(first.read(0, *block).float(), second.read(0, *block).float()) for block in blocks
    )
