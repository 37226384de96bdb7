"""The target's KV cache as that of a draft with the target's weights."""

from protos.layers import Needs
from workers.attention.batch import Ints
from workers.draft.cache import DraftCache
from workers.model.draft_forward import DraftForward
from workers.model.windowed_runner import WindowedRunner
from workers.slots import SlotTable


class TargetCache(DraftCache):
    """The target's own cache, which a draft reads, and into which it drafts.

    The draft computes the newest known token and its draft tokens, at the places after those that the target has
    computed. In the same round the target feeds these places itself, and writes K and V before it reads them. So
    nothing that the draft wrote is ever read by the target, kept, or found as a prefix.
    """

    def __init__(self, forward: DraftForward, slots: SlotTable) -> None:
        super().__init__(forward, slots, "none", 0)

    def reach(self, slot: int) -> int:
        """Return how many entries the target has: the draft computes none for it."""
        return int(self.slots.computed[slot])

    def fits(self, slot: int, depth: int) -> bool:
        """Whether the target has computed all but the newest token, and the context has room."""
        return self.reach(slot) == int(self.slots.known_len[slot]) - 1 and super().fits(slot, depth)

    def refresh(self, slot: int) -> int:
        """See `DraftCache.refresh`."""
        self.held[slot] = self.reach(slot)
        return int(self.held[slot])

    def _record(self, slots_R: Ints, first_R: Ints, end_R: Ints) -> None:
        self.held[slots_R] = end_R


def cache_of(forward: DraftForward, slots: SlotTable, needs: Needs, shift: int) -> DraftCache:
    """Return the record of what the cache of *forward* holds, for the arguments of `DraftCache`."""
    return (
        TargetCache(forward, slots) if isinstance(forward, WindowedRunner) else DraftCache(forward, slots, needs, shift)
    )
