"""The store on which ranks meet to form groups."""

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined] # its stubs do not list it

from protos.worker_messages import StoreAddress
from workers.distributed.groups import LOOPBACK, GroupError, first_line


def open_store(host: str = LOOPBACK) -> tuple[TCPStore, StoreAddress]:
    """Open a store that listens on *host* only, on a port that the system chooses, until the object is deleted.

    Raises:
        GroupError: this machine cannot listen on *host*.
    """
    try:
        listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise GroupError(f"a store cannot listen on {host}: {error}") from error
    port = int(listening.getsockname()[1])
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    return store, StoreAddress(host, port)


def connect_store(address: StoreAddress, timeout_s: float = 60.0) -> TCPStore:
    """Connect to the store at *address*; its operations wait at most *timeout_s*.

    Raises:
        GroupError: no store answers there.
    """
    # Connect without torch first: if nothing listens, torch would retry and print stack traces on stderr.
    try:
        socket.create_connection((address.host, address.port), timeout_s).close()
        return TCPStore(address.host, address.port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except (OSError, RuntimeError) as error:
        raise GroupError(f"no store answers at {address.host}:{address.port}: {first_line(error)}") from error


def address_towards(host: str) -> str:
    """Return the address of this machine from which it reaches *host*. Nothing is sent.

    Raises:
        GroupError: *host* is unknown, or there is no route to it.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise GroupError(f"this machine finds no route to {host}: {error}") from error
