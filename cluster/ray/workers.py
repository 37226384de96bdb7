"""A gang of Ray actors, each pinned to its own bundle of the replica's placement group."""

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from cluster.ray.actors import Whereabouts, WorkerActor, here, remote
from cluster.ray.cluster import node_address, passed_on
from cluster.ray.placement import CONTROLLER, Placement
from cluster.transport.process_workers import BODY
from cluster.transport.worker_process import WorkerSpec
from cluster.transport.zmq_hub import ZmqHub
from protos.errors import PlacementError
from protos.worker_messages import Died, FromWorker, Placed, ToWorker, WorkerId

RAY_KILL_S = 0.1
"""Ray ends a process that can hear within this; one that is frozen would be ended after five seconds, so we do it."""
GONE_S = 10.0
"""A process that was killed is gone within this, or its node is."""


@dataclass
class Hired:
    """An actor: how to reach it, what will tell that it ended, and where it said that it is."""

    actor: Any
    ended: "Future[Any]"
    place: Whereabouts | None = None

    @classmethod
    def hire(cls, actor: Any) -> "Hired":
        """Set an actor running."""
        return cls(actor, actor.run.remote().future())

    def end(self) -> None:
        """Ask Ray to end it, without waiting."""
        ray.kill(self.actor)

    def wait_gone(self) -> None:
        """Return when its process is gone; to be called after `end`."""
        place = self.place
        if place is None or place.machine != here().machine:
            with contextlib.suppress(RayError, FutureTimeout):
                self.ended.result(GONE_S)
        elif not gone_within(place.pid, RAY_KILL_S):
            with contextlib.suppress(ProcessLookupError):
                os.kill(place.pid, signal.SIGKILL)
            gone_within(place.pid, GONE_S)


def gone_within(pid: int, seconds: float) -> bool:
    """Whether process *pid* of this machine ends within *seconds*; a zombie has ended."""
    deadline = time.monotonic() + seconds
    while is_running(pid):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.005)
    return True


def is_running(pid: int) -> bool:
    """Whether process *pid* of this machine runs, or is stopped."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def why(ended: "Future[Any]") -> str:
    """Say in a line why an actor's `run` is over."""
    error = ended.exception()
    if error is None:
        return "it left its loop"
    if isinstance(error, RayTaskError):
        return f"it failed: {type(error.cause).__name__}: {error.cause}"
    detail = re.search(r"Worker exit detail: (.*?)(?:\.\s|\.?$)", str(error), re.DOTALL)
    text = detail[1] if detail else (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"its process ended: {text}"


class RayWorkerGroup:
    """A `protos.worker_messages.WorkerGroup`. Made in bundle 0 by the process that owns the actors: they die with it.

    Args:
        placement: the replica's bundles.
        body: "module:function" that is a worker's whole life, called with its `Port`.
    """

    def __init__(self, placement: Placement, body: str = BODY) -> None:
        self._is_near = set(placement.nodes) == {placement.nodes[CONTROLLER]}
        self._hub = ZmqHub(None if self._is_near else node_address())
        self._placement, self._body = placement, body
        self._environment = passed_on()
        self._hired: dict[WorkerId, Hired] = {}
        self._is_closed = False

    def start(self, workers: Seq[WorkerId]) -> None:
        """See `WorkerGroup`. An actor whose bundle's node is gone waits until Ray has placed the bundle again."""
        for worker in workers:
            self._hub.register(worker)
            spec = msgspec.msgpack.encode(WorkerSpec(self._hub.endpoint, worker, self._body))
            options = self._placement.options(self._placement.plan.bundle_of(worker), str(worker))
            hired = Hired.hire(remote(WorkerActor).options(**options).remote(spec, self._environment, self._is_near))
            self._hired[worker] = hired
            hired.ended.add_done_callback(partial(self._notice, worker))

    def _notice(self, worker: WorkerId, ended: "Future[Any]") -> None:
        """Say that a worker is gone; runs in a thread of Ray's."""
        self._hub.post(worker, Died(why(ended)))

    def send(self, worker: WorkerId, message: ToWorker) -> None:
        """See `WorkerGroup`."""
        self._hub.send(worker, message)

    def receive(self, timeout_s: float) -> list[tuple[WorkerId, FromWorker]]:
        """See `WorkerGroup`."""
        mail = self._hub.receive(timeout_s)
        for worker, message in mail:
            if isinstance(message, Placed) and worker in self._hired:
                self._hired[worker].place = Whereabouts(message.node, message.pid)
        return mail

    def kill(self, workers: Seq[WorkerId], *, waits: bool = True) -> None:
        """See `WorkerGroup`."""
        ending = [hired for worker in workers if (hired := self._hired.pop(worker, None)) is not None]
        for worker in workers:
            self._hub.unregister(worker)
        for hired in ending:
            hired.end()
        for hired in ending:
            if waits:
                hired.wait_gone()
            else:
                threading.Thread(target=hired.wait_gone, name="slipstream-ending", daemon=True).start()

    def stack_dump(self, worker: WorkerId, timeout_s: float = 5.0) -> str:
        """Return the stacks of all threads of *worker*, which may be stuck.

        Raises:
            PlacementError: it is not there, or does not answer.
        """
        hired = self._hired.get(worker)
        try:
            if hired is not None:
                return str(ray.get(hired.actor.stack_dump.remote(), timeout=timeout_s))
        except (RayActorError, TimeoutError) as error:
            raise PlacementError(f"{worker} does not answer: {type(error).__name__}") from error
        raise PlacementError(f"{worker} is not there")

    def close(self) -> None:
        """See `WorkerGroup`. The placement group is given back by whoever made it."""
        if not self._is_closed:
            self._is_closed = True
            self.kill(list(self._hired))
            self._hub.close()
