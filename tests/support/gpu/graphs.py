"""Graphs on the pretended GPU: operators are recorded while they run, and repeated on the same memory.

A capture raises where CUDA would refuse it, or where the graph would not mean the same later: where the host waits or
reads, where something is copied between host and device, and where an operator reads memory that is neither declared
static nor made in the capture.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from tests.support.gpu.counts import where
from tests.support.gpu.pretend import ALLOCATES, Pretend, PretendTensor, Recorder, storage_of


class IllegalCaptureError(RuntimeError):
    """A program does what a graph must not contain."""


@dataclass
class RecordedCall:
    """An operator with the memory it was given, and the memory of its result."""

    func: Any
    args: Any
    kwargs: Any
    outputs: list[torch.Tensor]
    is_in_place: bool

    def repeat(self) -> None:
        """Compute again; write the result to where it was."""
        found = self.func(*self.args, **self.kwargs)
        if self.is_in_place:
            return
        results = [each for each in tree_flatten(found)[0] if isinstance(each, torch.Tensor)]
        for target, result in zip(self.outputs, results, strict=True):
            target.copy_(result)


@dataclass
class PretendGraph(Recorder):
    """Stands for `torch.cuda.CUDAGraph`.

    Attributes:
        calls: in order.
        outside: memory that the program reads or writes and did not make, by address, with the first place that does.
    """

    gpu: Pretend
    calls: list[RecordedCall] = field(default_factory=list)
    outside: dict[int, str] = field(default_factory=dict)
    replays: int = 0
    _made: set[int] = field(default_factory=set)
    _kept: list[Any] = field(default_factory=list)  # so that no address is given away twice

    def kernel(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Record a call."""
        inputs = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, PretendTensor)]
        outputs = [each for each in tree_flatten(output)[0] if isinstance(each, PretendTensor)]
        self._kept += [inputs, outputs]
        for each in inputs:
            address = storage_of(each)
            if address not in self._made and address not in self.outside:
                self.outside[address] = where()
        known = {storage_of(each) for each in inputs}
        self._made |= {storage_of(each) for each in outputs} - known - set(self.outside)
        schema = getattr(func, "_schema", None)
        is_in_place = schema is not None and schema.is_mutable
        is_view = not is_in_place and bool(known & {storage_of(each) for each in outputs})
        name = "" if schema is None else schema.name.partition("::")[2]
        if is_view or name in ALLOCATES:
            return
        held = tree_map(_held, (args, kwargs))
        held[1].pop("device", None)
        self.calls.append(RecordedCall(func, *held, [each.held for each in outputs], is_in_place))

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Refuse."""
        raise IllegalCaptureError(f"operation not permitted when stream is capturing: a copy in {where()}")

    def sync(self, place: str) -> None:
        """Refuse."""
        raise IllegalCaptureError(f"operation not permitted when stream is capturing: the host waits in {place}")

    def replay(self) -> None:
        """Compute everything again."""
        if self.gpu.recorder is not None:
            raise IllegalCaptureError("a graph is launched within a capture")
        self.replays += 1
        self.gpu.counts.graphs += 1
        with _disable_current_modes():
            for call in self.calls:
                call.repeat()

    def reads_only(self, static: list[torch.Tensor]) -> None:
        """Raise `IllegalCaptureError` if the program uses memory outside its own and that of *static*."""
        allowed = {storage_of(each) for each in static}
        foreign = {place for address, place in self.outside.items() if address not in allowed}
        if foreign:
            raise IllegalCaptureError(f"a graph uses memory that may be freed: {sorted(foreign)}")


def _held(value: Any) -> Any:
    if isinstance(value, PretendTensor):
        return value.held
    return torch.device("cpu") if isinstance(value, torch.device) else value


@dataclass
class PretendCapture:
    """Stands for `torch.cuda.graph`: makes every capture of one GPU.

    Attributes:
        graphs: all that were captured.
        modes: the mode of every capture.
    """

    gpu: Pretend
    graphs: list[PretendGraph] = field(default_factory=list)
    modes: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def __call__(
        self, graph: PretendGraph, pool: object = None, stream: object = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        """Record what runs within into *graph*."""
        self.modes.append(capture_error_mode)
        self.gpu.recorder = graph
        try:
            yield
        finally:
            self.gpu.recorder = None
        self.graphs.append(graph)
