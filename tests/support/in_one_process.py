"""The part of an `Executor` that tests' executors share: they run in one process."""

from protos.interfaces import ALWAYS_UP, DraftService, PhaseTimes


class InOneProcess:
    """Has no other process to wait for or to lose."""

    drafting: DraftService = ALWAYS_UP
    times: PhaseTimes = PhaseTimes()

    def poll(self) -> None:
        """Do nothing: no messages arrive between rounds."""

    def rebuild(self, for_s: float) -> bool:
        """Return True: nothing was lost."""
        return True
