"""A process that `slipstream doctor` starts: reports its environment, joins groups, and times their operations."""

import socket
import time
from typing import Protocol

import torch

from protos.doctor_messages import FromDiagnostics, Join, Joined, Leave, Measure, Measured, Seen, ToDiagnostics, Trouble
from protos.worker_messages import Stop, StoreAddress
from workers.device import set_device
from workers.distributed.groups import Group, GroupError
from workers.distributed.shm_group import BUFFER_BYTES, SharedMemoryGroup, form_with_shared_memory
from workers.distributed.store import connect_store, open_store
from workers.distributed.torch_group import form

GROUP_S = 20.0
"""Timeout of forming a group, and of each operation."""
PATTERN = 151
SHARED = f"shared memory (above {BUFFER_BYTES >> 20} MiB gloo)"


class DiagnosticsPort(Protocol):
    """This end of the channel to the doctor."""

    def send(self, message: FromDiagnostics) -> None:
        """Send without waiting."""
        ...

    def receive(self, timeout_s: float | None) -> ToDiagnostics | None:
        """Return the next order; None if there is none within *timeout_s*."""
        ...


def serve(port: DiagnosticsPort) -> None:
    """Carry out the doctor's orders until it sends `Stop`."""
    _store, address = open_store()
    port.send(environment(address))
    groups = DiagnosedGroups()
    while not isinstance(order := port.receive(None), Stop):
        if order is not None:
            _carry_out(groups, order, port)
    groups.close()


def _carry_out(groups: "DiagnosedGroups", order: Join | Measure | Leave, port: DiagnosticsPort) -> None:
    answer: FromDiagnostics | None
    try:
        answer = groups.do(order)
    except Exception as error:
        answer = Trouble(str(error) or type(error).__name__)
    if answer is not None:
        port.send(answer)


def environment(store: StoreAddress) -> Seen:
    """Return the versions and devices of this process."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Seen(
        host=socket.gethostname(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda or "",
        nccl=".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else "",  # type: ignore[no-untyped-call]
        devices=tuple(torch.cuda.get_device_name(index) for index in range(count)),
        store=store,
    )


class DiagnosedGroups:
    """The groups that this process has joined."""

    def __init__(self) -> None:
        self._groups: dict[str, tuple[Group, torch.device]] = {}

    def do(self, order: Join | Measure | Leave) -> Joined | Measured | None:
        """Carry out *order* and return the answer. Raises `GroupError`."""
        if isinstance(order, Join):
            return self._join(order)
        if isinstance(order, Measure):
            return Measured(measure(*self._groups[order.group], order))
        group, _ = self._groups.pop(order.group)
        group.close()
        return None

    def _join(self, order: Join) -> Joined:
        started, device = time.perf_counter(), torch.device(order.device)
        set_device(device)
        store = connect_store(order.store, GROUP_S)
        join = form_with_shared_memory if order.is_near else form
        group = join(order.group, store, order.rank, order.size, order.backend, device=device, timeout_s=GROUP_S)
        self._groups[order.group] = group, device
        return Joined(time.perf_counter() - started, SHARED if isinstance(group, SharedMemoryGroup) else order.backend)

    def close(self) -> None:
        """Leave all groups."""
        for group, _ in self._groups.values():
            group.close()


def measure(group: Group, device: torch.device, order: Measure) -> float:
    """Return the seconds of one operation.

    Raises:
        GroupError: it failed, or the data received differs from the data sent.
    """
    operate = broadcast if order.what == "broadcast" else ping
    tensor = torch.zeros(order.num_bytes, dtype=torch.uint8, device=device)
    for turn in range(max(2, group.size)):  # the first operation of each pair of ranks connects them
        check(group, operate, tensor, turn)
    _settle(device)
    started = time.perf_counter()
    for turn in range(order.repeats):
        operate(group, tensor, turn)
    _settle(device)
    return (time.perf_counter() - started) / order.repeats


class Operation(Protocol):
    """Moves *tensor* through *group*, from rank `turn % size`."""

    def __call__(self, group: Group, tensor: torch.Tensor, turn: int) -> None:
        """Run the operation once."""
        ...


def broadcast(group: Group, tensor: torch.Tensor, turn: int) -> None:
    """Broadcast from each rank in turn, so that each operation waits for the one before."""
    group.broadcast(tensor, turn % group.size)


def ping(group: Group, tensor: torch.Tensor, turn: int) -> None:
    """Send to the other rank in one turn, back in the next."""
    sender = turn % 2
    if group.rank == sender:
        group.send(tensor, 1 - sender)
    else:
        group.recv(tensor, sender)


def check(group: Group, operate: Operation, tensor: torch.Tensor, turn: int) -> None:
    """Run the operation with a pattern of bytes; raise `GroupError` if other bytes arrive."""
    wanted = torch.arange(tensor.numel(), device=tensor.device).add_(turn).remainder_(PATTERN).to(torch.uint8)
    tensor.zero_()
    sender = turn % group.size
    if group.rank == sender:
        tensor.copy_(wanted)
    operate(group, tensor, turn)
    wrong = int((tensor != wanted).sum())
    if wrong:
        raise GroupError(f"{wrong} of {tensor.numel()} bytes from rank {sender} arrived changed at rank {group.rank}")


def _settle(device: torch.device) -> None:
    """Wait until all work queued on a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
