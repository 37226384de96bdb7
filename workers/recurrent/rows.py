"""Which tokens of a forward are run through the recurrence together, and which states are kept.

The state after the last known token but one, and after every token that follows it, is kept: after verification the
next forward begins after one of these. Tokens before are run as one chunk, those after one at a time.
"""

from dataclasses import dataclass

import numpy as np
import torch

from workers.attention.batch import Batch, Ints


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
class StatePlaces:
    """Where M states are kept: `[slots_M, checkpoints_M]` of a pool, int64."""

    slots_M: torch.Tensor
    checkpoints_M: torch.Tensor


@dataclass(frozen=True)
class ScanRun:
    """One call of the recurrence, and where the states after it are kept. A chunk has several tokens, a step one."""

    rows: EqualRows
    places: StatePlaces


@dataclass(frozen=True)
class ConvRun:
    """One call of the convolution over all tokens of some rows.

    The states of row `of_M` (among the G) after its first `after_M` tokens are kept.
    """

    rows: EqualRows
    of_M: torch.Tensor
    after_M: torch.Tensor
    places: StatePlaces


@dataclass(frozen=True)
class StatePlan:
    """A forward of R rows and T tokens.

    Attributes:
        start: where the rows' states before the forward are.
        fresh_R: bool, the rows that begin at position 0, from a state of zeros; None if there are none.
        scans: in order.
        convs: in any order.
        slots_N, positions_N: the slots and positions of all states that are kept, on the host.
    """

    num_rows: int
    num_tokens: int
    start: StatePlaces
    fresh_R: torch.Tensor | None
    scans: tuple[ScanRun, ...]
    convs: tuple[ConvRun, ...]
    slots_N: Ints
    positions_N: Ints


class RowPlanner:
    """Plans forwards over pools of *num_checkpoints* states per slot: position p is kept at `p % num_checkpoints`."""

    def __init__(self, num_checkpoints: int, device: torch.device) -> None:
        self._num_checkpoints, self._device = num_checkpoints, device

    def plan(self, batch: Batch, known_R: Ints) -> StatePlan:
        """Plan *batch*; `known_R` is the number of known tokens of each row's sequence."""
        starts_R, lengths_R, offsets_R = batch.starts_R, batch.lengths_R, batch.offsets_R
        ends_R = starts_R + lengths_R
        chunks_R = np.clip(known_R - 1, starts_R, ends_R) - starts_R
        chunks_R[chunks_R == 1] = 0  # a chunk of one token is a step
        scans: list[ScanRun] = []
        kept: list[tuple[Ints, Ints]] = []  # rows, and how many of their tokens come before the state
        for size in np.unique(chunks_R[chunks_R > 0]).tolist():
            rows_G = np.flatnonzero(chunks_R == size)
            scans.append(self._scan(batch, rows_G, offsets_R[rows_G], size, starts_R[rows_G] + size))
            kept.append((rows_G, np.full(len(rows_G), size)))
        for step in range(int((lengths_R - chunks_R).max())):
            rows_G = np.flatnonzero(lengths_R - chunks_R > step)
            before_G = chunks_R[rows_G] + step
            scans.append(self._scan(batch, rows_G, (offsets_R[rows_G] + before_G), 1, starts_R[rows_G] + before_G + 1))
            kept.append((rows_G, before_G + 1))
        rows_N, after_N = (np.concatenate(part) for part in zip(*kept, strict=True))
        fresh_R = starts_R == 0
        return StatePlan(
            len(starts_R),
            len(batch.tokens_T),
            self._places(batch.slots_R, starts_R),
            self._tensor(fresh_R) if fresh_R.any() else None,
            tuple(scans),
            tuple(self._convs(batch, rows_N, after_N)),
            batch.slots_R[rows_N],
            starts_R[rows_N] + after_N,
        )

    def _convs(self, batch: Batch, rows_N: Ints, after_N: Ints) -> list[ConvRun]:
        runs = []
        for length in np.unique(batch.lengths_R).tolist():
            rows_G = np.flatnonzero(batch.lengths_R == length)
            here_M = np.flatnonzero(batch.lengths_R[rows_N] == length)
            rows_M, after_M = rows_N[here_M], after_N[here_M]
            runs.append(
                ConvRun(
                    self._equal(batch, rows_G, batch.offsets_R[rows_G], length),
                    self._tensor(np.searchsorted(rows_G, rows_M)),
                    self._tensor(after_M),
                    self._places(batch.slots_R[rows_M], batch.starts_R[rows_M] + after_M),
                )
            )
        return runs

    def _scan(self, batch: Batch, rows_G: Ints, first_G: Ints, size: int, positions_G: Ints) -> ScanRun:
        return ScanRun(
            self._equal(batch, rows_G, first_G, size),
            self._places(batch.slots_R[rows_G], positions_G),
        )

    def _equal(self, batch: Batch, rows_G: Ints, first_G: Ints, size: int) -> EqualRows:
        tokens_GL = first_G[:, None] + np.arange(size)
        are_all = tokens_GL.size == len(batch.tokens_T)
        return EqualRows(self._tensor(rows_G), self._tensor(tokens_GL), are_all)

    def _places(self, slots_M: Ints, positions_M: Ints) -> StatePlaces:
        return StatePlaces(self._tensor(slots_M), self._tensor(positions_M % self._num_checkpoints))

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)
