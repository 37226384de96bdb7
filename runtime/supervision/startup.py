"""Starts workers together: place, set up, load, allocate, warm up; and assigns their devices."""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq

from protos.errors import ConfigError, EngineDeadError, ModelError, PlacementError, SlipstreamError
from protos.messages import StepCosts
from protos.worker_messages import (
    Allocate,
    Died,
    FromWorker,
    Loaded,
    Placed,
    Rejoin,
    Setup,
    StoreAddress,
    WorkerFailed,
    WorkerGroup,
    WorkerId,
    WorkerReady,
)

RANK_0 = 0
ERRORS: dict[str, type[SlipstreamError]] = {
    error.__name__: error for error in (ConfigError, ModelError, PlacementError, EngineDeadError)
}

Device = tuple[str, str]
"""A device by node and name."""

DecideBlocks = Callable[[Mapping[WorkerId, Loaded]], Allocate]
"""Returns the number of KV blocks that all workers hold, once all have loaded. Raises `ConfigError`."""


class Devices:
    """Which worker has which device. Each worker gets the first free one of those that it sees.

    Args:
        wanted: the configuration's "auto", "cpu" or "cuda".
        may_share: whether one device may serve several workers if there are too few.
    """

    def __init__(self, wanted: str, *, may_share: bool = False) -> None:
        self._wanted, self._may_share = wanted, may_share
        self._taken: dict[WorkerId, Device] = {}

    def assign(self, worker: WorkerId, placed: Placed) -> str:
        """Return the name of the device in the process of *worker*.

        Raises:
            PlacementError: it sees no device but must have one, or none of them is free.
        """
        if self._wanted == "cuda" and not placed.devices:
            raise PlacementError(f"{worker} on {placed.node} sees no CUDA device; use device='cpu' or 'auto'")
        if self._wanted == "cpu" or not placed.devices:
            return "cpu"
        taken = list(self._taken.values())
        seen = [(placed.node, name) for name in placed.devices]
        free = [device for device in seen if device not in taken]
        if not free and not self._may_share:
            raise PlacementError(
                f"{worker} on {placed.node} sees {len(seen)} device(s), and all are taken: {len(taken) + 1} workers "
                "need as many devices; lower tensor_parallel_size or use placement 'colocated' for the draft"
            )
        self._taken[worker] = min(free or seen, key=taken.count)
        return f"cuda:{seen.index(self._taken[worker])}"

    def release(self, workers: Iterable[WorkerId]) -> None:
        """Free the devices of these workers."""
        for worker in workers:
            self._taken.pop(worker, None)


class StartError(Exception):
    """A worker failed or died before it was ready.

    Attributes:
        error: the error for the caller of the engine.
        is_death: whether its process ended, or was silent, and did not say why.
    """

    def __init__(self, worker: WorkerId, message: WorkerFailed | Died) -> None:
        kind = message.kind if isinstance(message, WorkerFailed) else EngineDeadError.__name__
        known = kind in ERRORS and kind != EngineDeadError.__name__
        what = "failed" if isinstance(message, WorkerFailed) else "died"
        text = message.reason if known else f"{worker} {what} while it was started: {message.reason}"
        super().__init__(text)
        self.is_death = isinstance(message, Died)
        self.error: SlipstreamError = ERRORS.get(kind, EngineDeadError)(text)


class GroupStartup:
    """Brings workers from placement to readiness; each phase begins when all have finished the one before.

    Args:
        group: starts the workers and carries their messages.
        workers: which to start.
        setup: the fields of `Setup` that all have in common.
        devices: where their devices are recorded.
        decide_blocks: see `DecideBlocks`.
        before: the startup of the group that this one follows. Those of *workers* that it started still run: they keep
            their weights and devices, and are told to form the next group.
    """

    def __init__(
        self,
        group: WorkerGroup,
        workers: Seq[WorkerId],
        setup: Setup,
        devices: Devices,
        decide_blocks: DecideBlocks,
        *,
        before: "GroupStartup | None" = None,
    ) -> None:
        self.workers = tuple(workers)
        self._group, self._setup, self._devices, self._decide_blocks = group, setup, devices, decide_blocks
        self.placed: dict[WorkerId, Placed] = {}
        self.devices: dict[WorkerId, str] = {}
        if before is not None:
            self.placed = {worker: placed for worker, placed in before.placed.items() if worker in workers}
            self.devices = {worker: before.devices[worker] for worker in self.placed}
        self.survivors = frozenset(self.placed)
        self._loaded: dict[WorkerId, Loaded] = {}
        self._ready: dict[WorkerId, WorkerReady] = {}

    def start(self) -> None:
        """Start the worker processes, but for those that still run."""
        if self.is_placed:
            self._set_up()
        else:
            self._group.start(self.lacking)

    def replace(self, survivor: WorkerId, other: WorkerId) -> None:
        """Start *other* instead of *survivor*, which does not run after all; while others are missing, too."""
        self._devices.release([survivor])
        self._group.kill([survivor])
        self.workers = tuple(other if worker == survivor else worker for worker in self.workers)
        self.survivors -= {survivor}
        del self.placed[survivor], self.devices[survivor]
        self._group.start([other])

    def may_be_elsewhere(self, worker: WorkerId, machine: str) -> bool:
        """Whether *worker* is, or may be, on another machine than *machine*; never if that has no name."""
        placed = self.placed.get(worker)
        return bool(machine) and (placed is None or placed.node != machine)

    @property
    def late_survivors(self) -> list[WorkerId]:
        """The workers that still ran, and have not formed the next group."""
        return sorted(self.survivors - self._loaded.keys())

    @property
    def is_placed(self) -> bool:
        """Whether every process runs."""
        return len(self.placed) == len(self.workers)

    @property
    def lacking(self) -> list[WorkerId]:
        """The workers whose processes do not run."""
        return [worker for worker in self.workers if worker not in self.placed]

    @property
    def is_ready(self) -> bool:
        """Whether all wait for plans."""
        return len(self._ready) == len(self.workers)

    @property
    def store(self) -> StoreAddress | None:
        """Address of target rank 0's store, None before it was placed."""
        return next((placed.store for worker, placed in self.placed.items() if _is_rank_0(worker)), None)

    @property
    def loaded(self) -> dict[WorkerId, Loaded]:
        """What the workers reported after loading."""
        return self._loaded

    def measured(self, worker: WorkerId) -> WorkerReady:
        """Return what *worker* measured in warm-up."""
        return self._ready[worker]

    @property
    def waits_for(self) -> str:
        """The current phase, and the workers that have not finished it."""
        phases = (("to be placed", self.placed), ("to load", self._loaded), ("to warm up", self._ready))
        for phase, finished in phases:
            missing = [str(worker) for worker in self.workers if worker not in finished]
            if missing:
                return f"{', '.join(missing)} {phase}"
        return "no worker"

    def take(self, worker: WorkerId, message: FromWorker) -> None:
        """Record a worker's message; if it was the last one of a phase, begin the next.

        Raises:
            StartError: the worker failed or died.
            ConfigError: the workers have too little memory.
            PlacementError: there are too few devices.
        """
        if isinstance(message, WorkerFailed | Died):
            raise StartError(worker, message)
        if isinstance(message, Placed):
            self.placed[worker] = message
            if self.is_placed:
                self._set_up()
        elif isinstance(message, Loaded):
            self._loaded[worker] = message
            if len(self._loaded) == len(self.workers):
                self._allocate()
        elif isinstance(message, WorkerReady):
            self._ready[worker] = message

    def _set_up(self) -> None:
        for worker in sorted(self.workers, key=lambda worker: (worker.role == "draft", worker.rank)):
            if worker not in self.survivors:
                self.devices[worker] = self._devices.assign(worker, self.placed[worker])
        for worker in self.workers:
            if worker in self.survivors and self.store is not None:
                self._group.send(worker, Rejoin(self.store, self._setup.group))
            else:
                self._group.send(worker, self._setup_of(worker))

    def _setup_of(self, worker: WorkerId) -> Setup:
        common, device = self._setup, self.devices[worker]
        return Setup(
            config=common.config,
            worker=worker,
            world=common.world,
            device=device,
            backend=common.backend or ("gloo" if device == "cpu" else "nccl"),
            store=self.store if worker.role == "target" and common.world > 1 else None,
            group=common.group,
        )

    def _allocate(self) -> None:
        allocate = self._decide_blocks(self._loaded)
        for worker in self.workers:
            self._group.send(worker, allocate)


def step_costs(startup: GroupStartup, rank_0: WorkerId, drafts: Seq[WorkerId]) -> StepCosts:
    """Return the costs that *rank_0*, and a draft on a worker of its own if there is one, have measured."""
    measured = startup.measured(rank_0)
    return StepCosts(measured.step_s, startup.measured(drafts[0]).step_s if drafts else measured.draft_s)


def _is_rank_0(worker: WorkerId) -> bool:
    return worker.role == "target" and worker.rank == RANK_0
