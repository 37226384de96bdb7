"""Messages between target rank 0 and the draft: ZeroMQ PUSH to PULL, with CURVE keys from a store."""

from typing import Any, Generic, TypeVar

import msgspec
import zmq
from torch.distributed.distributed_c10d import Store

Socket = zmq.Socket[bytes]
Message = TypeVar("Message", bound=msgspec.Struct)

BEAT_MS, SILENT_MS = 1000, 5000
"""Ends that are connected send heartbeats this often; without one for so long, the connection is made again."""


class _Address(msgspec.Struct, frozen=True):
    """The address to connect to, and the public key of the listener."""

    where: str
    key: str


class Listener(Generic[Message]):
    """Receives messages. Not thread-safe.

    Args:
        store: passes the address to the other end.
        name: of these messages, unique in the store.
        host: an address of this machine that the other end reaches.
        kind: the type of the messages.
        max_bytes: of a message; the connection of a sender of more is closed.
    """

    def __init__(self, store: Store, name: str, host: str, kind: Any, max_bytes: int) -> None:
        public, secret = zmq.curve_keypair()
        self._socket = _open(zmq.PULL)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = public, secret
        self._socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(kind)
        address = _Address(self._socket.getsockopt_string(zmq.LAST_ENDPOINT), public.decode())
        store.set(_key(name), msgspec.json.encode(address).decode())

    def receive(self, timeout_s: float) -> Message | None:
        """Return the next message; None if there is none within *timeout_s*. Raises `msgspec.DecodeError`."""
        if not self._socket.poll(round(timeout_s * 1000)):
            return None
        return self._decoder.decode(self._socket.recv())

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(linger=0)


class Announcer(Generic[Message]):
    """Sends messages. Connects at once; waits for the address up to the timeout of *store*."""

    def __init__(self, store: Store, name: str) -> None:
        address = msgspec.json.decode(store.get(_key(name)), type=_Address)
        public, secret = zmq.curve_keypair()
        self._socket = _open(zmq.PUSH)
        self._socket.curve_serverkey = address.key.encode()
        self._socket.curve_publickey, self._socket.curve_secretkey = public, secret
        self._socket.connect(address.where)

    def send(self, message: Message) -> None:
        """Send a message, without waiting."""
        self._socket.send(msgspec.msgpack.encode(message))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(linger=0)


def _open(kind: int) -> Socket:
    opened: Socket = zmq.Context.instance().socket(kind)
    opened.ipv6 = True
    opened.set_hwm(0)
    opened.setsockopt(zmq.HEARTBEAT_IVL, BEAT_MS)
    opened.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
    return opened


def _key(name: str) -> str:
    return f"announce/{name}"
