"""The target's features on their way into a draft: which tokens they belong to, and how long they wait to be fed."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from protos.layers import Needs
from protos.messages import Row, Verdict
from workers.attention.batch import Ints

SLOT, GENERATION, FIRST, COUNT = range(4)


@dataclass(frozen=True)
class Features:
    """Features of tokens that are kept for good.

    Attributes:
        table_M4: int64; runs of tokens that follow each other: slot, generation, first position, count.
        states_NF: the features of all runs, one run after another.
    """

    table_M4: Ints
    states_NF: torch.Tensor


def kept(needs: Needs, rows: Seq[Row], verdicts: Seq[Verdict], offsets_R: Ints, joined_S: Ints) -> tuple[Ints, Ints]:
    """Return which of a round's tokens the draft is fed: the table of `Features`, and flat indices of the tokens.

    Args:
        needs: "all" of every token that is kept; "last" of the one behind which a row's newest token was chosen.
        rows: as they were fed: their known tokens, then their drafts.
        verdicts: of the rows that have one.
        offsets_R: int64, flat index of each row's first token.
        joined_S: the generation of each slot.
    """
    by_slot = {verdict.slot: verdict for verdict in verdicts if verdict.failed is None}
    runs: list[tuple[int, int, int, int]] = []
    fed: list[int] = []
    for row, offset in zip(rows, offsets_R.tolist(), strict=True):
        path = by_slot[row.slot].path if row.samples and row.slot in by_slot else ()
        places = [*range(offset, offset + row.length), *(offset + row.length + node for node in path)]
        if needs == "last":
            places = places[-1:] if row.samples else []
        if places:
            first = row.start + row.length + len(path) - len(places)
            runs.append((row.slot, int(joined_S[row.slot]), first, len(places)))
            fed += places
    return np.array(runs, np.int64).reshape(-1, 4), np.array(fed, np.int64)


class Waiting:
    """Features by slot that were not fed yet, `end - len .. end` of each sequence, and the newest one of each.

    Owned by one draft worker, which empties a slot when another sequence joins it.
    """

    def __init__(self, num_slots: int) -> None:
        self.end_S: Ints = np.zeros(num_slots, np.int64)
        self._chunks: list[list[torch.Tensor]] = [[] for _ in range(num_slots)]
        self._newest: list[torch.Tensor | None] = [None] * num_slots

    def clear(self, slot: int) -> None:
        """Forget everything of *slot*."""
        self.end_S[slot] = 0
        self._chunks[slot] = []
        self._newest[slot] = None

    def put(self, slot: int, first: int, states_NX: torch.Tensor) -> bool:
        """Add the features of positions *first* on; False where a gap lies before them, so that all others are gone."""
        end = int(self.end_S[slot])
        follows = self._newest[slot] is not None and first <= end
        fresh_NX = states_NX[end - first :] if follows else states_NX
        if len(fresh_NX):
            self._chunks[slot] = [*self._chunks[slot], fresh_NX] if follows else [fresh_NX]
            self._newest[slot] = fresh_NX[-1].clone()  # a view would keep the whole round's features alive
            self.end_S[slot] = first + len(states_NX)
        return follows

    def keep_newest(self, slot: int) -> None:
        """Drop all features of *slot* but the newest."""
        self._chunks[slot] = []

    def newest(self, slots_R: Seq[int]) -> torch.Tensor:
        """Return the newest features, `[R, X]`."""
        return torch.stack([state for slot in slots_R if (state := self._newest[slot]) is not None])

    def between(self, slots_R: Ints, first_R: Ints, end_R: Ints) -> torch.Tensor:
        """Return the features of positions `first .. end` of each slot, one slot after another, `[T, X]`."""
        return torch.cat(
            [
                self._chunk(slot)[first - self.base(slot) : end - self.base(slot)]
                for slot, first, end in zip(slots_R.tolist(), first_R.tolist(), end_R.tolist(), strict=True)
            ]
        )

    def drop(self, slots_R: Ints, end_R: Ints) -> None:
        """Forget the features before position `end` of each slot: they were fed."""
        for slot, end in zip(slots_R.tolist(), end_R.tolist(), strict=True):
            rest_NX = self._chunk(slot)[end - self.base(slot) :]
            self._chunks[slot] = [rest_NX] if len(rest_NX) else []

    def base(self, slot: int) -> int:
        """Return the position of the first features that wait; of the next to come where none do."""
        return int(self.end_S[slot]) - sum(len(chunk) for chunk in self._chunks[slot])

    def _chunk(self, slot: int) -> torch.Tensor:
        """Return all features that wait, joined."""
        if len(self._chunks[slot]) > 1:
            self._chunks[slot] = [torch.cat(self._chunks[slot])]
        return self._chunks[slot][0]
