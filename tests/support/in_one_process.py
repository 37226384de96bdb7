"""Methods of `Executor` for tests' executors, which run in one process."""

from protos.interfaces import ALWAYS_UP, DraftService, PhaseTimes
from protos.messages import WorkerInfo


class InOneProcess:
    """An executor without other processes."""

    drafting: DraftService = ALWAYS_UP
    times: PhaseTimes = PhaseTimes()
    lacks = ""

    def poll(self) -> None:
        """Do nothing: no messages arrive between rounds."""

    def rebuild(self, for_s: float) -> WorkerInfo | None:
        """Return None: nothing was lost."""
        return None
