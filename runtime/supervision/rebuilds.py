"""The loss of a target group, and how often it was rebuilt in a row: after too many the engine ends, since requests may
kill it.
"""

from dataclasses import dataclass, field

from protos.errors import EngineDeadError, SlipstreamError
from protos.worker_messages import WorkerId
from runtime.supervision.watchdog import Clock

MAX_REBUILDS = 3
STEADY_ROUNDS, STEADY_S = 50, 60.0
"""After so many rounds or seconds a rebuilt group counts as healthy, and earlier rebuilds no longer count."""
DECLARED_S, AGAIN_S = 60.0, 1.0
"""Ray declares a machine dead within the first of these times, and until then starts workers there, in vain: so long
after a loss, starts that end with a death elsewhere do not count. Each is tried again after the second one."""


@dataclass
class Loss:
    """What is known of the loss of a serving group.

    Attributes:
        reason: why it is lost.
        gone: ranks that must be replaced.
        away: ranks that are silent since the network was cut, it seems; their processes may run.
        has_returned: whether one of those, or the rank that was out of memory, is known to run.
        shortage: why a rank left the group for want of memory; empty if none did.
        is_counted: whether it counts as a rebuild.
    """

    reason: str
    gone: set[WorkerId] = field(default_factory=set)
    away: set[WorkerId] = field(default_factory=set)
    has_returned: bool = False
    shortage: str = ""
    is_counted: bool = True

    @property
    def is_located(self) -> bool:
        """Whether it is known which ranks are gone: it may be none."""
        return bool(self.gone) or self.has_returned


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

    def begin(self, loss: Loss | None, *, rounds: int, served_s: float) -> str:
        """Count a rebuild, unless the group was lost for want of memory in a round; return which it is, for a report.

        Args:
            loss: of the serving group; None if the last rebuild failed.
            rounds: that group ran.
            served_s: seconds for which it served.

        Raises:
            EngineDeadError: the group was lost too often.
        """
        self._is_counted = loss is None or loss.is_counted
        if not self._is_counted:
            return "which was out of memory"
        if loss is not None:
            if rounds >= STEADY_ROUNDS or served_s >= STEADY_S:
                self.number = 0
            if self.number >= MAX_REBUILDS:
                raise EngineDeadError(
                    f"the target group was lost {MAX_REBUILDS + 1} times in a row, each time within "
                    f"{STEADY_ROUNDS} rounds; the last time: {loss.reason}"
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
