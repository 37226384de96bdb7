"""What `slipstream doctor` checks: devices, real process groups, and a pair that is formed again after a SIGKILL.

It works with plain child processes of this machine, over the groups that engines use: shared memory and gloo on CPUs,
NCCL on GPUs.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, TypeVar

from cluster.transport.process_workers import ProcessWorkerGroup
from protos.doctor_messages import FromExamined, Join, Joined, Leave, Measure, Measured, Seen, Trouble
from protos.errors import SlipstreamError
from protos.worker_messages import Died, WorkerId

BODY = "workers.process.diagnostics:serve"
START_S = 120.0
"""A process that imports torch is there after this long, even on a busy machine."""
ANSWER_S = 60.0
SMALL, LARGE = 1 << 10, 16 << 20
SMALL_REPEATS, LARGE_REPEATS = 200, 6
TARGET, DRAFT = WorkerId("target"), WorkerId("draft")
TP = "tp"
CPU_WORLD = 2
"""Ranks to check with where there are no devices to count."""

START = "run `python -c 'import torch'` with the same Python; what it says is what is wrong"
NO_CUDA = (
    "see whether `nvidia-smi` lists the devices, CUDA_VISIBLE_DEVICES hides none, and torch is a CUDA build "
    "(`slipstream env` shows it); or use --device cpu"
)
TOO_FEW = "lower --tensor-parallel-size; a draft can live beside the target (placement: colocated)"
GLOO = "a firewall or a sandbox may keep processes of this machine from connecting to each other on 127.0.0.1: allow it"
NCCL = (
    "run again with NCCL_DEBUG=INFO to see where it stops; in a container give it room in /dev/shm (--ipc=host or "
    "--shm-size=1g); if NCCL_P2P_DISABLE=1 helps, the devices cannot reach each other's memory (IOMMU or ACS)"
)
REMEDIES = {"gloo": GLOO, "nccl": NCCL}

Answer = TypeVar("Answer", Seen, Joined, Measured, Died)


class CheckFailedError(SlipstreamError):
    """Something is wrong; `remedy` says how to mend it."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


@dataclass(frozen=True)
class DoctorOptions:
    """What to check. `world` is the number of target ranks, None for as many as there are devices.

    With `may_share`, several ranks use one device, which NCCL has to be told to allow.
    """

    world: int | None = None
    device: str = "auto"
    may_share: bool = False


@dataclass(frozen=True)
class ProbeProcesses:
    """The processes, and how to speak to them."""

    gang: ProcessWorkerGroup

    @classmethod
    def open(cls, body: str = BODY) -> "ProbeProcesses":
        """Return a ward without anybody in it."""
        return cls(
            ProcessWorkerGroup(
                body, speaks="protos.doctor_messages:FromExamined", hears="protos.doctor_messages:ToExamined"
            )
        )

    def admit(self, workers: Seq[WorkerId]) -> dict[WorkerId, Seen]:
        """Start *workers*; return what each says that it has."""
        self.gang.start(workers)
        return self.wait(workers, Seen, START_S, START)

    def ask(self, orders: Mapping[WorkerId, Join | Measure], kind: type[Answer], remedy: str) -> dict[WorkerId, Answer]:
        """Give each worker its order; return what each answers."""
        for worker, order in orders.items():
            self.gang.send(worker, order)
        return self.wait(tuple(orders), kind, ANSWER_S, remedy)

    def wait(self, workers: Seq[WorkerId], kind: type[Answer], limit_s: float, remedy: str) -> dict[WorkerId, Answer]:
        """Return each worker's next message, which must be of *kind*.

        Raises:
            CheckFailedError: something else came, or nothing.
        """
        answers: dict[WorkerId, Answer] = {}
        deadline = time.monotonic() + limit_s
        while missing := [worker for worker in workers if worker not in answers]:
            if time.monotonic() > deadline:
                raise CheckFailedError(f"no answer from {', '.join(map(str, missing))} within {limit_s:.0f} s", remedy)
            for worker, message in self.gang.receive(0.25):
                if not isinstance(message, kind):
                    raise CheckFailedError(f"{worker}: {_complaint(message)}", remedy)
                answers[worker] = message
        return answers


def _complaint(message: FromExamined) -> str:
    return message.reason if isinstance(message, Trouble | Died) else f"said {type(message).__name__} out of turn"


class Examination:
    """One run of all checks of this machine.

    Args:
        wanted: what to check.
        ward: where the processes are; owned by whoever made it.
    """

    def __init__(self, wanted: DoctorOptions, ward: ProbeProcesses) -> None:
        self._wanted, self._ward = wanted, ward
        self._seen: dict[WorkerId, Seen] = {}
        self._devices: list[str] = []
        self._world = 0
        self._backend = "gloo"

    def checks(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Yield each check by name; it says what it found. A check needs those before it to have passed."""
        yield "devices", self._look
        if self._world > 1 or self._backend == "nccl":
            yield "tp group", self._tp
        if len(self._devices) > self._world:
            yield "pair group", self._pair
            yield "pair after a kill", self._pair_again

    @property
    def has_draft(self) -> bool:
        """Whether there is a device for a draft of its own."""
        return len(self._devices) > self._world

    @property
    def _targets(self) -> list[WorkerId]:
        return [WorkerId("target", rank) for rank in range(self._world)]

    def _look(self) -> str:
        self._seen = self._ward.admit([TARGET])
        seen = self._seen[TARGET]
        self._settle(seen)
        versions = f"torch {seen.torch}"
        if self._backend == "gloo":
            return f"{versions}, on the CPU: {self._world} target rank(s) and a draft"
        count = len(seen.devices)
        kinds = ", ".join(f"{seen.devices.count(name)} x {name}" for name in sorted(set(seen.devices)))
        text = f"{kinds}; {versions}, CUDA {seen.cuda}, NCCL {seen.nccl}; target ranks on {self._world} of {count}"
        return text if self.has_draft else f"{text}; none is left for a draft of its own, so no pair is checked"

    def _settle(self, seen: Seen) -> None:
        """Settle who runs where."""
        count, world = len(seen.devices), self._wanted.world
        if self._wanted.device == "cuda" and not count:
            raise CheckFailedError(f"torch {seen.torch} sees no CUDA device", NO_CUDA)
        if self._wanted.device == "cpu" or not count:
            self._world = world or CPU_WORLD
            self._devices = ["cpu"] * (self._world + 1)
            return
        self._backend, self._world = "nccl", world or max(1, count - 1)
        if self._world > count and not self._wanted.may_share:
            raise CheckFailedError(f"{self._world} target ranks need as many devices, there are {count}", TOO_FEW)
        num_ranks = self._world + 1 if self._wanted.may_share else min(self._world + 1, count)
        self._devices = [f"cuda:{rank % count}" for rank in range(num_ranks)]

    def _tp(self) -> str:
        targets = self._targets
        self._seen |= self._ward.admit(targets[1:])
        return f"{self._world} rank(s) over {self._form(TP, targets)}; {self._figures(TP, targets)}"

    def _pair(self) -> str:
        self._seen |= self._ward.admit([DRAFT])
        formed = self._form("pair/1", [TARGET, DRAFT])
        figures = self._figures("pair/1", [TARGET, DRAFT], "ping")
        return f"target rank 0 and the draft over {formed}; {figures}"

    def _pair_again(self) -> str:
        noticed = self._kill_draft()
        self._ward.gang.send(TARGET, Leave("pair/1"))
        again = WorkerId("draft", incarnation=1)
        started = time.monotonic()
        self._ward.admit([again])
        self._form("pair/2", [TARGET, again])
        seconds = time.monotonic() - started
        self._time("pair/2", [TARGET, again], "ping", SMALL)
        if self._world > 1:
            self._time(TP, self._targets, "broadcast", SMALL)
        return f"the death was noticed after {noticed:.2f} s, another draft was paired after {seconds:.1f} s"

    def _kill_draft(self) -> float:
        """Return how many seconds it took until the death was noticed."""
        pid, started = self._ward.gang.pid(DRAFT), time.monotonic()
        if pid is None:
            raise CheckFailedError("the draft is gone", START)
        os.kill(pid, signal.SIGKILL)
        self._ward.wait([DRAFT], Died, ANSWER_S, "the system does not tell that child processes ended: is it stuck?")
        return time.monotonic() - started

    def _form(self, group: str, workers: list[WorkerId]) -> str:
        """Form *group* of *workers*, in the order of its ranks; say over what, and how long the slowest took."""
        store, size = self._seen[TARGET].store, len(workers)
        orders = {
            worker: Join(group, store, rank, size, self._backend, self._device_of(worker), is_near=group == TP)
            for rank, worker in enumerate(workers)
        }
        answers = self._ward.ask(orders, Joined, REMEDIES[self._backend])
        slowest = max(answers.values(), key=lambda joined: joined.seconds)
        return f"{slowest.over}, formed in {slowest.seconds:.2f} s"

    def _device_of(self, worker: WorkerId) -> str:
        return self._devices[self._world if worker.role == "draft" else worker.rank]

    def _figures(self, group: str, workers: list[WorkerId], what: Any = "broadcast") -> str:
        small = self._time(group, workers, what, SMALL)
        large = self._time(group, workers, what, LARGE)
        name = "broadcast" if what == "broadcast" else "one way"
        return f"{name} of 1 KiB {small * 1e3:.3f} ms, of 16 MiB {LARGE / large / 1e9:.2f} GB/s"

    def _time(self, group: str, workers: list[WorkerId], what: Any, num_bytes: int) -> float:
        """Return the seconds of one operation, as the slowest rank saw it."""
        order = Measure(group, what, num_bytes, SMALL_REPEATS if num_bytes == SMALL else LARGE_REPEATS)
        answers = self._ward.ask(dict.fromkeys(workers, order), Measured, REMEDIES[self._backend])
        return max(answer.seconds for answer in answers.values())
