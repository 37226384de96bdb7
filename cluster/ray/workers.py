"""A worker group of Ray actors, each in its own bundle of the replica's placement group."""

import contextlib
import os
import re
import signal
import threading
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError, RayTaskError

from cluster.ray.actors import ProcessLocation, WorkerActor, remote, this_process
from cluster.ray.cluster import forwarded_variables, node_address
from cluster.ray.placement import CONTROLLER, Placement
from cluster.ray.processes import gone_within
from cluster.ray.spares import Spares
from cluster.transport.process_workers import BODY
from cluster.transport.worker_process import WorkerSpec
from cluster.transport.zmq_hub import ZmqHub
from protos.worker_messages import Died, FromWorker, Heartbeat, Placed, ToWorker, WorkerId

RAY_KILL_S = 0.1
"""Ray kills a responsive process within this time. It would wait five seconds for a frozen one, so we kill that."""
SPARE, NEW = "taken from the spares", "placed"
"""Stages of workers that have sent nothing themselves."""
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
GONE_S = 10.0
"""A killed process is gone within this time, or its node is lost."""


@dataclass
class RunningActor:
    """An actor whose `run` was called: its handle, the future of `run`, and its process if known."""

    handle: Any
    ended: "Future[Any]"
    location: ProcessLocation | None = None

    @classmethod
    def start(cls, handle: Any, *arguments: Any) -> "RunningActor":
        """Call the actor's `run`."""
        return cls(handle, handle.run.remote(*arguments).future())

    def end(self) -> None:
        """Make Ray kill it, without waiting."""
        ray.kill(self.handle)

    def wait_gone(self) -> None:
        """Wait until its process is gone. Call `end` first."""
        location = self.location
        if location is None or location.machine != this_process().machine:
            with contextlib.suppress(RayError, FutureTimeout):
                self.ended.result(GONE_S)
        elif not gone_within(location.pid, RAY_KILL_S):
            with contextlib.suppress(ProcessLookupError):
                os.kill(location.pid, signal.SIGKILL)
            gone_within(location.pid, GONE_S)


def end_reason(ended: "Future[Any]") -> str:
    """Describe in a line why an actor's `run` ended."""
    error = ended.exception()
    if error is None:
        return "its loop ended"
    if isinstance(error, RayTaskError):
        return f"it failed: {type(error.cause).__name__}: {error.cause}"
    detail = re.search(r"Worker exit detail: (.*?)(?:\.\s|\.?$)", str(error), re.DOTALL)
    text = detail[1] if detail else (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"its process ended: {text}"


class RayWorkerGroup:
    """A `protos.worker_messages.WorkerGroup`. Made in bundle 0 by the process that owns the actors: they die with it.

    Args:
        placement: the replica's bundles.
        body: "module:function" that a worker runs, called with its `Port`.
        spares: the processes that wait to replace a lost worker; default: none.
    """

    def __init__(self, placement: Placement, body: str = BODY, spares: Spares | None = None) -> None:
        self._is_near = set(placement.nodes) == {placement.nodes[CONTROLLER]}
        self._hub = ZmqHub(None if self._is_near else node_address())
        self._placement, self._body = placement, body
        self._environment = forwarded_variables()
        self._actors: dict[WorkerId, RunningActor] = {}
        self._spares = Spares(placement) if spares is None else spares
        self._bundles: dict[WorkerId, int] = {}
        self._unreached: set[int] = set()  # bundles whose last worker was ended before it had said anything
        self._devices: dict[int, str] = {}  # CUDA_VISIBLE_DEVICES of the workers by bundle
        self._is_closed = False

    def start(self, workers: Seq[WorkerId]) -> None:
        """See `WorkerGroup`. An actor whose bundle's node is gone waits until Ray has placed the bundle again."""
        self._choose_bundles(workers)
        for worker in workers:
            self._hub.register(worker)
            spec = msgspec.msgpack.encode(WorkerSpec(self._hub.endpoint, worker, self._body))
            is_usual = self._bundles[worker] == self._placement.plan.bundle_of(worker)
            spare = self._spares.take(worker) if is_usual else None
            handle = self._new_actor(worker) if spare is None else spare
            actor = RunningActor.start(handle, spec, {} if spare is None else self._device_of(worker))
            self._actors[worker] = actor
            actor.ended.add_done_callback(partial(self._notice, worker))
            if spare is None:
                handle.location.remote().future().add_done_callback(partial(self._notice_process, worker))
            else:
                self._hub.post(worker, Heartbeat(SPARE))

    def _choose_bundles(self, workers: Seq[WorkerId]) -> None:
        """Choose the workers' bundles: their own; but if all target ranks are started again, those with a node first.

        There may be fewer ranks than bundles then, because some bundles have lost their nodes. Ray notices that much
        later than a worker that does not start, so bundles where the last one did not come last.
        """
        plan = self._placement.plan
        self._bundles |= {worker: plan.bundle_of(worker) for worker in workers}
        ranks = sorted(worker for worker in workers if worker.role == "target")
        is_again = any(worker.incarnation for worker in ranks)
        if is_again and not any(worker.role == "target" for worker in self._actors):
            bundles = sorted(self._placement.target_bundles(), key=self._unreached.__contains__)
            self._bundles |= dict(zip(ranks, bundles, strict=False))

    def _new_actor(self, worker: WorkerId) -> Any:
        options = self._placement.options(self._bundles[worker], str(worker))
        return remote(WorkerActor).options(**options).remote(self._environment, self._is_near)

    def _device_of(self, worker: WorkerId) -> dict[str, str]:
        """Return the variable that gives a spare, which has no device, that of the worker before."""
        visible = self._devices.get(self._bundles[worker])
        return {} if visible is None else {VISIBLE_DEVICES: visible}

    def prepare_spare(self) -> None:
        """See `WorkerGroup`."""
        self._spares.prepare(self._environment, self._is_near)

    def _notice_process(self, worker: WorkerId, located: "Future[Any]") -> None:
        """Post a first heartbeat once the process runs: from now on its silence counts. Runs in a thread of Ray."""
        if located.exception() is None:
            self._hub.post(worker, Heartbeat(NEW))

    def _notice(self, worker: WorkerId, ended: "Future[Any]") -> None:
        """Post `Died`; runs in a thread of Ray."""
        self._hub.post(worker, Died(end_reason(ended)))

    def send(self, worker: WorkerId, message: ToWorker) -> None:
        """See `WorkerGroup`."""
        self._hub.send(worker, message)

    def receive(self, timeout_s: float) -> list[tuple[WorkerId, FromWorker]]:
        """See `WorkerGroup`."""
        messages = self._hub.receive(timeout_s)
        for worker, message in messages:
            if isinstance(message, Placed) and worker in self._actors:
                self._actors[worker].location = ProcessLocation(message.node, message.pid)
                self._unreached.discard(self._bundles[worker])
                if message.visible_devices is not None:
                    self._devices[self._bundles[worker]] = message.visible_devices
        return messages

    def kill(self, workers: Seq[WorkerId], *, waits: bool = True) -> None:
        """See `WorkerGroup`."""
        ending = []
        for worker in workers:
            self._hub.unregister(worker)
            actor = self._actors.pop(worker, None)
            if actor is not None:
                ending.append(actor)
                if actor.location is None:
                    self._unreached.add(self._bundles[worker])
        for actor in ending:
            actor.end()
        for actor in ending:
            if waits:
                actor.wait_gone()
            else:
                threading.Thread(target=actor.wait_gone, name="slipstream-ending", daemon=True).start()

    def close(self) -> None:
        """See `WorkerGroup`. The placement group is released by its owner."""
        if not self._is_closed:
            self._is_closed = True
            self._spares.close()
            self.kill(list(self._actors))
            self._hub.close()
