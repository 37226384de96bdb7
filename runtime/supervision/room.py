"""Whether the cluster has room for the ranks of a target group that is rebuilt, and for how long it has had none."""

from collections.abc import Sequence as Seq

from protos.errors import NoRoomError
from protos.worker_messages import WorkerId
from runtime.supervision.watchdog import Clock

STARTING_S = 5.0
"""A rank whose process does not run after this long has no room in the cluster."""
RETRY_S = 10.0
"""Delay after which clients may retry while there is no room: nobody knows when a machine comes back."""


class Room:
    """Records which ranks have no process, and since when there are any.

    Args:
        timeout_s: `rebuild_timeout_s`, after which requests are refused.
        clock: seconds, monotonic.
    """

    def __init__(self, timeout_s: float, clock: Clock) -> None:
        self._timeout_s, self._clock = timeout_s, clock
        self._lacking: tuple[WorkerId, ...] = ()
        self._since: float | None = None

    def note(self, lacking: Seq[WorkerId]) -> None:
        """Record the ranks that have no process now. Another attempt to start them does not begin a new wait."""
        self._lacking = tuple(lacking)
        if not lacking:
            self._since = None
        elif self._since is None:
            self._since = self._clock()

    @property
    def num_lacking(self) -> int:
        """How many ranks have no process."""
        return len(self._lacking)

    @property
    def lacking_s(self) -> float:
        """Seconds since some rank has no process; 0.0 if all have one."""
        return 0.0 if self._since is None else self._clock() - self._since

    @property
    def lacks(self) -> str:
        """The ranks for which there has been no room for a while; a process takes a moment to start."""
        is_new = self.lacking_s < min(STARTING_S, self._timeout_s)
        return "" if self._since is None or is_new else ", ".join(map(str, self._lacking))

    def check(self) -> None:
        """Raise `NoRoomError` if there has been no room for too long."""
        if self.lacking_s > self._timeout_s:
            raise NoRoomError(
                f"no room was found for {self.lacks} within {self._timeout_s:.0f} s (rebuild_timeout_s)", RETRY_S
            )
