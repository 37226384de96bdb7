"""A worker group of child processes on this machine: for `slipstream doctor`, and for tests without Ray."""

import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pkgutil import resolve_name
from typing import Any

import msgspec

from cluster.transport.worker_process import WorkerSpec
from cluster.transport.zmq_hub import ZmqHub
from protos.worker_messages import Died, FromWorker, WorkerId
from runtime.subprocess import python_command

BODY = "workers.process.main:serve"


class ProcessWorkerGroup:
    """A `protos.worker_messages.WorkerGroup`. Workers end with the thread that starts them, or when their pipe closes.

    Args:
        body: "module:function" that a worker runs, called with its `Port`.
        environment: variables of the workers, added to those of this process.
        sends, receives: "module:name" of the unions of messages that workers send and receive; default: those of
            `protos.worker_messages`.
    """

    def __init__(
        self, body: str = BODY, environment: Mapping[str, str] | None = None, *, sends: str = "", receives: str = ""
    ) -> None:
        self._hub = ZmqHub(message_type=resolve_name(sends) if sends else FromWorker)
        self._body, self._receives = body, receives
        self._environment = {**os.environ, **(environment or {})}
        self._processes: dict[WorkerId, subprocess.Popen[bytes]] = {}
        self._watchers: dict[WorkerId, threading.Thread] = {}
        self._is_closed = False

    def pid(self, worker: WorkerId) -> int | None:
        """Return the process id of *worker*, or None if it does not run."""
        process = self._processes.get(worker)
        return None if process is None else process.pid

    def start(self, workers: Seq[WorkerId]) -> None:
        """See `WorkerGroup`."""
        for worker in workers:
            self._hub.register(worker)
            process = subprocess.Popen(
                python_command("cluster.transport.worker_process"), stdin=subprocess.PIPE, env=self._environment
            )
            spec = WorkerSpec(self._hub.endpoint, worker, self._body, self._receives)
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(spec) + b"\n")
            process.stdin.flush()
            self._processes[worker] = process
            self._watchers[worker] = threading.Thread(target=self._watch, args=(worker, process), daemon=True)
            self._watchers[worker].start()

    def _watch(self, worker: WorkerId, process: "subprocess.Popen[bytes]") -> None:
        """Wait for a process to end, and post `Died`."""
        code = process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._hub.post(worker, Died(f"its process ended ({how})"))

    def send(self, worker: WorkerId, message: Any) -> None:
        """See `WorkerGroup`."""
        self._hub.send(worker, message)

    def receive(self, timeout_s: float) -> list[tuple[WorkerId, Any]]:
        """See `WorkerGroup`."""
        return self._hub.receive(timeout_s)

    def kill(self, workers: Seq[WorkerId], *, waits: bool = True) -> None:
        """See `WorkerGroup`. Always waits: local processes end at once."""
        for worker in workers:
            self._hub.unregister(worker)
            if worker in self._processes:
                self._processes[worker].kill()
        for worker in workers:
            process = self._processes.pop(worker, None)
            if process is not None:
                self._watchers.pop(worker).join()
                if process.stdin is not None:
                    process.stdin.close()

    def prepare_spare(self) -> None:
        """See `WorkerGroup`. Does nothing."""

    def close(self) -> None:
        """See `WorkerGroup`."""
        if not self._is_closed:
            self._is_closed = True
            self.kill(list(self._processes))
            self._hub.close()
