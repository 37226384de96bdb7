"""A worker group whose workers answer as the test says, and a clock that the test moves."""

from collections.abc import Sequence
from typing import Any

from protos.config.engine import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SpeculativeConfig
from protos.messages import RoundPlan, Row, Verdict, WorkerInfo
from protos.worker_messages import (
    Allocate,
    DraftChannelReady,
    FormDraftChannel,
    FromWorker,
    Heartbeat,
    Loaded,
    Placed,
    Plan,
    Rejoin,
    RoundDone,
    Setup,
    StoreAddress,
    ToWorker,
    WorkerId,
    WorkerReady,
)
from runtime.supervision.distributed_executor import DistributedExecutor

ONE, DRAFT = WorkerId("target"), WorkerId("draft")
STORE = StoreAddress("127.0.0.1", 1)


class Clock:
    """Seconds that the test moves forward."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class ScriptedGroup:
    """A group whose workers answer at once unless in `mute`; `post` adds messages, `receive` moves the clock."""

    def __init__(self, clock: Clock, blocks: dict[str, int] | None = None) -> None:
        self.clock, self.blocks = clock, blocks or {}
        self.messages: list[tuple[WorkerId, FromWorker]] = []
        self.sent: list[tuple[WorkerId, ToWorker]] = []
        self.started: list[WorkerId] = []
        self.killed: list[WorkerId] = []
        self.mute: set[WorkerId] = set()
        self.homeless: set[WorkerId] = set()
        self.nodes: dict[int, str] = {}
        self.splits: tuple[int, ...] = ()
        self.is_closed = False

    def post(self, worker: WorkerId, message: FromWorker) -> None:
        self.messages.append((worker, message))

    def start(self, workers: Sequence[WorkerId]) -> None:
        self.started += workers
        for worker in workers:
            if worker not in self.homeless:
                self.post(worker, Placed("h", self.nodes.get(worker.rank, "node"), 1, (), STORE))

    def send(self, worker: WorkerId, message: ToWorker) -> None:
        self.sent.append((worker, message))
        if worker in self.mute:
            return
        if isinstance(message, Setup | Rejoin):
            info = WorkerInfo(self.blocks.get(worker.role, 64), 4, 1000, 97)
            self.post(worker, Loaded(info, 1, 10**9, 1, self.splits))
        elif isinstance(message, Allocate):
            self.post(worker, WorkerReady({1: 0.001}))
        elif isinstance(message, FormDraftChannel):
            self.post(worker, DraftChannelReady(message.epoch))
        elif isinstance(message, Plan) and worker.role == "target" and worker.rank == 0:
            self.post(worker, RoundDone(message.plan.round, [Verdict(0, [1])]))

    def receive(self, timeout_s: float) -> list[tuple[WorkerId, FromWorker]]:
        self.clock.now += timeout_s
        messages, self.messages = self.messages, []
        alive = [worker for worker in self.started if worker not in self.killed]
        quiet = self.mute | self.homeless
        beats = [(worker, Heartbeat("serving")) for worker in alive if worker not in quiet] if timeout_s else []
        return [(worker, message) for worker, message in [*messages, *beats] if worker in alive]

    def kill(self, workers: Sequence[WorkerId], *, waits: bool = True) -> None:
        self.killed += workers

    def prepare_spare(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


def make_executor(
    group: ScriptedGroup, clock: Clock, world: int = 1, *, draft: bool = True, machine: str = "", **parallel: Any
) -> DistributedExecutor:
    speculative = SpeculativeConfig("draft_model", 3, model="d", placement="dedicated") if draft else None
    config = EngineConfig(
        ModelConfig("m", enforce_eager=True),
        CacheConfig(block_size=4),
        speculative=speculative,
        parallel=ParallelConfig(tensor_parallel_size=world, executor="ray", **parallel),
    )
    return DistributedExecutor(group, config, lambda line: None, clock, machine=machine)


def make_plan(number: int = 0, epoch: int = 0) -> RoundPlan:
    return RoundPlan(number, [Row(0, 0, 4, 4, k=2 if epoch else 0)], epoch=epoch)
