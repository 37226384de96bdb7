"""Notices that a controller's process stands still: its signs of life, and who waits for them.

The process sends `Alive` from a thread of its own, so a long step is no silence. The frontend counts the time without
any message. Time in which the frontend itself was paused does not count.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from runtime.frontend.channel import Alive, Ready, Report, Stalled

log = logging.getLogger("slipstream")

BEAT_S = 0.5
MAX_TICK_S = 1.0
"""Longest time between two looks that counts: if the frontend was paused, the controller is not to blame."""
TICK_S = 0.25


@dataclass(frozen=True)
class SilenceLimits:
    """Seconds without a message: after `stalled_s` requests end, after `given_up_s` the controller is killed.

    While the controller loads, which may block its threads, only `loading_s` counts, after which it is killed.
    """

    stalled_s: float = 6.0
    given_up_s: float = 30.0
    loading_s: float = 60.0


SILENCE_LIMITS = SilenceLimits()


@contextlib.contextmanager
def signs_of_life(connect: Callable[[], "zmq.Socket[Any]"]) -> Iterator[None]:
    """Send `Alive` from a thread, over a socket of its own that *connect* returns there."""
    ended = threading.Event()

    def beat() -> None:
        with connect() as socket:
            alive = msgspec.msgpack.Encoder().encode(Alive())
            socket.send(alive)  # from now on the frontend watches
            while not ended.wait(BEAT_S):
                socket.send(alive)
            socket.linger = 0

    thread = threading.Thread(target=beat, name="slipstream-alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class SilenceWatch:
    """Passes on a controller's reports, adds `Stalled` when they cease, and kills it if they do not come again.

    Only a controller that has sent `Alive` is watched. Belongs to one event loop.

    Args:
        on_report: called with each report.
        kill: ends the controller's process.
        limits: how long a silence may last.
    """

    def __init__(self, on_report: Callable[[Report], None], kill: Callable[[], None], limits: SilenceLimits) -> None:
        self._on_report, self._kill, self._limits = on_report, kill, limits
        self._silence_s = 0.0
        self._is_watched = self._is_ready = self._is_stalled = False

    def take(self, report: Report) -> None:
        """Pass on *report*; `Alive` only if it ends a silence."""
        self._silence_s = 0.0
        if self._is_stalled:
            self._is_stalled = False
            log.warning("the controller continues")
            self._on_report(Alive())
        if isinstance(report, Alive):
            self._is_watched = True
            return
        self._is_ready = self._is_ready or isinstance(report, Ready)
        self._on_report(report)

    async def run(self) -> None:
        """Watch until cancelled, or until the controller was killed."""
        looked_at = time.monotonic()
        while not self._is_given_up():
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self._silence_s += min(now - looked_at, MAX_TICK_S) if self._is_watched else 0.0
            looked_at = now
            if self._is_ready and not self._is_stalled and self._silence_s > self._limits.stalled_s:
                self._is_stalled = True
                self._on_report(self._stalled())
        log.error("the controller has sent nothing for %.0f s and did not continue; it is killed", self._silence_s)
        self._kill()

    def _is_given_up(self) -> bool:
        limit_s = self._limits.given_up_s if self._is_ready else self._limits.loading_s
        return self._silence_s > limit_s

    def _stalled(self) -> Stalled:
        reason = f"the engine's controller has sent nothing for {self._silence_s:.0f} s: it was stopped, or hangs"
        return Stalled(reason, max(1.0, self._limits.given_up_s - self._silence_s))
