"""The target's features of each sequence's newest tokens, at addresses that graphs keep.

The target's graph writes those of the tokens that it accepts, the draft's graph of the next round reads them. The host
knows which positions they belong to, and copies features that came another way to the same place.
"""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
import torch

from protos.messages import Row, Verdict
from workers.attention.batch import Flags, Ints
from workers.features import COUNT, FIRST, SLOT, kept
from workers.gpu.inputs import RoundInputs

if TYPE_CHECKING:
    from workers.draft.engine import DraftEngine


class FeatureArea:
    """Features of C tokens of each of S slots, and a spare slot for padding.

    Args:
        engine: of the draft, whose module takes them in before they are stored.
        columns: C.
    """

    def __init__(self, engine: "DraftEngine", columns: int) -> None:
        self._worker = engine.worker
        loaded, num_slots = engine.worker.forward.loaded, len(engine.worker.slots.known_len)
        with torch.inference_mode():
            width = self._take_in(torch.zeros(1, engine.width, dtype=loaded.dtype, device=loaded.device)).shape[1]
            shape = (num_slots + 1, columns, width)
            self._area_SCX = torch.zeros(shape, dtype=loaded.dtype, device=loaded.device)
        self._joined_S: Ints = np.full(num_slots, -1, np.int64)
        self._first_S: Ints = np.zeros(num_slots, np.int64)  # position of the features in column 0
        self._end_S: Ints = np.zeros(num_slots, np.int64)
        self._is_waiting_S: Flags = np.zeros(num_slots, np.bool_)  # the cache's waiting features are in the area

    @property
    def columns(self) -> int:
        """C."""
        return self._area_SCX.shape[1]

    # Inside graphs.

    def write_accepted(self, inputs: RoundInputs, states_TF: torch.Tensor, nodes_R: torch.Tensor) -> None:
        """Write the features of each row's newest token and of the draft tokens that are accepted after it, in order.

        Args:
            inputs: of the target's round, Q tokens in each of R rows.
            states_TF: the target's features of all of them.
            nodes_R: bit n is set if node n is accepted.
        """
        rows, queries = inputs.size
        columns_Q = torch.arange(queries, device=nodes_R.device)
        bits_RQ = (nodes_R[:, None] >> (columns_Q - 1).clamp_min(0)) & 1
        is_kept_RQ = (columns_Q == 0) | (bits_RQ == 1)
        order_RQ = is_kept_RQ.int().argsort(dim=1, descending=True, stable=True)
        states_RQX = self._take_in(states_TF).view(rows, queries, -1)
        kept_RQX = states_RQX.gather(1, order_RQ[:, :, None].expand(-1, -1, states_RQX.shape[2]))
        self._area_SCX[:, :queries].index_copy_(0, inputs.on_device["slots_R"], kept_RQX)

    def known(self, inputs: RoundInputs) -> torch.Tensor:
        """Return the features of the last C known tokens that each row is fed, the newest last, `[R * C, X]`."""
        found, most = inputs.on_device, inputs.on_device["known_RC"].shape[1]
        newest_R = found["columns_R"] + found["lacking_R"]
        back_C = torch.arange(1 - most, 1, device=newest_R.device)
        at_RC = (newest_R[:, None] + back_C).clamp(0, self.columns - 1)
        states_RCX = self._area_SCX.index_select(0, found["slots_R"])
        return states_RCX.gather(1, at_RC[:, :, None].expand(-1, -1, states_RCX.shape[2])).flatten(0, 1)

    # On the host.

    def note(self, rows: Seq[Row], verdicts: Seq[Verdict]) -> None:
        """Record what the target's graph has written in a round, and have it wait to be fed."""
        slots, cache = self._worker.slots, self._worker.cache
        table_M4, _ = kept("all", rows, verdicts, np.zeros(len(rows), np.int64), slots.joined)
        for line in table_M4.tolist():
            slot, first, count = line[SLOT], line[FIRST], line[COUNT]
            states_NX = self._area_SCX[slot, :count]
            cache.start_if_new(slot)
            cache.put(slot, first, states_NX, states_NX[-1])
            self._hold(slot, first, first + count)
            self._is_waiting_S[slot] = True

    def save(self, slots_N: Ints) -> None:
        """Copy what waits in the area for slots which the target's graph is about to write."""
        for slot in slots_N[self._is_waiting_S[slots_N]].tolist():
            self._worker.cache.waiting.copy(slot)
            self._is_waiting_S[slot] = False

    def stage(self, slots_N: Ints) -> Ints:
        """Bring the features that slots wait to be fed into the area, at most C each; return their first columns."""
        cache = self._worker.cache
        held_N, ends_N = cache.held[slots_N], cache.ends(slots_N)
        is_here_N = self._joined_S[slots_N] == self._worker.slots.joined[slots_N]
        is_here_N &= (self._first_S[slots_N] <= held_N) & (self._end_S[slots_N] >= ends_N)
        with torch.inference_mode():
            for n in np.flatnonzero(~is_here_N).tolist():
                at = slice(n, n + 1)
                states_NX = cache.waiting.between(slots_N[at], held_N[at], ends_N[at])
                self._area_SCX[slots_N[n], : len(states_NX)].copy_(states_NX)
                self._hold(int(slots_N[n]), int(held_N[n]), int(ends_N[n]))
        columns_N: Ints = held_N - self._first_S[slots_N]
        return columns_N

    def _hold(self, slot: int, first: int, end: int) -> None:
        self._joined_S[slot] = self._worker.slots.joined[slot]
        self._first_S[slot], self._end_S[slot] = first, end

    def _take_in(self, states_TF: torch.Tensor) -> torch.Tensor:
        loaded = self._worker.forward.loaded
        taken_TX: torch.Tensor = self._worker.forward.module.take_in(states_TF.to(loaded.device, loaded.dtype))
        return taken_TX
