"""Methods of `Executor` for tests' executors, which run in one process."""

from protos.interfaces import ALWAYS_UP, DraftService, PhaseTimes


class InOneProcess:
    """An executor without other processes."""

    drafting: DraftService = ALWAYS_UP
    times: PhaseTimes = PhaseTimes()
    lacks = ""

    def poll(self) -> None:
        """Do nothing: no messages arrive between rounds."""

    def rebuild(self, for_s: float) -> bool:
        """Return True: nothing was lost."""
        return True
