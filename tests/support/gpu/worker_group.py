"""Worker groups whose every worker has a pretended GPU: what each round asked of each rank."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

import pytest

from protos.messages import RoundPlan
from protos.worker_messages import Port, RoundDone
from tests.support.distributed import fake_nccl
from tests.support.distributed.engine import PATIENT_S, Engine
from tests.support.distributed.fake_nccl import Records
from tests.support.gpu.counts import Counts
from tests.support.gpu.machine import Machine, pretended_cuda
from tests.support.gpu.pretend import pretended
from tests.support.processes import wait_until
from workers.process import main as worker_process
from workers.target_rank import TargetRank


@dataclass
class PretendedWorkers:
    """The machines of workers that are threads, and what ran on them, by the name of the worker.

    Attributes:
        nccl: operations between ranks.
        machines: of all workers.
        ranks: what runs the rounds of target ranks.
        rounds: every plan, and what its round asked of the device.
    """

    nccl: Records
    machines: dict[str, Machine] = field(default_factory=dict)
    ranks: dict[str, TargetRank] = field(default_factory=dict)
    rounds: dict[str, list[tuple[RoundPlan, Counts]]] = field(default_factory=dict)

    def serve(self, port: Port) -> None:
        """Be a worker on a machine of its own."""
        with Machine() as machine:
            self.machines[threading.current_thread().name] = machine
            worker_process.serve(port, floor_s=PATIENT_S)

    def finish(self, engine: Engine) -> dict[str, list[int]]:
        """Run *engine* to the end, and its last round on every rank: rank 0 has a result before the others are done."""
        outputs = engine.finish()
        lengths = self.rounds.values()
        wait_until(lambda: len(set(map(len, lengths))) == 1, 60.0, "the last round of all ranks")
        return outputs

    def of(self, rank: int) -> list[tuple[RoundPlan, Counts]]:
        """Return the rounds of a target rank."""
        return self.rounds[f"target rank {rank}"]

    def decoding(self, rank: int) -> list[tuple[RoundPlan, Counts]]:
        """Return those in which all rows decode."""
        return [(plan, counts) for plan, counts in self.of(rank) if plan.decodes]


@contextlib.contextmanager
def pretended_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedWorkers]:
    """Let workers in threads have a pretended GPU each, and a stand-in for NCCL between them."""
    workers = PretendedWorkers(fake_nccl.install(monkeypatch))
    run = TargetRank.run

    def counted(rank: TargetRank, plan: RoundPlan) -> RoundDone | None:
        name, machine = threading.current_thread().name, pretended()
        assert machine is not None
        workers.ranks[name] = rank
        machine.reset()
        done = run(rank, plan)
        workers.rounds.setdefault(name, []).append((plan, machine.reset()))
        return done

    with pretended_cuda(), mock.patch.object(TargetRank, "run", counted):
        yield workers
