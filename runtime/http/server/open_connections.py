"""The open connections of one server, which are limited in number, and which of them only wait for their client."""

import logging
import time
from collections.abc import Callable
from typing import Protocol

from runtime.metrics.logs import LogLimit

log = logging.getLogger("slipstream")

IDLE_S = 1.0
"""Connections that have been silent for this long make room for new ones."""
MAX_REFUSALS = 64
"""Sockets above the limit that may be open at once, for connections that are told that there are too many."""


class Closable(Protocol):
    """A connection that can be closed."""

    def cut(self) -> None:
        """Close the connection without a word."""
        ...


class OpenConnections:
    """Counts connections. Where there are too many, the one that has been silent longest is closed for a new one.

    A connection is silent while it is between requests, or while the rest of one does not come. Belongs to one event
    loop.

    Args:
        limit: connections at a time.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_sockets = 0
        """Accepted sockets that are not closed yet, also those being refused; counted by the acceptor."""
        self.on_room: Callable[[], None] = lambda: None
        """Called when a socket has been closed."""
        self._open: set[Closable] = set()
        self._silent: dict[Closable, float] = {}
        """Since when each silent connection is, oldest first."""
        self._log_limit = LogLimit()

    @property
    def may_accept(self) -> bool:
        """Whether another socket may be opened, if only to refuse a connection."""
        return self.num_sockets < self.limit + MAX_REFUSALS

    def enter(self, connection: Closable) -> bool:
        """Count *connection*; return False if there is no room for it."""
        if len(self._open) >= self.limit and not self._make_room():
            self._log_limit.log(log.warning, "all %d connections are busy; new ones get 503", self.limit)
            return False
        self._open.add(connection)
        self.hear(connection)
        return True

    def _make_room(self) -> bool:
        oldest = next(iter(self._silent), None)
        if oldest is None or time.monotonic() - self._silent[oldest] < IDLE_S:
            return False
        self._log_limit.log(log.info, "all %d connections are in use; closing the most silent", self.limit)
        self.leave(oldest)
        oldest.cut()
        return True

    def hear(self, connection: Closable) -> None:
        """*connection* waits for its client from now on."""
        if connection in self._open:
            self._silent.pop(connection, None)
            self._silent[connection] = time.monotonic()

    def answer(self, connection: Closable) -> None:
        """*connection* has a whole request, which is being answered."""
        self._silent.pop(connection, None)

    def leave(self, connection: Closable) -> None:
        """*connection* ends."""
        self._open.discard(connection)
        self._silent.pop(connection, None)

    def closed_socket(self) -> None:
        """A socket that was counted in `num_sockets` is closed."""
        self.num_sockets -= 1
        self.on_room()
