"""The checks of `slipstream doctor`: devices, process groups, and a pair that re-forms after a SIGKILL.

They run in child processes, over the groups that engines use: shared memory and gloo on CPUs, NCCL on GPUs.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, TypeVar

from cluster.transport.process_workers import ProcessWorkerGroup
from protos.doctor_messages import FromDiagnostics, Join, Joined, Leave, Measure, Measured, Seen, Trouble
from protos.errors import SlipstreamError
from protos.worker_messages import Died, WorkerId

BODY = "workers.process.diagnostics:serve"
START_S = 120.0
"""Time for a process to start and import torch, on a busy machine."""
ANSWER_S = 60.0
SMALL, LARGE = 1 << 10, 16 << 20
SMALL_REPEATS, LARGE_REPEATS = 200, 6
TARGET, DRAFT = WorkerId("target"), WorkerId("draft")
TP = "tp"
CPU_WORLD = 2
"""Target ranks on a machine without devices."""

START = "run `python -c 'import torch'` with the same Python; its error shows what is wrong"
NO_CUDA = (
    "see whether `nvidia-smi` lists the devices, CUDA_VISIBLE_DEVICES hides none, and torch is a CUDA build "
    "(`slipstream env` shows it); or use --device cpu"
)
TOO_FEW = "lower --tensor-parallel-size; a draft can share the target's device (placement: colocated)"
GLOO = "a firewall or a sandbox may keep processes of this machine from connecting to each other on 127.0.0.1: allow it"
NCCL = (
    "run again with NCCL_DEBUG=INFO to see where it stops; in a container give it room in /dev/shm (--ipc=host or "
    "--shm-size=1g); if NCCL_P2P_DISABLE=1 helps, the devices cannot reach each other's memory (IOMMU or ACS)"
)
REMEDIES = {"gloo": GLOO, "nccl": NCCL}

Reply = TypeVar("Reply", Seen, Joined, Measured, Died)


class CheckFailedError(SlipstreamError):
    """A check failed; `remedy` describes how to fix it."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


@dataclass(frozen=True)
class DoctorOptions:
    """What to check. `world` is the number of target ranks; None: derived from the number of devices.

    With `may_share`, several ranks may use one device, which NCCL must be configured to allow.
    """

    world: int | None = None
    device: str = "auto"
    may_share: bool = False


@dataclass(frozen=True)
class ProbeProcesses:
    """Child processes that run the checks."""

    group: ProcessWorkerGroup

    @classmethod
    def open(cls, body: str = BODY) -> "ProbeProcesses":
        """Return an empty group of processes."""
        return cls(
            ProcessWorkerGroup(
                body, sends="protos.doctor_messages:FromDiagnostics", receives="protos.doctor_messages:ToDiagnostics"
            )
        )

    def start(self, workers: Seq[WorkerId]) -> dict[WorkerId, Seen]:
        """Start *workers*; return what each reports of its machine."""
        self.group.start(workers)
        return self.wait(workers, Seen, START_S, START)

    def call(self, orders: Mapping[WorkerId, Join | Measure], kind: type[Reply], remedy: str) -> dict[WorkerId, Reply]:
        """Send each worker its order; return the replies."""
        for worker, order in orders.items():
            self.group.send(worker, order)
        return self.wait(tuple(orders), kind, ANSWER_S, remedy)

    def wait(self, workers: Seq[WorkerId], kind: type[Reply], limit_s: float, remedy: str) -> dict[WorkerId, Reply]:
        """Return each worker's next message, which must be of *kind*.

        Raises:
            CheckFailedError: another message arrived, or none within *limit_s*.
        """
        replies: dict[WorkerId, Reply] = {}
        deadline = time.monotonic() + limit_s
        while missing := [worker for worker in workers if worker not in replies]:
            if time.monotonic() > deadline:
                raise CheckFailedError(f"no answer from {', '.join(map(str, missing))} within {limit_s:.0f} s", remedy)
            for worker, message in self.group.receive(0.25):
                if not isinstance(message, kind):
                    raise CheckFailedError(f"{worker}: {_failure(message)}", remedy)
                replies[worker] = message
        return replies


def _failure(message: FromDiagnostics) -> str:
    return message.reason if isinstance(message, Trouble | Died) else f"sent an unexpected {type(message).__name__}"


class Examination:
    """One run of all checks of this machine.

    Args:
        options: what to check.
        probes: the processes to check with; closed by the caller.
    """

    def __init__(self, options: DoctorOptions, probes: ProbeProcesses) -> None:
        self._options, self._probes = options, probes
        self._seen: dict[WorkerId, Seen] = {}
        self._devices: list[str] = []
        self._world = 0
        self._backend = "gloo"

    def checks(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Yield the name and function of each check, which returns its result. Each needs the earlier ones to pass."""
        yield "devices", self._check_devices
        if self._world > 1 or self._backend == "nccl":
            yield "tp group", self._check_tp
        if len(self._devices) > self._world:
            yield "pair group", self._check_pair
            yield "pair after a kill", self._check_new_pair

    @property
    def has_draft(self) -> bool:
        """Whether there is a device for a draft of its own."""
        return len(self._devices) > self._world

    @property
    def _targets(self) -> list[WorkerId]:
        return [WorkerId("target", rank) for rank in range(self._world)]

    def _check_devices(self) -> str:
        self._seen = self._probes.start([TARGET])
        seen = self._seen[TARGET]
        self._assign_devices(seen)
        versions = f"torch {seen.torch}"
        if self._backend == "gloo":
            return f"{versions}, on the CPU: {self._world} target rank(s) and a draft"
        count = len(seen.devices)
        kinds = ", ".join(f"{seen.devices.count(name)} x {name}" for name in sorted(set(seen.devices)))
        text = f"{kinds}; {versions}, CUDA {seen.cuda}, NCCL {seen.nccl}; target ranks on {self._world} of {count}"
        return text if self.has_draft else f"{text}; none is left for a draft of its own, so no pair is checked"

    def _assign_devices(self, seen: Seen) -> None:
        """Choose the number of ranks and their devices."""
        count, world = len(seen.devices), self._options.world
        if self._options.device == "cuda" and not count:
            raise CheckFailedError(f"torch {seen.torch} sees no CUDA device", NO_CUDA)
        if self._options.device == "cpu" or not count:
            self._world = world or CPU_WORLD
            self._devices = ["cpu"] * (self._world + 1)
            return
        self._backend, self._world = "nccl", world or max(1, count - 1)
        if self._world > count and not self._options.may_share:
            raise CheckFailedError(f"{self._world} target ranks need as many devices, there are {count}", TOO_FEW)
        num_ranks = self._world + 1 if self._options.may_share else min(self._world + 1, count)
        self._devices = [f"cuda:{rank % count}" for rank in range(num_ranks)]

    def _check_tp(self) -> str:
        targets = self._targets
        self._seen |= self._probes.start(targets[1:])
        return f"{self._world} rank(s) over {self._form_group(TP, targets)}; {self._measurements(TP, targets)}"

    def _check_pair(self) -> str:
        self._seen |= self._probes.start([DRAFT])
        formed = self._form_group("pair/1", [TARGET, DRAFT])
        measured = self._measurements("pair/1", [TARGET, DRAFT], "ping")
        return f"target rank 0 and the draft over {formed}; {measured}"

    def _check_new_pair(self) -> str:
        noticed = self._kill_draft()
        self._probes.group.send(TARGET, Leave("pair/1"))
        again = WorkerId("draft", incarnation=1)
        started = time.monotonic()
        self._probes.start([again])
        self._form_group("pair/2", [TARGET, again])
        seconds = time.monotonic() - started
        self._time("pair/2", [TARGET, again], "ping", SMALL)
        if self._world > 1:
            self._time(TP, self._targets, "broadcast", SMALL)
        return f"the death was noticed after {noticed:.2f} s, a new draft was paired after {seconds:.1f} s"

    def _kill_draft(self) -> float:
        """Kill the draft; return the seconds until its death was noticed."""
        pid, started = self._probes.group.pid(DRAFT), time.monotonic()
        if pid is None:
            raise CheckFailedError("the draft is gone", START)
        os.kill(pid, signal.SIGKILL)
        self._probes.wait(
            [DRAFT], Died, ANSWER_S, "the system does not report that a child process ended: is it stuck?"
        )
        return time.monotonic() - started

    def _form_group(self, group: str, workers: list[WorkerId]) -> str:
        """Form *group* of *workers*, in rank order; return its transport and the time of the slowest rank."""
        store, size = self._seen[TARGET].store, len(workers)
        orders = {
            worker: Join(
                group, store, rank, size, self._backend_of(group), self._device_of(worker, group), is_near=group == TP
            )
            for rank, worker in enumerate(workers)
        }
        replies = self._probes.call(orders, Joined, REMEDIES[self._backend_of(group)])
        slowest = max(replies.values(), key=lambda joined: joined.seconds)
        return f"{slowest.over}, formed in {slowest.seconds:.2f} s"

    def _backend_of(self, group: str) -> str:
        """Return what engines use: NCCL between target ranks alone."""
        return self._backend if group == TP else "gloo"

    def _device_of(self, worker: WorkerId, group: str) -> str:
        if group != TP:
            return "cpu"
        return self._devices[self._world if worker.role == "draft" else worker.rank]

    def _measurements(self, group: str, workers: list[WorkerId], what: Any = "broadcast") -> str:
        small = self._time(group, workers, what, SMALL)
        large = self._time(group, workers, what, LARGE)
        name = "broadcast" if what == "broadcast" else "one way"
        return f"{name} of 1 KiB {small * 1e3:.3f} ms, of 16 MiB {LARGE / large / 1e9:.2f} GB/s"

    def _time(self, group: str, workers: list[WorkerId], what: Any, num_bytes: int) -> float:
        """Return the seconds of one operation, on the slowest rank."""
        order = Measure(group, what, num_bytes, SMALL_REPEATS if num_bytes == SMALL else LARGE_REPEATS)
        replies = self._probes.call(dict.fromkeys(workers, order), Measured, REMEDIES[self._backend_of(group)])
        return max(reply.seconds for reply in replies.values())
