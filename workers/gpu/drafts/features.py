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
        self._generation_S: Ints = np.full(num_slots, -1, np.int64)
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
        order_RQ = _is_kept(nodes_R, queries).int().argsort(dim=1, descending=True, stable=True)
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
        table_M4, _ = kept(self._worker.needs, rows, verdicts, np.zeros(len(rows), np.int64), slots.generation)
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
        first_N, ends_N = self._wanted(slots_N)
        is_here_N = self._generation_S[slots_N] == self._worker.slots.generation[slots_N]
        is_here_N &= (self._first_S[slots_N] <= first_N) & (self._end_S[slots_N] >= ends_N)
        with torch.inference_mode():
            for n in np.flatnonzero(~is_here_N).tolist():
                at = slice(n, n + 1)
                states_NX = self._waiting(slots_N[at], first_N[at], ends_N[at])
                self._area_SCX[slots_N[n], : len(states_NX)].copy_(states_NX)
                self._hold(int(slots_N[n]), int(first_N[n]), int(ends_N[n]))
        columns_N: Ints = first_N - self._first_S[slots_N]
        return columns_N

    def _wanted(self, slots_N: Ints) -> tuple[Ints, Ints]:
        """Return the first position of the features that slots are fed, and the one after the last."""
        cache = self._worker.cache
        return cache.held[slots_N], cache.ends(slots_N)

    def _waiting(self, slots_N: Ints, first_N: Ints, ends_N: Ints) -> torch.Tensor:
        """Return the features of positions `first .. end`, which are in the cache."""
        return self._worker.cache.waiting.between(slots_N, first_N, ends_N)

    def _hold(self, slot: int, first: int, end: int) -> None:
        self._generation_S[slot] = self._worker.slots.generation[slot]
        self._first_S[slot], self._end_S[slot] = first, end

    def _take_in(self, states_TF: torch.Tensor) -> torch.Tensor:
        loaded = self._worker.forward.loaded
        taken_TX: torch.Tensor = self._worker.forward.module.take_in(states_TF.to(loaded.device, loaded.dtype))
        return taken_TX


class NewestFeatures(FeatureArea):
    """The features from which each sequence's newest token was sampled, for drafts that read no others.

    Args:
        engine: of the draft.
    """

    def __init__(self, engine: "DraftEngine") -> None:
        super().__init__(engine, 1)

    def write_accepted(self, inputs: RoundInputs, states_TF: torch.Tensor, nodes_R: torch.Tensor) -> None:
        """Write the features of each row's last accepted token; of its newest token if none is. See `FeatureArea`."""
        rows, queries = inputs.size
        columns_Q = torch.arange(queries, device=nodes_R.device)
        last_R = torch.where(_is_kept(nodes_R, queries), columns_Q, 0).amax(1)
        first_R = torch.arange(0, rows * queries, queries, device=nodes_R.device)
        states_RX = self._take_in(states_TF.index_select(0, first_R + last_R))
        self._area_SCX[:, 0].index_copy_(0, inputs.on_device["slots_R"], states_RX)

    def newest(self, inputs: RoundInputs) -> torch.Tensor:
        """Return the features of each row, `[R, X]`; they are in the area."""
        return self._area_SCX[:, 0].index_select(0, inputs.on_device["slots_R"])

    def _wanted(self, slots_N: Ints) -> tuple[Ints, Ints]:
        ends_N = self._worker.cache.waiting.end_S[slots_N]
        return ends_N - 1, ends_N

    def _waiting(self, slots_N: Ints, first_N: Ints, ends_N: Ints) -> torch.Tensor:
        return self._worker.cache.waiting.newest(slots_N.tolist())


def _is_kept(nodes_R: torch.Tensor, queries: int) -> torch.Tensor:
    """Return which of Q tokens are the newest or accepted after it, `[R, Q]`; `nodes_R` as for `FeatureArea`."""
    columns_Q = torch.arange(queries, device=nodes_R.device)
    bits_RQ = (nodes_R[:, None] >> (columns_Q - 1).clamp_min(0)) & 1
    return (columns_Q == 0) | (bits_RQ == 1)
