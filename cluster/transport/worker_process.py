"""A worker as a child process: `python -c "... main()"`, which reads its `WorkerSpec` from standard input."""

import logging
import os
import signal
import sys
import threading
from pkgutil import resolve_name
from typing import Any, NoReturn

import msgspec

from cluster.transport.zmq_hub import ZmqPort
from cluster.transport.zmq_sockets import Endpoint
from protos.worker_messages import ToWorker, WorkerId
from runtime.heap import freeze_heap
from runtime.subprocess import at_parents_death
from workers.process.heartbeat import HeartbeatThread

LIFELINE = 0
"""File descriptor of the worker's end of its parent's pipe: standard input."""


class WorkerSpec(msgspec.Struct, frozen=True):
    """What a worker process runs. `body` (a function) and `receives` (a union of messages) are "module:name"."""

    endpoint: Endpoint
    worker: WorkerId
    body: str
    receives: str = ""


def run_worker(spec: WorkerSpec, *location: str) -> None:
    """Connect and run the worker's body, which also gets its *location* (address and machine) if known."""
    port = ZmqPort(spec.endpoint, spec.worker, resolve_name(spec.receives) if spec.receives else ToWorker)
    try:
        _imported(spec, port)(port, *location)
    finally:
        port.close()


def _imported(spec: WorkerSpec, port: ZmqPort) -> Any:
    """Import the worker's body, and with it torch; send heartbeats meanwhile to a controller that expects them.

    Nothing but modules is there by then. Models come later: they are freed where a group is rebuilt.
    """
    if spec.receives:
        return resolve_name(spec.body)
    with HeartbeatThread(port, "importing"):
        body = resolve_name(spec.body)
        freeze_heap()
        return body


def main() -> NoReturn:
    """Read the spec and run the worker; exit at once when the parent is gone."""
    at_parents_death(signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)  # the worker group ends its workers
    with os.fdopen(os.dup(LIFELINE), "rb") as pipe:
        spec = msgspec.json.decode(pipe.readline(), type=WorkerSpec)
    threading.Thread(target=_watch_parent, name="slipstream-lifeline", daemon=True).start()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    try:
        run_worker(spec)
    except Exception:
        logging.getLogger("slipstream").exception("%s failed", spec.worker)
        _exit(1)
    _exit(0)


def _exit(code: int) -> NoReturn:
    """Exit without running library finalizers: process groups may wait for peers that are gone."""
    logging.shutdown()
    os._exit(code)


def _watch_parent() -> None:
    while os.read(LIFELINE, 4096):
        pass
    os._exit(1)
