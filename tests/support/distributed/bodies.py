"""Functions for worker processes, called with a port as `workers.process.main.serve` is."""

import gc
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

from msgspec import structs

from protos.doctor_messages import Join, Seen, Trouble
from protos.worker_messages import (
    Heartbeat,
    Placed,
    Port,
    Progress,
    Stop,
    StoreAddress,
    WorkerFailed,
)


def placed(host: str = "", node: str = "a node") -> Placed:
    return Placed(host or socket.gethostname(), node, os.getpid())


def echo(port: Port, *place: str) -> None:
    """Report the placement, then the type of each message, until `Stop`."""
    port.send(placed(*place))
    while not isinstance(message := port.receive(None), Stop):
        port.send(Progress(type(message).__name__))
    port.send(Progress("goodbye"))


def tell_frozen(port: Port, *place: str) -> None:
    """Report whether this module and others are left out of collections; wait for `Stop`."""
    del place
    port.send(Progress(f"{gc.get_freeze_count() > 1000}"))
    while not isinstance(port.receive(None), Stop):
        pass


def tell_devices(port: Port, *place: str) -> None:
    """Report the placement and CUDA_VISIBLE_DEVICES; wait for `Stop`."""
    port.send(structs.replace(placed(*place), visible_devices=os.environ["CUDA_VISIBLE_DEVICES"]))
    while not isinstance(port.receive(None), Stop):
        pass


def beat(port: Port, *place: str) -> None:
    """Report the placement, then send a heartbeat ten times a second."""

    def tell() -> None:
        while True:
            port.send(Heartbeat("serving"))
            time.sleep(0.1)

    port.send(placed(*place))
    threading.Thread(target=tell, daemon=True).start()
    while not isinstance(port.receive(None), Stop):
        pass


def leave(port: Port, *place: str) -> None:
    """Report the placement; exit with a failure at the first message."""
    port.send(placed(*place))
    port.receive(None)
    port.send(WorkerFailed("something is wrong", "ModelError"))
    sys.exit(3)


def shoot_oneself(port: Port, *place: str) -> None:
    """Report the placement; end by SIGKILL at the first message."""
    port.send(placed(*place))
    port.receive(None)
    os.kill(os.getpid(), signal.SIGKILL)


def raise_at_once(port: Port, *place: str) -> None:
    """Fail before any message is sent."""
    raise RuntimeError("cannot even begin")


def two_devices(port: Any, *place: str) -> None:
    """Answer the doctor like a machine with two devices whose groups cannot be formed."""
    port.send(Seen("here", "2.0", "13.0", "2.30", ("A", "A"), StoreAddress("127.0.0.1", 1)))
    while not isinstance(order := port.receive(None), Stop):
        if isinstance(order, Join):
            port.send(Trouble(f"group {order.group} on {order.device}: no way"))


PATIENT = "tests.support.distributed.bodies:patient"


def patient(port: Port, *place: str) -> None:
    """Run a real worker with a long minimum deadline for drafts."""
    from workers.process.main import serve

    serve(port, *place, floor_s=5.0)


DELAY_S = 0.2


def slow_draft(port: Port, host: str, node: str) -> None:
    """Run a real worker whose draft is late in every round."""
    from benchmarks.late_draft import LatePort
    from workers.process.main import serve

    serve(LatePort(port, DELAY_S), host, node)
