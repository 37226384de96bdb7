"""A worker as a plain child process of its gang: `python -c "... main()"`, told who it is on standard input."""

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
from importlib import import_module
from typing import Any, NoReturn

import msgspec

from cluster.transport.zmq_hub import ZmqPort
from cluster.transport.zmq_sockets import Endpoint
from protos.worker_messages import ToWorker, WorkerId

LIFELINE = 0
"""The worker's end of the pipe its parent holds: standard input."""

PR_SET_PDEATHSIG = 1


class Order(msgspec.Struct, frozen=True):
    """What a worker process is told first. `body` and `hears` name things as "module:name"."""

    endpoint: Endpoint
    worker: WorkerId
    body: str
    hears: str = ""


def find(path: str) -> Any:
    """Return what *path*, "module:name", names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def perform(order: Order, *place: str) -> None:
    """Connect, and be the worker until its body returns; the body is told its *place* too, where that is known."""
    port = ZmqPort(order.endpoint, order.worker, find(order.hears) if order.hears else ToWorker)
    try:
        find(order.body)(port, *place)
    finally:
        port.close()


def main() -> NoReturn:
    """Read the order and carry it out; leave at once when the parent is gone."""
    _die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)  # the gang decides when its workers end
    with os.fdopen(os.dup(LIFELINE), "rb") as pipe:
        order = msgspec.json.decode(pipe.readline(), type=Order)
    threading.Thread(target=_watch_parent, name="slipstream-lifeline", daemon=True).start()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    try:
        perform(order)
    except Exception:
        logging.getLogger("slipstream").exception("%s failed", order.worker)
        _leave(1)
    _leave(0)


def _leave(code: int) -> NoReturn:
    """Exit without taking libraries apart: process groups may wait for peers that are gone."""
    logging.shutdown()
    os._exit(code)


def _die_with_parent() -> None:
    """Have the system end us with the thread that started us, even while we are stopped."""
    with contextlib.suppress(OSError, AttributeError):  # no Linux: the pipe alone must do
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch_parent() -> None:
    while os.read(LIFELINE, 4096):
        pass
    os._exit(1)
