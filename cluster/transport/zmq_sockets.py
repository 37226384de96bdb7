"""Where a gang's sockets are and how they are locked: ipc on one node, tcp with CURVE keys between nodes.

Keys are made fresh for each hub, travel in the arguments of the processes that need them, and never appear in a log
or on a disk. The hub proves who it is by its key, and lets in nobody but the holder of the client key.
"""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from runtime.subprocess import socket_folder

Socket = zmq.Socket[Any]  # asyncio's answer otherwise, and are bound and locked the same


class Endpoint(msgspec.Struct, frozen=True):
    """Where to connect, and with which keys; on ipc there are none.

    Attributes:
        up: takes mail for the side that bound.
        down: gives mail of the side that bound.
    """

    up: str
    down: str
    server_key: str = ""
    client_key: str = ""
    client_secret: str = ""

    def __repr__(self) -> str:
        return f"Endpoint(up={self.up!r}, down={self.down!r})"


class _OnlyClient:
    """Lets in one client key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


class Lock:
    """The hub's side of CURVE: its own keys, and a guard that admits one client key."""

    def __init__(self, context: "zmq.Context[Socket]") -> None:
        self.public, self._secret = zmq.curve_keypair()
        self.client_public, self.client_secret = zmq.curve_keypair()
        self._guard = ThreadAuthenticator(context)
        self._guard.start()
        provider: Any = _OnlyClient(self.client_public)
        self._guard.configure_curve_callback(domain="*", credentials_provider=provider)

    def apply(self, socket: Socket) -> None:
        """Make *socket*, not yet bound, take nobody but our client."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.public, self._secret

    def close(self) -> None:
        """Stop the guard's thread."""
        self._guard.stop()


class Bound:
    """Two bound sockets, and what others need to connect to them.

    Args:
        up: takes mail for us.
        down: gives our mail.
        host: the address to listen on; None for ipc, in a private folder.
    """

    def __init__(self, context: "zmq.Context[Socket]", up: Socket, down: Socket, host: str | None) -> None:
        self._lock = None if host is None else Lock(context)
        self._folder = socket_folder() if host is None else None
        places = [self._bind(socket, name, host) for socket, name in ((up, "up"), (down, "down"))]
        keys = (
            ()
            if self._lock is None
            else (self._lock.public.decode(), self._lock.client_public.decode(), self._lock.client_secret.decode())
        )
        self.endpoint = Endpoint(*places, *keys)

    def _bind(self, socket: Socket, name: str, host: str | None) -> str:
        prepare(socket)
        if self._lock is not None:
            self._lock.apply(socket)
        socket.bind(f"ipc://{(self._folder or Path()) / name}" if host is None else f"tcp://{bracketed(host)}:*")
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def close(self) -> None:
        """Stop guarding; remove the folder. The sockets are their owner's to close, before this."""
        if self._lock is not None:
            self._lock.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def bracketed(host: str) -> str:
    """Return *host* as it stands in an address."""
    return f"[{host}]" if ":" in host else host


def prepare(socket: Socket) -> None:
    """Set what all our sockets have: no limit on mail, and no waiting for it at the end."""
    socket.set_hwm(0)
    socket.linger = 0
    socket.ipv6 = True


def connect(socket: Socket, address: str, endpoint: Endpoint) -> None:
    """Connect *socket* to one *address* of *endpoint*, with its keys."""
    prepare(socket)
    if endpoint.server_key:
        socket.curve_serverkey = endpoint.server_key.encode()
        socket.curve_publickey, socket.curve_secretkey = endpoint.client_key.encode(), endpoint.client_secret.encode()
    socket.connect(address)
