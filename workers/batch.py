"""The input of one forward: the tokens of all rows, flattened, without padding and without phases."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Rows of one forward; row r feeds `lengths_R[r]` tokens at positions `starts_R[r] ...` of its slot.

    Attributes:
        slots_R, starts_R, lengths_R: int64 `[R]`.
        tokens_T: int64 `[T]`, T = sum of lengths, row after row.
    """

    slots_R: Ints
    starts_R: Ints
    lengths_R: Ints
    tokens_T: Ints

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
    def positions_T(self) -> Ints:
        """The position of every token in its sequence."""
        if self._is_plain:
            return self.starts_R
        return np.arange(len(self.tokens_T)) + np.repeat(self.starts_R - self.offsets_R, self.lengths_R)

    @property
    def _is_plain(self) -> bool:
        """Whether every row feeds one token: the common case, in which there is nothing to lay out."""
        return len(self.tokens_T) == len(self.slots_R)

    @classmethod
    def from_history(cls, tokens_SL: Ints, slots_R: Ints, starts_R: Ints, lengths_R: Ints) -> "Batch":
        """Build the batch whose tokens stand in the table `tokens_SL`."""
        rows = cls(slots_R, starts_R, lengths_R, np.empty(int(lengths_R.sum()), np.int64))
        np.copyto(rows.tokens_T, tokens_SL[rows.slots_T, rows.positions_T])
        return rows
