"""Keeps the recurrent states of sequences: of each slot those after its last few positions, and the prefix cache's.

Rolling back is choosing the state of an earlier position, and beginning after a cached prefix choosing one of the
prefix cache's, so nothing is computed again.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import torch

from workers.attention.batch import Batch, Flags, Ints
from workers.recurrent.rows import ConvRun, RowPlanner, ScanRun, StatePlan


class RecurrentShape(NamedTuple):
    """The state of one layer of one sequence.

    Attributes:
        conv: channels, and how many inputs of the convolution are kept; `(0, 0)`: it has none.
        conv_dtype: of these inputs.
        scan: the shape of the recurrence's state; `()`: it has none.
        scan_dtype: of that state.
    """

    conv: tuple[int, int] = (0, 0)
    conv_dtype: torch.dtype = torch.float32
    scan: tuple[int, ...] = ()
    scan_dtype: torch.dtype = torch.float32

    @property
    def num_bytes(self) -> int:
        """Of one state."""
        scan = int(np.prod(self.scan)) * self.scan_dtype.itemsize if self.scan else 0
        return self.conv[0] * self.conv[1] * self.conv_dtype.itemsize + scan


RecurrentShapes = Mapping[int, RecurrentShape]
"""By the index of the layer."""
NO_STATES: RecurrentShapes = MappingProxyType({})
"""Of a model without recurrent layers."""


def bytes_per_slot(shapes: RecurrentShapes, max_draft: int) -> int:
    """Return the bytes of one sequence's states; 0 without recurrent layers."""
    return num_checkpoints(max_draft) * bytes_per_state(shapes)


def bytes_per_state(shapes: RecurrentShapes) -> int:
    """Return the bytes of the state after one token, in all layers."""
    return sum(shape.num_bytes for shape in shapes.values())


def num_checkpoints(max_draft: int) -> int:
    """Return how many states of a sequence are kept: before and after its newest token, and after each draft token."""
    return max_draft + 2


class RecurrentStates(Protocol):
    """The states that the layers of one forward read and write."""

    @property
    def plan(self) -> StatePlan:
        """The forward's rows."""
        ...

    def conv(self, layer: int) -> torch.Tensor | None:
        """Return the convolution's inputs before each row, `[R, channels, width]`; None: zeros."""
        ...

    def scan(self, layer: int) -> torch.Tensor | None:
        """Return the recurrence's state before each row, `[R, ...]`, which may be overwritten; None: zeros."""
        ...

    def keep_conv(self, layer: int, run: ConvRun, inputs_GCL: torch.Tensor) -> None:
        """Keep states of the rows of *run*; `inputs_GCL` are `conv` of these rows and their tokens'."""
        ...

    def keep_scan(self, layer: int, run: ScanRun, states_G: torch.Tensor) -> None:
        """Keep the states after *run*."""
        ...


class StatePool:
    """The states of all slots and of the prefix cache. See `RecurrentStates`.

    Args:
        shapes: of the layers.
        num_slots: S.
        max_draft: most draft tokens of a row.
        num_cached: states of the prefix cache.
        device: of the states.
    """

    def __init__(
        self, shapes: RecurrentShapes, num_slots: int, max_draft: int, num_cached: int, device: torch.device
    ) -> None:
        count = num_checkpoints(max_draft)
        places = num_slots * count + num_cached
        # The operating system allocates pages only when written.
        self._convs = {
            layer: torch.zeros(places, *shape.conv, dtype=shape.conv_dtype, device=device)
            for layer, shape in shapes.items()
        }
        self._scans = {
            layer: torch.zeros(places, *shape.scan, dtype=shape.scan_dtype, device=device)
            for layer, shape in shapes.items()
        }
        self._positions: Ints = np.full((num_slots, count), -1, np.int64)  # of the slots' states
        self._generations: Ints = np.zeros(num_slots, np.int64)  # of the sequences, as far as `latest` was told
        self._planner = RowPlanner(num_slots, count, device)
        self._plan: StatePlan | None = None

    @property
    def plan(self) -> StatePlan:
        """See `RecurrentStates`."""
        assert self._plan is not None, "a forward was planned"
        return self._plan

    def begin(self, batch: Batch, known_SL: Ints) -> None:
        """Plan a forward; `known_SL` is the number of known tokens of every slot.

        Raises:
            RuntimeError: a row begins after a position whose state is not kept.
        """
        plan = self._planner.plan(batch, known_SL[batch.slots_R])
        begins_R = batch.starts_R == 0
        if batch.kept_states is not None:
            begins_R |= batch.kept_states.from_R >= 0
        self._check(batch, begins_R)
        after_RC = self._positions[batch.slots_R] > batch.starts_R[:, None]
        self._positions[batch.slots_R] = np.where(after_RC | begins_R[:, None], -1, self._positions[batch.slots_R])
        self._positions[plan.slots_N, plan.positions_N % self._positions.shape[1]] = plan.positions_N
        self._plan = plan

    def latest(self, slots_R: Ints, generations_R: Ints, before_R: Ints) -> Ints:
        """Return the last position, at most `before_R`, whose state of this generation of each slot is kept; else 0."""
        is_new_R = self._generations[slots_R] != generations_R
        self._positions[slots_R[is_new_R]] = -1
        self._generations[slots_R] = generations_R
        positions_RC = self._positions[slots_R]
        latest_R: Ints = np.where(positions_RC <= before_R[:, None], positions_RC, 0).max(1, initial=0)
        return latest_R

    def _check(self, batch: Batch, begins_R: Flags) -> None:
        """Check that the states of rows that continue are kept."""
        starts_R = batch.starts_R
        found_R = self._positions[batch.slots_R, starts_R % self._positions.shape[1]]
        lost = np.flatnonzero((found_R != starts_R) & ~begins_R)
        if len(lost):
            row = int(lost[0])
            raise RuntimeError(
                f"slot {batch.slots_R[row]} is to continue after position {starts_R[row]}, but its recurrent states "
                f"are those after {sorted(self._positions[batch.slots_R[row]].tolist())}"
            )

    def conv(self, layer: int) -> torch.Tensor:
        """See `RecurrentStates`."""
        return self._read(self._convs[layer])

    def scan(self, layer: int) -> torch.Tensor:
        """See `RecurrentStates`."""
        return self._read(self._scans[layer])

    def _read(self, pool: torch.Tensor) -> torch.Tensor:
        states_R = pool[self.plan.start_R]
        if self.plan.fresh_R is not None:
            states_R[self.plan.fresh_R] = 0
        return states_R

    def keep_conv(self, layer: int, run: ConvRun, inputs_GCL: torch.Tensor) -> None:
        """See `RecurrentStates`."""
        pool = self._convs[layer]
        windows_GCNW = inputs_GCL.unfold(-1, pool.shape[-1], 1)
        pool[run.places_M] = windows_GCNW[run.of_M, :, run.after_M].to(pool.dtype)

    def keep_scan(self, layer: int, run: ScanRun, states_G: torch.Tensor) -> None:
        """See `RecurrentStates`."""
        pool = self._scans[layer]
        pool[run.places_M] = (states_G if run.of_M is None else states_G[run.of_M]).to(pool.dtype)


class ScratchStates:
    """States of a forward whose rows all begin at position 0 and are not continued. See `RecurrentStates`.

    Attributes:
        shapes: of the states that would have been kept.
    """

    def __init__(self, batch: Batch, device: torch.device) -> None:
        self.plan = RowPlanner(int(batch.slots_R.max()) + 1, 1, device).plan(batch, batch.lengths_R + 1)
        self.shapes: dict[int, RecurrentShape] = {}

    def conv(self, layer: int) -> None:
        """See `RecurrentStates`."""

    def scan(self, layer: int) -> None:
        """See `RecurrentStates`."""

    def keep_conv(self, layer: int, run: ConvRun, inputs_GCL: torch.Tensor) -> None:
        """See `RecurrentStates`."""
        width = inputs_GCL.shape[2] - run.rows.tokens_GL.shape[1]
        shape = self.shapes.get(layer, RecurrentShape())
        self.shapes[layer] = shape._replace(conv=(inputs_GCL.shape[1], width), conv_dtype=inputs_GCL.dtype)

    def keep_scan(self, layer: int, run: ScanRun, states_G: torch.Tensor) -> None:
        """See `RecurrentStates`."""
        shape = self.shapes.get(layer, RecurrentShape())
        self.shapes[layer] = shape._replace(scan=tuple(states_G.shape[1:]), scan_dtype=states_G.dtype)
