"""A worker group in this process: one thread per worker, queues for messages, and injected faults."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence

from protos.worker_messages import Died, FromWorker, Plan, Port, ToWorker, WorkerId
from workers.process.main import serve

Body = Callable[[Port], None]


class Crash(BaseException):
    """Ends a worker's thread without a message, as a signal would."""


class ThreadPort:
    """A worker's port. `delay_s` delays every plan, `is_deaf` drops them; `crash` ends the worker."""

    def __init__(self, worker: WorkerId, messages: "queue.SimpleQueue[tuple[WorkerId, FromWorker]]") -> None:
        self.worker = worker
        self.delay_s = 0.0
        self.is_deaf = False
        self.is_gone = False
        self.sent: list[FromWorker] = []
        self.received: list[ToWorker] = []
        self._messages = messages
        self._inbox: queue.Queue[ToWorker | None] = queue.Queue()

    def put(self, message: ToWorker) -> None:
        self.received.append(message)
        self._inbox.put(message)

    def crash(self) -> None:
        self.is_gone = True
        self._inbox.put(None)

    def send(self, message: FromWorker) -> None:
        if not self.is_gone:
            self.sent.append(message)
            self._messages.put((self.worker, message))

    def receive(self, timeout_s: float | None) -> ToWorker | None:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                left = None if until is None else max(0.0, until - time.monotonic())
                message = self._inbox.get(block=left != 0.0, timeout=left)
            except queue.Empty:
                return None
            if self.is_gone or message is None:
                raise Crash
            if isinstance(message, Plan) and self.is_deaf:
                continue
            if isinstance(message, Plan) and self.delay_s:
                time.sleep(self.delay_s)
            return message


class ThreadWorkerGroup:
    """A `protos.worker_messages.WorkerGroup`. `ports` has the ports of all workers, past ones included.

    Args:
        body: a worker's function.
        on_start: called with each port before its worker starts; may inject faults.
    """

    def __init__(self, body: Body = serve, on_start: Callable[[ThreadPort], None] = lambda port: None) -> None:
        self._body, self._on_start = body, on_start
        self._messages: queue.SimpleQueue[tuple[WorkerId, FromWorker]] = queue.SimpleQueue()
        self._threads: dict[WorkerId, threading.Thread] = {}
        self._alive: set[WorkerId] = set()
        self.ports: dict[WorkerId, ThreadPort] = {}

    def start(self, workers: Sequence[WorkerId]) -> None:
        for worker in workers:
            port = self.ports[worker] = ThreadPort(worker, self._messages)
            self._alive.add(worker)
            self._on_start(port)
            self._threads[worker] = threading.Thread(target=self._live, args=(port,), name=str(worker), daemon=True)
            self._threads[worker].start()

    def _live(self, port: ThreadPort) -> None:
        with contextlib.suppress(Crash, Exception):
            self._body(port)
        port.is_gone = True
        self._messages.put((port.worker, Died("its thread ended")))

    def send(self, worker: WorkerId, message: ToWorker) -> None:
        if worker in self._alive:
            self.ports[worker].put(message)

    def receive(self, timeout_s: float) -> list[tuple[WorkerId, FromWorker]]:
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._messages.get(block=timeout_s > 0, timeout=timeout_s or None))
            while not self._messages.empty():
                found.append(self._messages.get())
        return [(worker, message) for worker, message in found if worker in self._alive]

    def kill(self, workers: Sequence[WorkerId], *, waits: bool = True) -> None:
        self._alive.difference_update(workers)
        self.crash(*(self.ports[worker] for worker in workers if worker in self.ports))

    def crash(self, *ports: ThreadPort) -> None:
        """End these workers at once: none is known to be dead before all are."""
        for port in ports:
            port.crash()
        for port in ports:
            self._threads[port.worker].join(20)
            assert not self._threads[port.worker].is_alive(), port.worker

    def prepare_spare(self) -> None:
        pass

    def close(self) -> None:
        self.kill(list(self._threads))

    def newest(self, role: str, rank: int = 0) -> ThreadPort:
        """Return the port of the newest incarnation."""
        return self.ports[max(worker for worker in self.ports if (worker.role, worker.rank) == (role, rank))]
