"""The target's features (hidden states) that a draft is fed: which tokens they belong to, and those not fed yet."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from protos.layers import Needs
from protos.messages import Row, Verdict
from workers.attention.batch import Flags, Ints

SLOT, GENERATION, FIRST, COUNT = range(4)


@dataclass(frozen=True)
class Features:
    """Features of tokens that were committed.

    Attributes:
        table_M4: int64; runs of consecutive tokens: slot, generation, first position, count.
        states_NF: the features of all runs, one run after another.
    """

    table_M4: Ints
    states_NF: torch.Tensor


def kept(
    needs: Needs, rows: Seq[Row], verdicts: Seq[Verdict], offsets_R: Ints, generation_S: Ints
) -> tuple[Ints, Ints]:
    """Return whose features the draft is fed after a round: the table of `Features`, and flat indices of the tokens.

    Args:
        needs: "all": every kept token; "last": the token after which a row's newest token was sampled.
        rows: in the order in which they were fed: known tokens, then draft tokens.
        verdicts: of the rows that have one.
        offsets_R: int64, flat index of each row's first token.
        generation_S: the generation of each slot.
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
            runs.append((row.slot, int(generation_S[row.slot]), first, len(places)))
            fed += places
    return np.array(runs, np.int64).reshape(-1, 4), np.array(fed, np.int64)


def merged(known_KX: torch.Tensor | None, is_known_T: Flags, features_NX: torch.Tensor | None) -> torch.Tensor | None:
    """Return the features of known and draft tokens in the order of the batch; zeros where there are none."""
    given = known_KX if known_KX is not None else features_NX
    if given is None:
        return None
    features_TX = given.new_zeros(len(is_known_T), given.shape[1])
    if known_KX is not None:
        features_TX[torch.from_numpy(np.flatnonzero(is_known_T)).to(given.device)] = known_KX
    if features_NX is not None:
        features_TX[torch.from_numpy(np.flatnonzero(~is_known_T)).to(given.device)] = features_NX
    return features_TX


class Waiting:
    """Features by slot that were not fed yet, positions `end - len .. end` of each sequence, and the newest of each.

    Owned by one draft worker, which clears a slot when another sequence takes it.
    """

    def __init__(self, num_slots: int) -> None:
        self.end_S: Ints = np.zeros(num_slots, np.int64)
        self._chunks: list[list[torch.Tensor]] = [[] for _ in range(num_slots)]
        self._newest: list[torch.Tensor | None] = [None] * num_slots

    def clear(self, slot: int) -> None:
        """Remove all features of *slot*."""
        self.end_S[slot] = 0
        self._chunks[slot] = []
        self._newest[slot] = None

    def put(self, slot: int, first: int, states_NX: torch.Tensor, newest_X: torch.Tensor | None = None) -> bool:
        """Add the features of positions from *first* on. Return False after a gap, which discards earlier features.

        The last ones are copied, for `newest`, unless they are given as *newest_X*, too.
        """
        end = int(self.end_S[slot])
        follows = self._newest[slot] is not None and first <= end
        fresh_NX = states_NX[end - first :] if follows else states_NX
        if len(fresh_NX):
            self._chunks[slot] = [*self._chunks[slot], fresh_NX] if follows else [fresh_NX]
            # A view would keep the whole round's features alive.
            self._newest[slot] = fresh_NX[-1].clone() if newest_X is None else newest_X
            self.end_S[slot] = first + len(states_NX)
        return follows

    def copy(self, slot: int) -> None:
        """Copy the features of *slot*, whose memory is about to be used for others."""
        if self._chunks[slot]:
            self._chunks[slot] = [torch.cat(self._chunks[slot]).clone()]

    def keep_newest(self, slot: int) -> None:
        """Drop all features of *slot* but the newest."""
        self._chunks[slot] = []

    def newest(self, slots_R: Seq[int]) -> torch.Tensor:
        """Return the newest features, `[R, X]`."""
        return torch.stack([state for slot in slots_R if (state := self._newest[slot]) is not None])

    def between(self, slots_R: Ints, first_R: Ints, end_R: Ints) -> torch.Tensor:
        """Return the features of positions `first .. end` of each slot, concatenated, `[T, X]`."""
        return torch.cat(
            [
                self._chunk(slot)[first - self.base(slot) : end - self.base(slot)]
                for slot, first, end in zip(slots_R.tolist(), first_R.tolist(), end_R.tolist(), strict=True)
            ]
        )

    def drop(self, slots_R: Ints, end_R: Ints) -> None:
        """Drop the features before position `end` of each slot, which were fed."""
        for slot, end in zip(slots_R.tolist(), end_R.tolist(), strict=True):
            rest_NX = self._chunk(slot)[end - self.base(slot) :]
            self._chunks[slot] = [rest_NX] if len(rest_NX) else []

    def base(self, slot: int) -> int:
        """Return the position of the first features held; of the next ones where none are held."""
        return int(self.end_S[slot]) - sum(len(chunk) for chunk in self._chunks[slot])

    def _chunk(self, slot: int) -> torch.Tensor:
        """Return all features held for *slot*, concatenated."""
        if len(self._chunks[slot]) > 1:
            self._chunks[slot] = [torch.cat(self._chunks[slot])]
        return self._chunks[slot][0]
