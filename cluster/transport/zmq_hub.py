"""Messages between a controller and its workers: typed msgpack over ZMQ.

A worker sends on one socket and receives on another, so that any of its threads may send while one waits. The hub drops
messages of workers that are not registered, and messages that cannot be decoded.
"""

import logging
import threading
import time
from typing import Any

import msgspec
import zmq

from cluster.transport.zmq_sockets import BoundSockets, Endpoint, Socket, connect
from protos.worker_messages import FromWorker, ToWorker, WorkerId

log = logging.getLogger("slipstream")

LINGER_MS = 1000
"""A closing port waits this long for its last messages to be sent."""

POSTS = "inproc://posts"

DEATH_DELAY_S = 0.02
"""The hub waits this long for a dead worker's last messages, and delivers them before its `Died`."""


class ZmqHub:
    """The controller's end. `post` may be called from any thread, the other methods from one.

    Args:
        host: the address to listen on if workers are on other nodes; None for ipc.
        message_type: the union of messages that workers send.
    """

    def __init__(self, host: str | None = None, message_type: Any = FromWorker) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self._reports, self._commands = self._context.socket(zmq.PULL), self._context.socket(zmq.ROUTER)
        self._commands.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a worker may reconnect under its id
        self._bound = BoundSockets(self._context, self._reports, self._commands, host)
        self._posted, self._posts = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        self._posting = threading.Lock()
        self._posted.bind(POSTS)
        self._posts.connect(POSTS)
        self._poller = zmq.Poller()
        for socket in (self._reports, self._commands, self._posted):
            self._poller.register(socket, zmq.POLLIN)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(message_type)
        self._workers: dict[bytes, WorkerId] = {}
        self._waiting: dict[bytes, list[bytes]] = {}  # messages for workers that have not connected yet
        self._last: tuple[Any, bytes] = (None, b"")
        self.num_dropped = 0

    @property
    def endpoint(self) -> Endpoint:
        """What a worker needs to open its `ZmqPort`. Holds keys: never log it."""
        return self._bound.endpoint

    def register(self, worker: WorkerId) -> None:
        """Accept messages of *worker*, and queue messages for it until it connects."""
        self._workers[routing_id(worker)] = worker
        self._waiting[routing_id(worker)] = []

    def unregister(self, worker: WorkerId) -> None:
        """Drop messages of *worker* and those queued for it."""
        self._workers.pop(routing_id(worker), None)
        self._waiting.pop(routing_id(worker), None)

    def send(self, worker: WorkerId, message: Any) -> None:
        """Send without waiting; dropped if *worker* is not registered."""
        name = routing_id(worker)
        if name not in self._workers:
            return
        if name in self._waiting:
            self._send_queued()
        if name in self._waiting:
            self._waiting[name].append(self._encode(message))
        else:
            self._commands.send_multipart([name, self._encode(message)])

    def _encode(self, message: Any) -> bytes:
        """Encode a message once that goes to every worker."""
        if self._last[0] is not message:
            self._last = (message, self._encoder.encode(message))
        return self._last[1]

    def post(self, worker: WorkerId, message: FromWorker) -> None:
        """Deliver *message* as if *worker* had sent it, to report its death. Does nothing after `close`."""
        with self._posting:
            if not self._posts.closed:
                self._posts.send_multipart([routing_id(worker), self._encoder.encode(message)])

    def receive(self, timeout_s: float) -> list[tuple[WorkerId, Any]]:
        """Return the messages that have arrived, waiting up to *timeout_s* for the first."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_ms = max(0, round((deadline - time.monotonic()) * 1000))
            ready = dict(self._poller.poll(left_ms))
            if self._commands in ready:
                self._send_queued()
            messages = self._drain(self._reports) if self._reports in ready else []
            if self._posted in ready:
                messages += self._last_messages() + self._drain(self._posted)
            if messages or time.monotonic() >= deadline:
                return messages

    def _drain(self, socket: Socket) -> list[tuple[WorkerId, Any]]:
        messages = []
        while socket.poll(0):
            read = self._read(socket.recv_multipart())
            if read is not None:
                messages.append(read)
        return messages

    def _last_messages(self) -> list[tuple[WorkerId, Any]]:
        """Return messages in flight from a worker whose death has been posted."""
        messages, deadline = [], time.monotonic() + DEATH_DELAY_S
        while (left_s := deadline - time.monotonic()) > 0 and self._reports.poll(round(left_s * 1000)):
            messages += self._drain(self._reports)
        return messages

    def _read(self, frames: list[bytes]) -> tuple[WorkerId, Any] | None:
        worker = self._workers.get(frames[0])
        try:
            if worker is not None:
                return worker, self._decoder.decode(frames[1])
        except (msgspec.DecodeError, IndexError) as error:
            log.warning("dropped an unreadable message of %s: %s", worker, error)
        self.num_dropped += 1
        return None

    def _send_queued(self) -> None:
        """Send the queued messages of workers that have just connected."""
        while self._commands.poll(0):
            name = self._commands.recv_multipart()[0]
            for body in self._waiting.pop(name, ()):
                self._commands.send_multipart([name, body])

    def close(self) -> None:
        """Close the sockets. May be called twice."""
        with self._posting:
            self._posts.close()
        for socket in (self._reports, self._commands, self._posted):
            socket.close()
        self._bound.close()
        self._context.term()


def routing_id(worker: WorkerId) -> bytes:
    """Return the ZMQ routing id of *worker*."""
    return f"{worker.role}/{worker.rank}/{worker.incarnation}".encode()


class ZmqPort:
    """A worker's end: a `protos.worker_messages.Port`.

    Args:
        endpoint: of the hub.
        worker: the id of this worker.
        message_type: the union of messages that the hub sends.
    """

    def __init__(self, endpoint: Endpoint, worker: WorkerId, message_type: Any = ToWorker) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self._name = routing_id(worker)
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(message_type)
        self._sending = threading.Lock()
        self._reports = self._context.socket(zmq.PUSH)
        connect(self._reports, endpoint.reports, endpoint)
        self._commands = self._context.socket(zmq.DEALER)
        self._commands.setsockopt(zmq.ROUTING_ID, self._name)
        connect(self._commands, endpoint.commands, endpoint)
        self._commands.send(b"")  # announces this worker to the hub

    def send(self, message: FromWorker) -> None:
        """See `Port`."""
        with self._sending:
            if not self._reports.closed:
                self._reports.send_multipart([self._name, self._encoder.encode(message)])

    def receive(self, timeout_s: float | None) -> Any:
        """See `Port`. Drops messages that cannot be decoded."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_ms = None if deadline is None else max(0, round((deadline - time.monotonic()) * 1000))
            if not self._commands.poll(left_ms):
                return None
            try:
                return self._decoder.decode(self._commands.recv())
            except msgspec.DecodeError as error:
                log.warning("dropped an unreadable message of the controller: %s", error)

    def close(self) -> None:
        """Close the sockets once the last messages have been sent. May be called twice."""
        with self._sending:
            self._reports.close(linger=LINGER_MS)
        self._commands.close(linger=0)
        self._context.term()
