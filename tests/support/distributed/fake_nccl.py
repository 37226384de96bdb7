"""A stand-in for torch's `ProcessGroupNCCL` on CPU tensors, over gloo, that fails as NCCL does.

`wait` only orders streams: it raises nothing when a peer is gone, and leaves the result uninitialised. The failure is
known to the work alone. Operations are recorded with the thread that began them.

Tensors of a pretended GPU are exchanged, too. What a graph captures runs when the graph is launched, and has no work:
one that fails then never ends.
"""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.distributed_c10d import ProcessGroupGloo
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.gpu.pretend import PretendTensor, pretended


@dataclass
class Operation:
    """One operation of a rank, in a group of *size*; `thread` began it."""

    what: str
    thread: str
    size: int
    is_over: bool = False


class Records:
    """All groups and operations.

    `timeout_s` replaces that of the groups. Operations that `fails` names break, and those that `hangs` names are never
    complete.
    """

    def __init__(self) -> None:
        self.formed_by: list[str] = []
        self.operations: list[Operation] = []
        self.timeout_s: float | None = None
        self.fails: Callable[[Operation], bool] = lambda operation: False
        self.hangs: Callable[[Operation], bool] = lambda operation: False

    def outstanding(self) -> list[Operation]:
        return [operation for operation in self.operations if not operation.is_over]

    def threads(self) -> set[str]:
        """The threads that formed groups or began operations."""
        return {*self.formed_by, *(operation.thread for operation in self.operations)}


class FakeWork:
    """A work of NCCL: complete when it is asked, and quiet about errors until then. Without *work* never complete."""

    def __init__(self, work: Any, operation: Operation, results: list[torch.Tensor], *, fails: bool) -> None:
        self._error: RuntimeError | None = RuntimeError("NCCL communicator was aborted on rank 0.") if fails else None
        self._operation = operation
        try:
            if work is not None:
                work.wait()
        except RuntimeError as error:
            self._error = error
        if self._error is not None or work is None:
            for result in results:  # what was never written may be anything
                result.fill_(-77)
        operation.is_over = work is not None

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return self._operation.is_over

    def exception(self) -> RuntimeError | None:
        return self._error


def install(monkeypatch: pytest.MonkeyPatch) -> Records:
    """Let groups with the backend "nccl" be formed of stand-ins."""
    records = Records()

    class FakeNccl:
        Options = SimpleNamespace

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            self._size = size
            records.formed_by.append(threading.current_thread().name)
            gloo: Any = ProcessGroupGloo
            inner = gloo._Options()
            seconds = records.timeout_s
            inner._timeout = options._timeout if seconds is None else timedelta(seconds=seconds)
            inner._devices = [gloo.create_device(hostname="127.0.0.1")]
            self._connect = lambda: gloo(store, rank, size, inner)

        def eager_connect_single_device(self, device: torch.device) -> None:
            self._gloo = self._connect()

        def abort(self) -> None:
            self._gloo.abort()

        def allreduce(self, tensors: list[torch.Tensor]) -> FakeWork:
            return self._begun("allreduce", tensors, tensors)

        def allgather(self, parts: list[list[torch.Tensor]], tensors: list[torch.Tensor]) -> FakeWork:
            return self._begun("allgather", parts[0], parts, tensors)

        def gather(self, parts: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: Any) -> FakeWork:
            return self._begun("gather", parts[0] if parts else [], parts, tensors, options)

        def broadcast(self, tensors: list[torch.Tensor], options: Any) -> FakeWork:
            return self._begun("broadcast", tensors, tensors, options)

        def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> FakeWork:
            return self._begun("send", [], tensors, dst, tag)

        def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> FakeWork:
            return self._begun("recv", tensors, tensors, src, tag)

        def _begun(self, what: str, results: list[torch.Tensor], *arguments: Any) -> FakeWork:
            """Begin an operation, which writes *results*; or let the graph that is captured contain it."""
            gpu, held = pretended(), tree_map(_held, (results, arguments))
            if gpu is not None:
                gpu.kernel(what)
            if gpu is None or gpu.recorder is None:
                return self._run(what, *held)

            def launch(*_: torch.Tensor) -> None:
                work = self._run(what, *held)
                gpu.is_stuck = gpu.is_stuck or not work.is_completed() or work.exception() is not None

            tensors = [each for each in tree_leaves(arguments) if isinstance(each, torch.Tensor)]
            gpu.recorder.kernel(launch, tensors, {}, None)
            return FakeWork(None, Operation(what, threading.current_thread().name, self._size), held[0], fails=False)

        def _run(self, what: str, results: list[torch.Tensor], arguments: tuple[Any, ...]) -> FakeWork:
            operation = Operation(what, threading.current_thread().name, self._size)
            records.operations.append(operation)
            if records.hangs(operation):
                return FakeWork(None, operation, results, fails=False)
            with _disable_current_modes():
                work = getattr(self._gloo, what)(*arguments)
                return FakeWork(work, operation, results, fails=records.fails(operation))

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", _is_capturing)
    return records


def _is_capturing() -> bool:
    gpu = pretended()
    return gpu is not None and gpu.recorder is not None


def _held(value: Any) -> Any:
    return value.held if isinstance(value, PretendTensor) else value
