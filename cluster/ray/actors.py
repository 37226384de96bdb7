"""What parks in Ray's processes: one long `run()`, and beside it a second group that tells where the process is.

So a worker that serves, or is stuck, can still be asked for its stacks.
"""

import logging
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import ray

from cluster.ray.cluster import adopt, node_address
from cluster.transport.worker_process import WorkerSpec, run_worker
from runtime.metrics.logs import log_to_stderr

GROUPS = {"serve": 1, "aside": 1}
"""Threads of an actor's two concurrency groups."""


LOOPBACK = "127.0.0.1"


class Whereabouts(NamedTuple):
    """A process: its id, and the machine (and container) in which that id means something."""

    machine: str
    pid: int


def here() -> Whereabouts:
    """Return where this process is."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return Whereabouts(f"{boot} {Path('/proc/self/ns/pid').readlink()}", os.getpid())


def stacks() -> str:
    """Return the stacks of all threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"{names.get(ident, 'a thread of another kind')}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    ]
    return "\n".join(parts)


class Parked:
    """What all our actors can be asked while they run."""

    @ray.method(concurrency_group="aside")
    def where(self) -> Whereabouts:
        """Say which process this is."""
        return here()

    @ray.method(concurrency_group="aside")
    def stack_dump(self) -> str:
        """Return the stacks of all threads."""
        return stacks()

    @ray.method(concurrency_group="aside")
    def leave(self) -> None:
        """End the process at once."""
        os._exit(0)


class WorkerActor(Parked):
    """One worker of a gang.

    Args:
        spec: a `WorkerSpec`, as msgpack.
        environment: variables to set where there are none.
        is_near: whether all workers are on one node.
    """

    def __init__(self, spec: bytes, environment: dict[str, str], is_near: bool) -> None:
        adopt(environment)
        self._is_near = is_near
        log_to_stderr(level=logging.WARNING)  # progress goes to the controller, which tells it once
        self._spec = msgspec.msgpack.decode(spec, type=WorkerSpec)

    @ray.method(concurrency_group="serve")
    def run(self) -> None:
        """Be the worker until its body returns."""
        run_worker(self._spec, LOOPBACK if self._is_near else node_address(), here().machine)


def remote(cls: type) -> Any:
    """Return *cls* as Ray makes actors of it; options are given where one is made."""
    decorate: Any = ray.remote  # whose types leave this option out
    return decorate(concurrency_groups=GROUPS)(cls)
