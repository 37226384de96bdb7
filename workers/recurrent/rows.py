"""Which tokens of a forward are run through the recurrence together, and which states are kept.

The state after the last known token but one, and after every token that follows it, is kept: after verification the
next forward begins after one of these. Tokens before are run as one chunk, which ends and begins anew where a state is
kept for the prefix cache; those after one at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from workers.attention.batch import Batch, Ints
from workers.recurrent.kept_states import KeptStates


@dataclass(frozen=True)
class EqualRows:
    """Rows of a forward that run equally many of their tokens at once.

    Attributes:
        rows_G: int64, their indices among the forward's rows.
        tokens_GL: int64, the flat index of each of the tokens.
        are_all: they are all rows with all tokens of the forward, in order.
    """

    rows_G: torch.Tensor
    tokens_GL: torch.Tensor
    are_all: bool

    def take(self, values_T: torch.Tensor) -> torch.Tensor:
        """Return the values `[T, ...]` of the tokens as `[G, L, ...]`."""
        if self.are_all:
            return values_T.reshape(*self.tokens_GL.shape, *values_T.shape[1:])
        return values_T[self.tokens_GL]

    def put(self, values_T: torch.Tensor | None, own_GL: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Write the tokens' values `[G, L, ...]` into `[num_tokens, ...]`, which is made if it is None; return it."""
        if self.are_all:
            return own_GL.flatten(0, 1)
        if values_T is None:
            values_T = own_GL.new_empty(num_tokens, *own_GL.shape[2:])
        values_T[self.tokens_GL] = own_GL
        return values_T


@dataclass(frozen=True)
class ScanRun:
    """One call of the recurrence. A chunk has several tokens, a step one.

    The states after it of row `of_M` (among the G) are kept at `places_M` of a pool; None: of each row, in order.
    """

    rows: EqualRows
    of_M: torch.Tensor | None
    places_M: torch.Tensor


@dataclass(frozen=True)
class ConvRun:
    """One call of the convolution over all tokens of some rows.

    The states of row `of_M` (among the G) after its first `after_M` tokens are kept at `places_M` of a pool.
    """

    rows: EqualRows
    of_M: torch.Tensor
    after_M: torch.Tensor
    places_M: torch.Tensor


@dataclass(frozen=True)
class StatePlan:
    """A forward of R rows and T tokens.

    Attributes:
        start_R: the places of the rows' states before the forward.
        fresh_R: bool, the rows that begin at position 0, from a state of zeros; None if there are none.
        scans: in order.
        convs: in any order.
        slots_N, positions_N: the slots and positions of the states that are kept for the slots, on the host.
    """

    num_rows: int
    num_tokens: int
    start_R: torch.Tensor
    fresh_R: torch.Tensor | None
    scans: tuple[ScanRun, ...]
    convs: tuple[ConvRun, ...]
    slots_N: Ints
    positions_N: Ints


@dataclass(frozen=True)
class _Kept:
    """States that are kept: after so many tokens of some rows, at these places of a pool. On the host."""

    rows_M: Ints
    after_M: Ints
    places_M: Ints

    def __add__(self, other: "_Kept") -> "_Kept":
        return _Kept(
            np.concatenate([self.rows_M, other.rows_M]),
            np.concatenate([self.after_M, other.after_M]),
            np.concatenate([self.places_M, other.places_M]),
        )

    def where(self, chosen_M: np.ndarray) -> "_Kept":
        return _Kept(self.rows_M[chosen_M], self.after_M[chosen_M], self.places_M[chosen_M])


class RowPlanner:
    """Plans forwards over pools of states.

    The first *num_slots* times *num_checkpoints* places are the slots': position p of a slot is kept at `p %
    num_checkpoints` among its own. Those that follow are the prefix cache's, by number.
    """

    def __init__(self, num_slots: int, num_checkpoints: int, device: torch.device) -> None:
        self._num_slots, self._num_checkpoints, self._device = num_slots, num_checkpoints, device

    def plan(self, batch: Batch, known_R: Ints) -> StatePlan:
        """Plan *batch*; `known_R` is the number of known tokens of each row's sequence."""
        starts_R = batch.starts_R
        chunks_R = np.clip(known_R - 1, starts_R, starts_R + batch.lengths_R) - starts_R
        chunks_R[chunks_R == 1] = 0  # a chunk of one token is a step
        cached = self._cached(batch)
        scans: list[ScanRun] = []
        kept: list[_Kept] = []
        for rows_G, before_G, size in _runs(chunks_R, batch.lengths_R, cached):
            after_G = before_G + size
            own = self._own(batch, rows_G, after_G).where(after_G >= chunks_R[rows_G])
            kept.append(own)
            scans.append(self._scan(batch, rows_G, before_G, size, own if cached is None else own + cached))
        own = sum(kept[1:], kept[0])
        fresh_R = starts_R == 0
        return StatePlan(
            len(starts_R),
            len(batch.tokens_T),
            self._tensor(self._start(batch)),
            self._tensor(fresh_R) if fresh_R.any() else None,
            tuple(scans),
            tuple(self._convs(batch, own if cached is None else own + cached)),
            batch.slots_R[own.rows_M],
            starts_R[own.rows_M] + own.after_M,
        )

    def _start(self, batch: Batch) -> Ints:
        own_R = self._place(batch.slots_R, batch.starts_R)
        if batch.kept_states is None:
            return own_R
        from_R = batch.kept_states.from_R
        return np.where(from_R < 0, own_R, self._cached_place(from_R))

    def _own(self, batch: Batch, rows_M: Ints, after_M: Ints) -> _Kept:
        places_M = self._place(batch.slots_R[rows_M], batch.starts_R[rows_M] + after_M)
        return _Kept(rows_M, after_M, places_M)

    def _cached(self, batch: Batch) -> _Kept | None:
        """Return the states for the prefix cache; those after a draft shorter than was planned are not there."""
        states: KeptStates | None = batch.kept_states
        if states is None or not len(states.rows_N):
            return None
        after_N = states.positions_N - batch.starts_R[states.rows_N]
        found = _Kept(states.rows_N, after_N, self._cached_place(states.numbers_N))
        return found.where(after_N <= batch.lengths_R[states.rows_N])

    def _place(self, slots_M: Ints, positions_M: Ints) -> Ints:
        return slots_M * self._num_checkpoints + positions_M % self._num_checkpoints

    def _cached_place(self, numbers_M: Ints) -> Ints:
        return self._num_slots * self._num_checkpoints + numbers_M

    def _convs(self, batch: Batch, kept: _Kept) -> Iterator[ConvRun]:
        for length in np.unique(batch.lengths_R).tolist():
            rows_G = np.flatnonzero(batch.lengths_R == length)
            own = kept.where(batch.lengths_R[kept.rows_M] == length)
            yield ConvRun(
                self._equal(batch, rows_G, np.zeros_like(rows_G), length),
                self._tensor(np.searchsorted(rows_G, own.rows_M)),
                self._tensor(own.after_M),
                self._tensor(own.places_M),
            )

    def _scan(self, batch: Batch, rows_G: Ints, before_G: Ints, size: int, kept: _Kept) -> ScanRun:
        of_M = np.clip(np.searchsorted(rows_G, kept.rows_M), 0, len(rows_G) - 1)
        is_here_M = (rows_G[of_M] == kept.rows_M) & (before_G[of_M] + size == kept.after_M)
        of_M = of_M[is_here_M]
        return ScanRun(
            self._equal(batch, rows_G, before_G, size),
            None if np.array_equal(of_M, np.arange(len(rows_G))) else self._tensor(of_M),
            self._tensor(kept.places_M[is_here_M]),
        )

    def _equal(self, batch: Batch, rows_G: Ints, before_G: Ints, size: int) -> EqualRows:
        tokens_GL = (batch.offsets_R[rows_G] + before_G)[:, None] + np.arange(size)
        are_all = tokens_GL.size == len(batch.tokens_T)
        return EqualRows(self._tensor(rows_G), self._tensor(tokens_GL), are_all)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)


def _runs(chunks_R: Ints, lengths_R: Ints, cached: _Kept | None) -> Iterator[tuple[Ints, Ints, int]]:
    """Yield the calls of the recurrence in order: rows, how many of their tokens come before, and how many are run."""
    before_R = np.zeros_like(chunks_R)
    while len(rows_M := np.flatnonzero(before_R < chunks_R)):
        ends_R = chunks_R.copy()
        if cached is not None:
            inside = cached.where(cached.after_M > before_R[cached.rows_M])
            np.minimum.at(ends_R, inside.rows_M, inside.after_M)
        sizes_R = ends_R - before_R
        for size in np.unique(sizes_R[rows_M]).tolist():
            rows_G = rows_M[sizes_R[rows_M] == size]
            yield rows_G, before_R[rows_G], size
        before_R = np.maximum(ends_R, before_R)
    for step in range(int((lengths_R - chunks_R).max())):
        rows_G = np.flatnonzero(lengths_R - chunks_R > step)
        yield rows_G, chunks_R[rows_G] + step, 1
