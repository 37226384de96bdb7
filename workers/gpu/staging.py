"""Static buffers of a round: everything that the device is told goes in one copy, and everything it answers in another.

A *layout* places named arrays one after another in an area of bytes. The area exists once on the device, at an address
that graphs may keep, and twice in pinned memory of the host: the next round may be written while the last copy is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from workers.distributed.groups import Group

Array = npt.NDArray[Any]
ALIGNMENT = 16
"""Arrays begin at multiples of this many bytes."""
TORCH_DTYPES = {"i8": torch.int64, "i4": torch.int32, "f8": torch.float64, "f4": torch.float32}


class Layout:
    """Named arrays in an area of bytes.

    Args:
        fields: dtype ("i8", "i4", "f8" or "f4") and shape of each array.

    Attributes:
        size: bytes of the area.
    """

    def __init__(self, fields: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        self._places: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        self.size = 0
        for name, (dtype, shape) in fields.items():
            num_bytes = int(np.prod(shape)) * int(dtype[1])
            self._places[name] = (dtype, shape, self.size, self.size + num_bytes)
            self.size += -(-num_bytes // ALIGNMENT) * ALIGNMENT

    def arrays(self, area: npt.NDArray[np.uint8]) -> dict[str, Array]:
        """Return the arrays in an area of the host, as views."""
        return {
            name: area[first:end].view(dtype).reshape(shape)
            for name, (dtype, shape, first, end) in self._places.items()
        }

    def tensors(self, area: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the arrays in an area of the device, as views."""
        return {
            name: area[first:end].view(TORCH_DTYPES[dtype]).view(shape)
            for name, (dtype, shape, first, end) in self._places.items()
        }


class StagingArea:
    """The area of the rounds' input, on the device and twice on the host.

    Args:
        size: bytes, of the largest layout.
        device: of the model.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.on_device = torch.zeros(size, dtype=torch.uint8, device=device)
        self.mirrors = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._turn = 0

    def next_mirror(self) -> int:
        """Return which mirror the next round is written to.

        It was read by a copy of the round before last, whose result the host has waited for.
        """
        self._turn = 1 - self._turn
        return self._turn

    def send(self, mirror: int, size: int) -> None:
        """Copy the first *size* bytes of a mirror to the device; the host does not wait."""
        self.on_device[:size].copy_(self.mirrors[mirror][:size], non_blocking=True)


@dataclass(frozen=True)
class SentResult:
    """A result that is on its way to the host.

    Attributes:
        done: recorded after everything that was launched in the round; valid until the result after the next is sent.
    """

    done: torch.cuda.Event
    _mirror: torch.Tensor

    def receive(self, group: Group | None = None) -> npt.NDArray[np.int64]:
        """Wait for the numbers, the only wait of a round. They are valid until the result after the next is sent.

        Raises `GroupError` if an operation of *group*, which the numbers depend on, fails or takes too long.
        """
        if group is not None:
            group.check(self.done)
        self.done.synchronize()
        return self._mirror.numpy()


class ResultArea:
    """The area of the rounds' results, int64, on the device and twice in pinned memory of the host.

    The device keeps what the newest round has left there, until the next one writes over it.

    Args:
        size: numbers of the largest result.
        device: of the model.

    Attributes:
        on_device: the numbers, and after them one more, which is -1.
        before: recorded after everything that was launched in the round before the one whose result was sent last.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.on_device = torch.full((size + 1,), -1, dtype=torch.int64, device=device)
        self._mirrors = [torch.zeros(size, dtype=torch.int64, pin_memory=True) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._turn = 0

    @property
    def before(self) -> torch.cuda.Event:  # noqa: D102
        return self._events[1 - self._turn]

    @property
    def nothing(self) -> int:
        """The index of the number that is -1."""
        return len(self.on_device) - 1

    def send(self, size: int) -> SentResult:
        """Copy the first *size* numbers to the host, which does not wait. There may be none."""
        self._turn = 1 - self._turn
        mirror, done = self._mirrors[self._turn][:size], self._events[self._turn]
        if size:
            mirror.copy_(self.on_device[:size], non_blocking=True)
        done.record()
        return SentResult(done, mirror)

    def receive(self, size: int, group: Group | None = None) -> npt.NDArray[np.int64]:
        """Copy the first *size* numbers to the host and wait for them, see `SentResult.receive`."""
        return self.send(size).receive(group)


def fill(into: Array, values: npt.NDArray[np.generic], padding: float) -> None:
    """Write *values*, and *padding* after them."""
    count = len(values)
    into[:count] = values
    if count < len(into):
        into[count:] = padding
