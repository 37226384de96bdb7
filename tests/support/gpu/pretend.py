"""Tensors that say they are on `cuda:0` and hold their data on the CPU, and the mode that computes with them.

The mode raises where an operator is given tensors of both devices, which a GPU refuses, too. Copies to the host that do
not block arrive when the host waits for the device, and not before: what is read too early is still the old content.
Memory that a copy to the device reads must not change until then.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_map

from tests.support.gpu.counts import Counts, where

ALLOCATES = frozenset({"empty", "new_empty", "empty_strided", "new_empty_strided", "empty_like", "lift_fresh"})
READS_SIZES = frozenset({"nonzero", "masked_select", "_unique2", "unique_dim"})
TAKES_INDICES = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"})
Copy = TypeVar("Copy")
CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


class DeviceMixError(RuntimeError):
    """An operator was given tensors of two devices."""


class PretendTensor(torch.Tensor):
    """A tensor on the pretended device; `held` has its data."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls: type["PretendTensor"], held: torch.Tensor) -> "PretendTensor":
        """Wrap *held*."""
        made: PretendTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=CUDA,
            requires_grad=False,
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse to compute outside the mode."""
        raise RuntimeError(f"{func} on a pretended tensor outside `Pretend`")

    def tolist(self) -> Any:
        """Copy to the host first, as torch does."""
        return self.cpu().tolist()

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"PretendTensor({self.held!r})"


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of the memory that *tensor* is a view of."""
    held = tensor.held if isinstance(tensor, PretendTensor) else tensor
    return held.untyped_storage().data_ptr()


class Recorder:
    """Sees every kernel while a graph is captured. See `tests.support.gpu.graphs`."""

    def kernel(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Take note of a call on the device that has just run."""

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Refuse or note a copy between host and device."""

    def sync(self, place: str) -> None:
        """Refuse that the host waits."""


class Pretend(TorchDispatchMode):
    """Computes with `PretendTensor`s and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self.recorder: Recorder | None = None
        self.is_stuck = False  # something that was launched never ends
        self._pinned: set[int] = set()
        self._owners: list[torch.Tensor] = []  # keeps pinned memory, so that its addresses are not given away again
        self._arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._leaving: list[tuple[torch.Tensor, torch.Tensor, str]] = []
        self._num_arrived = self._num_left = 0

    def reset(self) -> Counts:
        """Return the counts so far, and begin to count anew."""
        counts, self.counts = self.counts, Counts()
        return counts

    def sync(self, place: str, asked: tuple[int, int] | None = None) -> None:
        """Wait for the device: everything that was asked of it is done, see `is_over`."""
        self.counts.syncs[place] += 1
        if self.recorder is not None:
            self.recorder.sync(place)
        if not self.is_over(asked):
            raise RuntimeError(f"the host waits for ever in {place}")

    @property
    def num_asked(self) -> tuple[int, int]:
        """How many copies to the host and to the device were asked for."""
        return self._num_arrived + len(self._arriving), self._num_left + len(self._leaving)

    def is_over(self, asked: tuple[int, int] | None = None) -> bool:
        """Return whether everything that was asked of the device is done; the host knows it then.

        With *asked*, everything that was before `num_asked` was that.
        """
        if self.is_stuck:
            return False
        to_host, to_device = self.num_asked if asked is None else asked
        arriving, self._arriving = _split(self._arriving, to_host - self._num_arrived)
        leaving, self._leaving = _split(self._leaving, to_device - self._num_left)
        self._num_arrived, self._num_left = self._num_arrived + len(arriving), self._num_left + len(leaving)
        with torch.utils._python_dispatch._disable_current_modes():
            for target, data in arriving:
                target.copy_(data)
            for source, copied, line in leaving:
                if not torch.equal(source, copied):
                    raise RuntimeError(
                        f"memory that the copy in {line} reads was changed before it was known to be done"
                    )
        return True

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether *tensor* is in pinned memory of the host."""
        return storage_of(tensor) in self._pinned

    def kernel(self, name: str) -> None:
        """Count a kernel, unless a graph is captured."""
        if self.recorder is None:
            self.counts.kernels[name] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute one operator."""
        kwargs = dict(kwargs or {})
        space, _, name = func._schema.name.partition("::")
        if space == "slipstream" and name == "paged_attention":
            return _call_with(self, _paged_attention(), args, kwargs)
        if space == "slipstream_quantized" and isinstance(args[0], PretendTensor):
            return _call_with(self, _product(), args, kwargs)
        flat, _ = tree_flatten((args, kwargs))
        on_device = [each for each in flat if isinstance(each, PretendTensor)]
        wanted = kwargs.get("device")
        to_device = bool(on_device) if wanted is None else torch.device(wanted).type == "cuda"
        if name in {"copy_", "_to_copy"}:
            moved = self._copy(func, name, args, kwargs, to_device=to_device)
            if moved is not None:
                return moved
        elif on_device or to_device:
            self._check(name, flat, on_device, args)
        output = func(*tree_map(_held, args), **_on_host(kwargs))
        if kwargs.get("pin_memory"):
            self._pinned.add(storage_of(output))
            self._owners.append(output)
        if not to_device or name == "_local_scalar_dense":
            return output
        wrapped = _wrapped(output, on_device)
        if name not in ALLOCATES and not _is_view(func, output, on_device):
            self.kernel(name)
        if self.recorder is not None:
            self.recorder.kernel(func, args, kwargs, wrapped)
        return wrapped

    def _check(self, name: str, flat: list[Any], on_device: list[PretendTensor], args: Any) -> None:
        """Raise where devices mix; count what makes the host wait."""
        on_host = [
            each
            for each in flat
            if isinstance(each, torch.Tensor) and not isinstance(each, PretendTensor) and each.dim()
        ]
        if on_device and on_host:
            if name not in TAKES_INDICES:
                raise DeviceMixError(f"{name} at {where()} is given tensors of the host and of the device")
            self._count_copy(on_host[0], where(), is_blocking=True)
        indices = args[1] if name in TAKES_INDICES else ()
        has_mask = any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)
        if on_device and (has_mask or name in READS_SIZES or name in ("_local_scalar_dense", "repeat_interleave")):
            self.sync(where())

    def _copy(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], *, to_device: bool) -> Any:
        """Copy between host and device; None if both ends are on one of them."""
        target, source = (args[0], args[1]) if name == "copy_" else (None, args[0])
        from_device = isinstance(source, PretendTensor)
        to_device = isinstance(target, PretendTensor) if name == "copy_" else to_device
        if from_device == to_device:
            return None
        is_blocking = not (kwargs.pop("non_blocking", False) or (name == "copy_" and args[2:] and args[2]))
        line = where()
        if to_device:
            self._count_copy(source, line, is_blocking=is_blocking)
            made = _moved(func, name, target, source, kwargs)
            if self.recorder is not None:
                self.recorder.copy(source, made)
            return made
        self.counts.to_host[line] += 1
        if name == "copy_" and not is_blocking and self.is_pinned(target):
            if self.recorder is not None:
                self.recorder.copy(source, target)
            self._arriving.append((target, source.held.clone()))
            return target
        self.sync(line)
        with torch.utils._python_dispatch._disable_current_modes():
            if name == "copy_":
                return target.copy_(source.held)
            return func(source.held, **_on_host(kwargs))

    def _count_copy(self, source: torch.Tensor, line: str, *, is_blocking: bool) -> None:
        self.counts.to_device[line] += 1
        if is_blocking:
            self.counts.blocking[line] += 1
        if not self.is_pinned(source):
            self.counts.pageable[line] += 1
        elif not is_blocking:
            with torch.utils._python_dispatch._disable_current_modes():
                self._leaving.append((source, source.clone(), line))


def _moved(func: Any, name: str, target: Any, source: torch.Tensor, kwargs: dict[str, Any]) -> PretendTensor:
    with torch.utils._python_dispatch._disable_current_modes():
        if name == "copy_":
            target.held.copy_(source)
            return target
        # A copy is made even where the dtype and device of the data stay the same.
        made = func(source, **_on_host(kwargs))
        return PretendTensor(made.clone() if storage_of(made) == storage_of(source) else made)


def pretended() -> "Pretend | None":
    """Return the device that this thread computes on; None if it has none."""
    mode = _get_current_dispatch_mode()
    return mode if isinstance(mode, Pretend) else None


def _paged_attention() -> Callable[..., torch.Tensor]:
    from workers.attention.backend import _op

    return _op


def _product() -> Callable[..., torch.Tensor]:
    from workers.quantization.products import on_gpu

    return on_gpu


def _call_with(mode: Pretend, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a Python operator's own code within *mode*, as the dispatcher would."""
    with mode:
        return function(*args, **kwargs)


def _held(value: Any) -> Any:
    if isinstance(value, PretendTensor):
        return value.held
    return CPU if isinstance(value, torch.device) and value.type == "cuda" else value


def _on_host(kwargs: dict[str, Any]) -> dict[str, Any]:
    found = {key: tree_map(_held, value) for key, value in kwargs.items() if key != "non_blocking"}
    if "pin_memory" in found:
        found["pin_memory"] = False
    return found


def _split(copies: list[Copy], count: int) -> tuple[list[Copy], list[Copy]]:
    """Return the first *count* copies, and the others."""
    return copies[: max(0, count)], copies[max(0, count) :]


def _is_view(func: Any, output: Any, on_device: list[PretendTensor]) -> bool:
    """Whether an operator that changes nothing returned memory of its inputs: it launched no kernel."""
    if func._schema.is_mutable:
        return False
    first = output[0] if isinstance(output, list | tuple) and output else output
    return isinstance(first, torch.Tensor) and any(storage_of(first) == storage_of(each) for each in on_device)


def _wrapped(output: Any, on_device: list[PretendTensor]) -> Any:
    same = {id(each.held): each for each in on_device}

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, PretendTensor):
            return value
        known = same.get(id(value))
        return PretendTensor(value) if known is None else known

    return tree_map(wrap, output)
