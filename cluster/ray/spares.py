"""Spare processes of a worker group: actors that have imported everything, and wait to become a worker.

A spare holds no model, no device memory and none of Ray's resources. It runs in the bundle of target rank 0, and can
replace a worker on the same node.
"""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from cluster.ray.actors import WorkerActor, remote
from cluster.ray.placement import CONTROLLER, Placement, actor_options
from cluster.ray.processes import is_running
from protos.worker_messages import WorkerId

BUNDLE_OF = WorkerId("target")
ANSWER_S = 1.0
"""A spare on another machine that does not answer within this time is not used."""


@dataclass(frozen=True)
class Spare:
    """An actor that waits. `prepared` returns its process id once everything is imported.

    `is_near`: whether it runs on the controller's machine.
    """

    handle: Any
    prepared: "Future[int]"
    is_near: bool

    @property
    def is_usable(self) -> bool:
        """Whether it runs; if it is not prepared yet, it is still ahead of a new process."""
        try:
            if not self.is_near:  # its machine may be gone, which Ray notices much later
                ray.get(self.handle.role.remote(), timeout=ANSWER_S)
                return True
            return not self.prepared.done() or is_running(self.prepared.result())
        except RayError:
            return False


class Spares:
    """The spares of one group. Used by the thread of its `RayWorkerGroup`.

    Args:
        placement: the replica's bundles.
        count: how many wait.
        config: the `EngineConfig`, as JSON: what to import depends on it.
    """

    def __init__(self, placement: Placement, count: int = 0, config: str = "") -> None:
        self._placement, self._count, self._config = placement, count, config
        self._bundle = placement.plan.bundle_of(BUNDLE_OF)
        self._waiting: list[Spare] = []
        self._num_started = 0

    def prepare(self, *arguments: Any) -> None:
        """Start those that are missing; *arguments* are those of `WorkerActor`."""
        self._waiting = [spare for spare in self._waiting if spare.is_usable]
        while len(self._waiting) < self._count:
            self._num_started += 1
            options = actor_options(self._placement.group, self._bundle, {})
            name = self._placement.name_of(f"spare {self._num_started}")
            handle = remote(WorkerActor).options(**options, name=name).remote(*arguments)
            is_near = self._placement.nodes[self._bundle] == self._placement.nodes[CONTROLLER]
            self._waiting.append(Spare(handle, handle.prepare.remote(self._config).future(), is_near))

    def take(self, worker: WorkerId) -> Any | None:
        """Return the handle of an actor that can become *worker*; None if there is none."""
        nodes = self._placement.nodes
        if worker.role != "target" or nodes[self._placement.plan.bundle_of(worker)] != nodes[self._bundle]:
            return None
        while self._waiting:
            spare = self._waiting.pop(0)
            if spare.is_usable:
                return spare.handle
        return None

    def close(self) -> None:
        """End all that wait."""
        while self._waiting:
            ray.kill(self._waiting.pop().handle)
