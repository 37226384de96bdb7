"""A worker's signs of life. Imports nothing heavy: they are sent while torch is imported, too."""

import threading
import time
from types import TracebackType
from typing import Self

from protos.worker_messages import Heartbeat, Port

BEAT_S = 0.5


class HeartbeatThread:
    """Sends heartbeats from a thread of its own. The worker sets `stage` and `round`, which they carry."""

    def __init__(self, port: Port, stage: str = "starting") -> None:
        self._port = port
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self.stage = stage
        self.round = -1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            self._port.send(Heartbeat(self.stage, self.round, time.process_time()))
