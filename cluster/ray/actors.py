"""The Ray actors' base: one long `run()`, and a second concurrency group for control calls.

An actor that serves, or is stuck, can still be asked where it is, or be ended.
"""

import logging
import os
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import ray

from cluster.ray.cluster import node_address, set_missing_variables
from cluster.transport.worker_process import WorkerSpec, run_worker
from protos.worker_messages import WorkerId
from runtime.metrics.logs import log_to_stderr
from workers.process.prepare import prepare

CONCURRENCY_GROUPS = {"serve": 1, "control": 1}
"""Threads of an actor's concurrency groups."""


LOOPBACK = "127.0.0.1"


class ProcessLocation(NamedTuple):
    """A process id, and the machine (boot id and PID namespace) in which it is valid."""

    machine: str
    pid: int


def this_process() -> ProcessLocation:
    """Return the location of this process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ProcessLocation(f"{boot} {Path('/proc/self/ns/pid').readlink()}", os.getpid())


class ActorBase:
    """The control calls of all our actors."""

    @ray.method(concurrency_group="control")
    def location(self) -> ProcessLocation:
        """Return the location of the actor's process."""
        return this_process()

    @ray.method(concurrency_group="control")
    def leave(self) -> None:
        """End the process at once."""
        os._exit(0)


class WorkerActor(ActorBase):
    """A process that becomes one worker of a group.

    Args:
        environment: variables to set if they are unset.
        is_near: whether all workers are on one node.
    """

    def __init__(self, environment: dict[str, str], is_near: bool) -> None:
        set_missing_variables(environment)
        self._is_near = is_near
        log_to_stderr(level=logging.WARNING)  # progress is logged by the controller
        self._worker: WorkerId | None = None

    @ray.method(concurrency_group="control")
    def prepare(self, config: str) -> int:
        """Import what a worker of *config*, an `EngineConfig` as JSON, needs; return the process id."""
        prepare(config)
        return os.getpid()

    @ray.method(concurrency_group="control")
    def role(self) -> str:
        """Return the name of the worker that this process is; empty while it waits to become one."""
        return "" if self._worker is None else str(self._worker)

    @ray.method(concurrency_group="serve")
    def run(self, spec: bytes, environment: dict[str, str]) -> None:
        """Run a worker until its body returns.

        Args:
            spec: a `WorkerSpec`, as msgpack.
            environment: variables to set, whether or not they are set.
        """
        os.environ.update(environment)
        decoded = msgspec.msgpack.decode(spec, type=WorkerSpec)
        self._worker = decoded.worker
        run_worker(decoded, LOOPBACK if self._is_near else node_address(), this_process().machine)


def remote(cls: type) -> Any:
    """Return *cls* as a Ray actor class. Options are given per actor."""
    decorate: Any = ray.remote  # Ray's types lack this option
    return decorate(concurrency_groups=CONCURRENCY_GROUPS)(cls)
