"""Counts how often a target group was rebuilt in a row, and ends the engine after too many: requests may kill it."""

from protos.errors import EngineDeadError, SlipstreamError
from runtime.supervision.watchdog import Clock

MAX_REBUILDS = 3
STEADY_ROUNDS, STEADY_S = 50, 60.0
"""After so many rounds or seconds a rebuilt group counts as healthy, and earlier rebuilds no longer count."""
DECLARED_S, AGAIN_S = 60.0, 1.0
"""Ray declares a machine dead within the first of these times, and until then starts workers there, in vain: so long
after a loss, starts that end with a death elsewhere do not count. Each is tried again after the second one."""


class RebuildCount:
    """The rebuilds since the group was last healthy.

    Args:
        clock: seconds, monotonic.

    Attributes:
        number: of rebuilds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.number = 0
        self._is_counted = False  # whether the last one was
        self._not_before = 0.0

    @property
    def is_due(self) -> bool:
        """Whether the next one may begin now."""
        return self._clock() >= self._not_before

    def begin(self, loss: str | None, *, rounds: int, served_s: float, is_counted: bool) -> str:
        """Count a rebuild, if it *is_counted*; return which it is, for a report.

        Args:
            loss: why the serving group was lost; None if the last rebuild failed.
            rounds: that group ran.
            served_s: seconds for which it served.
            is_counted: False if the group was lost for want of memory.

        Raises:
            EngineDeadError: the group was lost too often.
        """
        self._is_counted = is_counted
        if not is_counted:
            return "which was out of memory"
        if loss is not None:
            if rounds >= STEADY_ROUNDS or served_s >= STEADY_S:
                self.number = 0
            if self.number >= MAX_REBUILDS:
                raise EngineDeadError(
                    f"the target group was lost {MAX_REBUILDS + 1} times in a row, each time within "
                    f"{STEADY_ROUNDS} rounds; the last time: {loss}"
                )
        self.number += 1
        return f"attempt {self.number} of {MAX_REBUILDS}"

    def forgive(self) -> None:
        """Do not count the last one: a rank had died with the lost group, which was not known yet."""
        self.number -= self._is_counted
        self._is_counted = False

    def fail(self, failure: SlipstreamError, *, lost_s: float, is_elsewhere: bool) -> None:
        """Record that a rebuild failed.

        Args:
            failure: why.
            lost_s: seconds since the group was lost.
            is_elsewhere: whether a worker died that is, or may be, on another machine.

        Raises:
            EngineDeadError: it was the last attempt.
        """
        if is_elsewhere and lost_s < DECLARED_S:
            self.number -= self._is_counted
            self._not_before = self._clock() + AGAIN_S
        elif self.number >= MAX_REBUILDS:
            raise EngineDeadError(f"the target group could not be rebuilt in {MAX_REBUILDS} attempts: {failure}")
