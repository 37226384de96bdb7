"""The input of one forward: the tokens of all rows, flattened, without padding and without phases."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
WORD = 64


class TreeMask(NamedTuple):
    """The end of one row where places are not positions: a draft's tree, or a block that sees itself both ways.

    A token's *place* is where its K and V stand, counted along the row's blocks; elsewhere it is the position, too.

    Attributes:
        first: the place where the area begins. All before it are known tokens.
        positions: the position of each place of the area, those fed in earlier forwards included.
        seen: for each of the tokens that the row feeds last, a number of which bit j says whether it sees the area's
            place j. Tokens before them see nothing of it. Each must see itself; windows are applied besides.
    """

    first: int
    positions: Seq[int]
    seen: Seq[int]


@dataclass(frozen=True)
class TreeMasks:
    """The areas of a forward's R rows and T tokens, contiguous; A is the size of the largest.

    Attributes:
        first_R: int64; behind the row's last token where it has none.
        sizes_R: int64; 0 where it has none.
        positions_RA: int64.
        seen_TW: uint64, bit `j % 64` of word `j // 64` for place j.
    """

    first_R: Ints
    sizes_R: Ints
    positions_RA: Ints
    seen_TW: Words

    @classmethod
    def of(cls, areas: Seq[TreeMask | None], ends_R: Ints, lengths_R: Ints) -> "TreeMasks":
        """Gather the areas of rows that feed `lengths_R` tokens up to the places `ends_R`."""
        sizes_R = np.array([0 if area is None else len(area.positions) for area in areas], np.int64)
        largest = max(1, int(sizes_R.max()))
        positions_RA = np.zeros((len(areas), largest), np.int64)
        seen_TW = np.zeros((int(lengths_R.sum()), -(-largest // WORD)), np.uint64)
        first_R = ends_R.copy()
        for r, (area, end) in enumerate(zip(areas, np.cumsum(lengths_R).tolist(), strict=True)):
            if area is not None:
                first_R[r] = area.first
                positions_RA[r, : len(area.positions)] = area.positions
                seen_TW[end - len(area.seen) : end] = _words(area.seen, seen_TW.shape[1])
        return cls(first_R, sizes_R, positions_RA, seen_TW)

    def positions(self, rows_N: Ints, places_N: Ints) -> Ints:
        """Return the positions of places of some rows, int64, in the shape that both broadcast to."""
        inside_N = places_N - self.first_R[rows_N]
        found_N = self.positions_RA[rows_N, np.clip(inside_N, 0, self.positions_RA.shape[1] - 1)]
        return np.where(inside_N >= 0, found_N, places_N)


def _words(masks: Seq[int], width: int) -> Words:
    """Return *masks* as words, the least significant first, `[N, width]`."""
    data = b"".join([mask.to_bytes(width * WORD // 8, "little") for mask in masks])
    return np.frombuffer(data, "<u8").reshape(len(masks), width)


@dataclass(frozen=True)
class Batch:
    """Rows of one forward; row r feeds `lengths_R[r]` tokens at places `starts_R[r] ...` of its slot.

    Attributes:
        slots_R, starts_R, lengths_R: int64 `[R]`.
        tokens_T: int64 `[T]`, T = sum of lengths, row after row.
        areas: of rows in which places are not positions; None where there is no such row.
        lowest_R: int64 `[R]`, contiguous; the first place of each row whose K and V are there: nobody sees what lies
            below. None where all are.
    """

    slots_R: Ints
    starts_R: Ints
    lengths_R: Ints
    tokens_T: Ints
    areas: TreeMasks | None = None
    lowest_R: Ints | None = None

    @cached_property
    def offsets_R(self) -> Ints:
        """Index in the flat order of each row's first token."""
        if self._is_plain:
            return np.arange(len(self.slots_R))
        return np.cumsum(self.lengths_R) - self.lengths_R

    @cached_property
    def slots_T(self) -> Ints:
        """The slot of every token."""
        return self.slots_R if self._is_plain else np.repeat(self.slots_R, self.lengths_R)

    @cached_property
    def places_T(self) -> Ints:
        """The place of every token along its row's blocks."""
        if self._is_plain:
            return self.starts_R
        return np.arange(len(self.tokens_T)) + np.repeat(self.starts_R - self.offsets_R, self.lengths_R)

    @cached_property
    def positions_T(self) -> Ints:
        """The position of every token in its sequence."""
        if self.areas is None:
            return self.places_T
        return self.areas.positions(np.repeat(np.arange(len(self.slots_R)), self.lengths_R), self.places_T)

    @property
    def _is_plain(self) -> bool:
        """Whether every row feeds one token: the common case, in which there is nothing to lay out."""
        return len(self.tokens_T) == len(self.slots_R)

    @classmethod
    def from_history(
        cls,
        tokens_SL: Ints,
        slots_R: Ints,
        starts_R: Ints,
        lengths_R: Ints,
        *,
        areas: TreeMasks | None = None,
        lowest_R: Ints | None = None,
    ) -> "Batch":
        """Build the batch whose tokens stand, by place, in the table `tokens_SL`."""
        rows = cls(slots_R, starts_R, lengths_R, np.empty(int(lengths_R.sum()), np.int64), areas, lowest_R)
        np.copyto(rows.tokens_T, tokens_SL[rows.slots_T, rows.places_T])
        return rows
