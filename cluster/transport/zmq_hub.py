"""The channel between a controller and its workers: msgpack over ZMQ, typed at both ends.

A worker sends on one socket and receives on another, so that any of its threads may send while one waits. The hub
knows its workers by name: mail of a worker that it was not told of, or was told to forget, is dropped, and so is what
cannot be decoded. Nothing that comes in can end the hub.
"""

import logging
import threading
import time
from typing import Any

import msgspec
import zmq

from cluster.transport.zmq_sockets import Bound, Endpoint, Socket, connect
from protos.worker_messages import FromWorker, ToWorker, WorkerId

log = logging.getLogger("slipstream")

LAST_WORDS_MS = 1000
"""A closing port waits this long for its last mail to leave."""

POSTS = "inproc://posts"

LAST_WORDS_S = 0.02
"""What a worker sent before it died may come in this long after its death was noticed, and goes before it."""


class ZmqHub:
    """The controller's end. `post` may be called from any thread, everything else from one.

    Args:
        host: the address to listen on where workers are on other nodes; None for ipc.
        hears: the union of messages that workers send.
    """

    def __init__(self, host: str | None = None, hears: Any = FromWorker) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self._up, self._down = self._context.socket(zmq.PULL), self._context.socket(zmq.ROUTER)
        self._down.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a worker that connects again is still the same
        self._bound = Bound(self._context, self._up, self._down, host)
        self._posted, self._posts = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        self._posting = threading.Lock()
        self._posted.bind(POSTS)
        self._posts.connect(POSTS)
        self._poller = zmq.Poller()
        for socket in (self._up, self._down, self._posted):
            self._poller.register(socket, zmq.POLLIN)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(hears)
        self._workers: dict[bytes, WorkerId] = {}
        self._waiting: dict[bytes, list[bytes]] = {}  # mail for workers that have not connected yet
        self._last: tuple[Any, bytes] = (None, b"")
        self.num_dropped = 0

    @property
    def endpoint(self) -> Endpoint:
        """What a worker needs to open its `ZmqPort`. Holds keys: hand it over, never log it."""
        return self._bound.endpoint

    def admit(self, worker: WorkerId) -> None:
        """Take mail of *worker* from now on, and keep mail for it until it connects."""
        self._workers[name_of(worker)] = worker
        self._waiting[name_of(worker)] = []

    def forget(self, worker: WorkerId) -> None:
        """Drop whatever comes from *worker*, and what waits for it."""
        self._workers.pop(name_of(worker), None)
        self._waiting.pop(name_of(worker), None)

    def send(self, worker: WorkerId, message: Any) -> None:
        """Send without waiting; dropped where nobody of that name is known."""
        name = name_of(worker)
        if name not in self._workers:
            return
        if name in self._waiting:
            self._greet()
        if name in self._waiting:
            self._waiting[name].append(self._encode(message))
        else:
            self._down.send_multipart([name, self._encode(message)])

    def _encode(self, message: Any) -> bytes:
        """A plan goes to every worker, and is encoded once."""
        if self._last[0] is not message:
            self._last = (message, self._encoder.encode(message))
        return self._last[1]

    def post(self, worker: WorkerId, message: FromWorker) -> None:
        """Put *message* into the mail as if *worker* had sent it; for who watches over it. After the end: nothing."""
        with self._posting:
            if not self._posts.closed:
                self._posts.send_multipart([name_of(worker), self._encoder.encode(message)])

    def receive(self, timeout_s: float) -> list[tuple[WorkerId, Any]]:
        """Return what came in as soon as there is something, or nothing after *timeout_s*."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_ms = max(0, round((deadline - time.monotonic()) * 1000))
            ready = dict(self._poller.poll(left_ms))
            if self._down in ready:
                self._greet()
            mail = self._drain(self._up) if self._up in ready else []
            if self._posted in ready:
                mail += self._last_words() + self._drain(self._posted)
            if mail or time.monotonic() >= deadline:
                return mail

    def _drain(self, socket: Socket) -> list[tuple[WorkerId, Any]]:
        mail = []
        while socket.poll(0):
            read = self._read(socket.recv_multipart())
            if read is not None:
                mail.append(read)
        return mail

    def _last_words(self) -> list[tuple[WorkerId, Any]]:
        """Return what is still on its way from somebody whose death has been posted."""
        mail, deadline = [], time.monotonic() + LAST_WORDS_S
        while (left_s := deadline - time.monotonic()) > 0 and self._up.poll(round(left_s * 1000)):
            mail += self._drain(self._up)
        return mail

    def _read(self, frames: list[bytes]) -> tuple[WorkerId, Any] | None:
        worker = self._workers.get(frames[0])
        try:
            if worker is not None:
                return worker, self._decoder.decode(frames[1])
        except (msgspec.DecodeError, IndexError) as error:
            log.warning("mail of %s that cannot be read is dropped: %s", worker, error)
        self.num_dropped += 1
        return None

    def _greet(self) -> None:
        """Give workers that have just connected the mail that waits for them."""
        while self._down.poll(0):
            name = self._down.recv_multipart()[0]
            for body in self._waiting.pop(name, ()):
                self._down.send_multipart([name, body])

    def close(self) -> None:
        """Close the sockets. May be called twice."""
        with self._posting:
            self._posts.close()
        for socket in (self._up, self._down, self._posted):
            socket.close()
        self._bound.close()
        self._context.term()


def name_of(worker: WorkerId) -> bytes:
    """Return what *worker* is called on the wire."""
    return f"{worker.role}/{worker.rank}/{worker.incarnation}".encode()


class ZmqPort:
    """A worker's end: a `protos.worker_messages.Port`.

    Args:
        endpoint: of the hub.
        worker: who we are.
        hears: the union of messages that the hub sends.
    """

    def __init__(self, endpoint: Endpoint, worker: WorkerId, hears: Any = ToWorker) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self._name = name_of(worker)
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(hears)
        self._sending = threading.Lock()
        self._up = self._context.socket(zmq.PUSH)
        connect(self._up, endpoint.up, endpoint)
        self._down = self._context.socket(zmq.DEALER)
        self._down.setsockopt(zmq.ROUTING_ID, self._name)
        connect(self._down, endpoint.down, endpoint)
        self._down.send(b"")  # from now on the hub can reach us

    def send(self, message: FromWorker) -> None:
        """See `Port`."""
        with self._sending:
            if not self._up.closed:
                self._up.send_multipart([self._name, self._encoder.encode(message)])

    def receive(self, timeout_s: float | None) -> Any:
        """See `Port`. What cannot be decoded is dropped."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_ms = None if deadline is None else max(0, round((deadline - time.monotonic()) * 1000))
            if not self._down.poll(left_ms):
                return None
            try:
                return self._decoder.decode(self._down.recv())
            except msgspec.DecodeError as error:
                log.warning("mail of the controller that cannot be read is dropped: %s", error)

    def close(self) -> None:
        """Close the sockets once the last mail has left. May be called twice."""
        with self._sending:
            self._up.close(linger=LAST_WORDS_MS)
        self._down.close(linger=0)
        self._context.term()
