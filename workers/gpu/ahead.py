"""Rounds that are launched before their plan comes, so that the device does not wait for the host."""

from dataclasses import dataclass

import numpy as np

from protos.messages import RoundPlan
from workers.attention.batch import Ints
from workers.gpu.sizes import Size
from workers.gpu.staging import SentResult
from workers.slots import SlotTable


@dataclass(frozen=True)
class RoundAhead:
    """A round without drafts that is launched before its plan. Its rows feed what the round before chose.

    Nothing is lost if another plan comes: keys and values beyond the known tokens mean nothing.

    Attributes:
        size: of the graph.
        rows_S: int64 `[S]`, the row of each slot; -1: none.
        generation_S, known_S: int64 `[S]`, which sequences its rows are of, and how many known tokens these will have.
        sent: its result.
    """

    size: Size
    rows_S: Ints
    generation_S: Ints
    known_S: Ints
    sent: SentResult

    @classmethod
    def of(cls, size: Size, slots_R: Ints, slots: SlotTable, sent: SentResult) -> "RoundAhead":
        """Return the round after one of the sequences in `slots_R`, which is running."""
        rows_S = np.full(len(slots.known_len), -1, np.int64)
        rows_S[slots_R] = np.arange(len(slots_R))
        return cls(size, rows_S, slots.generation.copy(), slots.known_len + 1, sent)

    def rows_of(self, plan: RoundPlan, slots_R: Ints, slots: SlotTable) -> Ints | None:
        """Return the rows of this round that are those of *plan*, which is in *slots* already; None if some are not.

        Sequences that have ended meanwhile have no row in *plan*.
        """
        if plan.new or plan.moves or plan.speculates or not plan.decodes or any(row.k for row in plan.rows):
            return None
        rows_R = self.rows_S[slots_R]
        is_same_R = (rows_R >= 0) & (self.generation_S[slots_R] == slots.generation[slots_R])
        return rows_R if (is_same_R & (self.known_S[slots_R] == slots.known_len[slots_R])).all() else None
