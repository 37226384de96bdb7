"""Bodies for worker processes, in tests: each is called with its port, as `workers.rank.serve` is."""

import os
import signal
import socket
import sys
import threading
import time

from protos.gang import Heartbeat, Placed, Port, Progress, Stop, WorkerFailed


def placed() -> Placed:
    return Placed(socket.gethostname(), "a node", os.getpid())


def echo(port: Port, *place: str) -> None:
    """Say where we are, then the type of everything that comes, until told to stop."""
    port.send(placed())
    while not isinstance(message := port.receive(None), Stop):
        port.send(Progress(type(message).__name__))
    port.send(Progress("goodbye"))


def beat(port: Port, *place: str) -> None:
    """Say where we are, and ten times a second that we live."""

    def tell() -> None:
        while True:
            port.send(Heartbeat("serving"))
            time.sleep(0.1)

    port.send(placed())
    threading.Thread(target=tell, daemon=True).start()
    while not isinstance(port.receive(None), Stop):
        pass


def leave(port: Port, *place: str) -> None:
    """Say where we are, and leave with a failure as soon as anything comes."""
    port.send(placed())
    port.receive(None)
    port.send(WorkerFailed("something is wrong", "ModelError"))
    sys.exit(3)


def shoot_oneself(port: Port, *place: str) -> None:
    """Say where we are, and be killed as soon as anything comes."""
    port.send(placed())
    port.receive(None)
    os.kill(os.getpid(), signal.SIGKILL)


def raise_at_once(port: Port, *place: str) -> None:
    """Fail before a word is said."""
    raise RuntimeError("cannot even begin")
