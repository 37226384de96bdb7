"""The target's KV cache as that of a draft with the target's weights."""

from protos.layers import Needs
from workers.attention.batch import Flags, Ints
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

    def reach(self, slots_R: Ints) -> Ints:
        """Return how many entries the target has: the draft computes none for it."""
        computed_R: Ints = self.slots.computed[slots_R]
        return computed_R

    def fits(self, slots_R: Ints, depths_R: Ints) -> Flags:
        """Return where the target has computed all but the newest token, and the context has room."""
        fits_R = super().fits(slots_R, depths_R)
        fits_R &= self.reach(slots_R) == self.slots.known_len[slots_R] - 1
        return fits_R

    def refresh(self, slots_R: Ints) -> Ints:
        """See `DraftCache.refresh`."""
        held_R = self.reach(slots_R)
        self.held[slots_R] = held_R
        return held_R

    def _record(self, slots_R: Ints, first_R: Ints, end_R: Ints) -> None:
        self.held[slots_R] = end_R


def cache_of(forward: DraftForward, slots: SlotTable, needs: Needs, shift: int) -> DraftCache:
    """Return the record of what the cache of *forward* holds, for the arguments of `DraftCache`."""
    return (
        TargetCache(forward, slots) if isinstance(forward, WindowedRunner) else DraftCache(forward, slots, needs, shift)
    )
