"""Addresses and encryption of ZMQ sockets: ipc on one node, tcp with CURVE keys between nodes.

Each hub makes new keys. They travel in the arguments of the processes that need them, and never appear in a log or on a
disk. The hub authenticates by its server key, and accepts only holders of the client key.
"""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from runtime.subprocess import socket_folder

Socket = zmq.Socket[Any]  # the result of recv differs for asyncio's sockets


class Endpoint(msgspec.Struct, frozen=True):
    """Where to connect, and with which keys; they are empty for ipc.

    Attributes:
        reports: address on which the binding process receives.
        commands: address on which the binding process sends.
    """

    reports: str
    commands: str
    server_key: str = ""
    client_key: str = ""
    client_secret: str = ""

    def __repr__(self) -> str:
        return f"Endpoint(reports={self.reports!r}, commands={self.commands!r})"


class _OneClient:
    """Accepts one client key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


class CurveServer:
    """The hub's side of CURVE: its own keys, and an authenticator that accepts one client key."""

    def __init__(self, context: "zmq.Context[Socket]") -> None:
        self.public, self._secret = zmq.curve_keypair()
        self.client_public, self.client_secret = zmq.curve_keypair()
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        provider: Any = _OneClient(self.client_public)
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=provider)

    def apply(self, socket: Socket) -> None:
        """Require the client key on *socket*, which is not bound yet."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.public, self._secret

    def close(self) -> None:
        """Stop the authenticator's thread."""
        self._authenticator.stop()


class BoundSockets:
    """Two bound sockets, and the endpoint for others to connect to them.

    Args:
        reports: receives messages.
        commands: sends messages.
        host: the address to listen on; None for ipc, in a private folder.
    """

    def __init__(self, context: "zmq.Context[Socket]", reports: Socket, commands: Socket, host: str | None) -> None:
        self._curve = None if host is None else CurveServer(context)
        self._folder = socket_folder() if host is None else None
        places = [self._bind(socket, name, host) for socket, name in ((reports, "reports"), (commands, "commands"))]
        keys = (
            ()
            if self._curve is None
            else (self._curve.public.decode(), self._curve.client_public.decode(), self._curve.client_secret.decode())
        )
        self.endpoint = Endpoint(*places, *keys)

    def _bind(self, socket: Socket, name: str, host: str | None) -> str:
        prepare(socket)
        if self._curve is not None:
            self._curve.apply(socket)
        socket.bind(f"ipc://{(self._folder or Path()) / name}" if host is None else f"tcp://{bracketed(host)}:*")
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def close(self) -> None:
        """Stop the authenticator and remove the folder. The owner closes the sockets first."""
        if self._curve is not None:
            self._curve.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def bracketed(host: str) -> str:
    """Return *host* as written in an address: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def prepare(socket: Socket) -> None:
    """Set the common options of sockets: no limit on queued messages, no linger, IPv6."""
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
