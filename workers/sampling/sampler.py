"""The one sampling pipeline: every token, of target and draft, speculative or not, is chosen here.

y = argmax over v of (log p(v) + g(seed, index, v)) at temperature > 0, argmax of log p at 0, where p is what edits
(`workers.sampling.logits_processors`), temperature and limits (`workers.sampling.sample`) make of the logits, and g is
keyed noise
(`workers.sampling.noise`). A choice depends on the row's logits, its slot's tokens before the index, and the request:
on nothing else in the batch. DESIGN section 5.
"""

import logging
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from protos.messages import Sampling
from workers.native.build import KernelUnavailableError
from workers.sampling.logits_processors import LogitsProcessors, changes_logits
from workers.sampling.noise import row_keys, signed
from workers.sampling.sample import COLDEST, Ints, Limits, best, choose, greedy, law
from workers.sampling.sample_native import NativeChooser
from workers.slots import SlotTable

logger = logging.getLogger(__name__)

Rows = tuple[torch.Tensor, Ints, Ints]  # logits, slots and index of N rows
Chooser = Callable[[torch.Tensor, Ints, Ints], torch.Tensor]
Flags = npt.NDArray[np.bool_]
EDIT_ELEMENTS = 1 << 15  # logits edited at a time on the host, so that they stay in the processor's cache


class Sampler:
    """Chooses tokens by the parameters in a worker's slot table.

    Args:
        slots: owned by the worker; read only.
        vocab_size: number of ids that may be chosen; logits may have more columns (padding), which are ignored.
        device: where the logits live.
    """

    def __init__(self, slots: SlotTable, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.slots, self.vocab_size = slots, vocab_size
        self._on_host = torch.device(device).type == "cpu"
        self._edits = LogitsProcessors(slots, vocab_size, torch.device(device))
        num_slots = len(slots.joined)
        self._joined_S: Ints = np.full(num_slots, -1, np.int64)
        self._seed_S: Ints = np.zeros(num_slots, np.int64)
        self._limits_S = Limits(
            np.ones(num_slots, np.float32), np.zeros(num_slots, np.int64), np.ones(num_slots), np.zeros(num_slots)
        )
        self._edited_S = np.zeros(num_slots, np.bool_)
        self._choose: Chooser = self._native() or self._choose_in_torch

    def sample(self, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> torch.Tensor:
        """Return the chosen ids, int64 `[N]` on the logits' device; -1 for rows from which none can be chosen.

        Args:
            logits_NV: float32, raw; not changed.
            slots_N: int64, the slot of each row.
            index_N: int64, the position in prompt + output of the token being chosen. The tokens before it,
                drafted ones included, stand in `slots.tokens[slot, :index]`.
        """
        if not len(slots_N):
            return torch.empty(0, dtype=torch.int64, device=logits_NV.device)
        self._refresh(slots_N)
        rows = (logits_NV[:, : self.vocab_size], slots_N, index_N)
        return by_part(self._edited_S[slots_N], self._edit_and_choose, self._choose, rows)

    def law(self, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> torch.Tensor:
        """Return the law by which `sample` chooses, float64 `[N, V]` on the logits' device; arguments as there.

        That of a greedy row is certain; rows from which none can be chosen have zeros.
        """
        self._refresh(slots_N)
        logits_NV = self.edited(logits_NV, slots_N, index_N)
        limits = self._limits_S.at(slots_N)
        drawn_N, free_N = limits.temperature >= COLDEST, limits.are_off
        if drawn_N.all() and (free_N.all() or not free_N.any()):
            return law(logits_NV, limits)
        law_NV = torch.zeros(logits_NV.shape, dtype=torch.float64, device=logits_NV.device)
        for part in (np.flatnonzero(drawn_N & free_N), np.flatnonzero(drawn_N & ~free_N)):
            if len(part):
                at = torch.from_numpy(part).to(logits_NV.device)
                law_NV[at] = law(logits_NV[at], limits.at(part))
        if not drawn_N.all():
            at = torch.from_numpy(np.flatnonzero(~drawn_N)).to(logits_NV.device)
            ids_M = greedy(logits_NV[at])
            law_NV[at, ids_M.clamp_min(0)] = (ids_M >= 0).double()
        return law_NV

    def edited(self, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> torch.Tensor:
        """Return the logits as requests want them edited, float32 `[N, vocab_size]`; arguments as for `sample`."""
        self._refresh(slots_N)
        logits_NV = logits_NV[:, : self.vocab_size]
        if not self._edited_S[slots_N].any():
            return logits_NV
        edited_NV = logits_NV.clone()
        self._edits.apply_(edited_NV, slots_N, index_N)
        return edited_NV

    def seeds(self, slots_N: Ints) -> Ints:
        """Return the seeds of the sequences in some slots: the bits of uint64 as int64, `[N]`."""
        self._refresh(slots_N)
        return self._seed_S[slots_N]

    def limits(self, slots_N: Ints) -> Limits:
        """Return how the sequences in some slots are drawn."""
        self._refresh(slots_N)
        return self._limits_S.at(slots_N)

    def best(
        self, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the *width* likeliest choices, best first, int64 `[N, W]`, and their log-probabilities.

        Edits are left out. Otherwise as `sample`, which would choose the first; where fewer than *width* ids can be
        chosen, others follow. A row that is drawn has the log-probabilities of `workers.sampling.sample.best`: what is
        likely is likely with this noise. A greedy one has those of its logits.
        """
        self._refresh(slots_N)
        logits_NV = logits_NV[:, : self.vocab_size]
        ids_NW = logits_NV.topk(width, 1).indices
        log_q_NW = torch.log_softmax(logits_NV, 1).gather(1, ids_NW)
        limits = self._limits_S.at(slots_N)
        drawn_N, free_N = limits.temperature >= COLDEST, limits.are_off
        for part in (np.flatnonzero(drawn_N & free_N), np.flatnonzero(drawn_N & ~free_N)):
            if len(part):
                at = torch.from_numpy(part).to(logits_NV.device)
                keys = self._keys(slots_N[part], index_N[part]).to(logits_NV.device)
                ids_NW[at], log_q_NW[at] = best(logits_NV[at], keys, limits.at(part), width)
        return ids_NW, log_q_NW

    def _refresh(self, slots_N: Ints) -> None:
        """Read the parameters of the slots that a sequence joined since they were last read."""
        changed_N = self._joined_S[slots_N] != self.slots.joined[slots_N]
        if changed_N.any():
            for slot in np.unique(slots_N[changed_N]).tolist():
                self._read(slot, self.slots.sampling[slot])

    def _read(self, slot: int, sampling: Sampling) -> None:
        self._joined_S[slot] = self.slots.joined[slot]
        self._seed_S[slot] = signed(sampling.seed)
        self._limits_S.temperature[slot] = sampling.temperature
        self._limits_S.top_k[slot] = sampling.top_k if sampling.top_k < self.vocab_size else 0
        self._limits_S.top_p[slot] = sampling.top_p
        self._limits_S.min_p[slot] = sampling.min_p
        self._edited_S[slot] = changes_logits(sampling)
        self._edits.join(slot)

    def _edit_and_choose(self, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> torch.Tensor:
        size = max(1, EDIT_ELEMENTS // self.vocab_size) if self._on_host else len(slots_N)
        return torch.cat(
            [
                self._edit_block(logits_NV[at], slots_N[at], index_N[at])
                for at in (slice(first, first + size) for first in range(0, len(slots_N), size))
            ]
        )

    def _edit_block(self, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> torch.Tensor:
        edited_NV = logits_NV.clone()
        self._edits.apply_(edited_NV, slots_N, index_N)
        return self._choose(edited_NV, slots_N, index_N)

    def _native(self) -> Chooser | None:
        if not self._on_host:
            return None
        try:
            return NativeChooser(self._seed_S, self._limits_S).choose
        except KernelUnavailableError as error:
            logger.info("sampling runs in plain torch: %s", error)
            return None

    def _choose_in_torch(self, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> torch.Tensor:
        drawn_N = self._limits_S.temperature[slots_N] >= COLDEST
        return by_part(drawn_N, self._draw, _greedy, (logits_NV, slots_N, index_N))

    def _draw(self, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> torch.Tensor:
        """Draw for rows without limits apart: only the others need their vocabulary sorted."""
        free_N = self._limits_S.at(slots_N).are_off
        return by_part(free_N, self._draw_alike, self._draw_alike, (logits_NV, slots_N, index_N))

    def _draw_alike(self, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> torch.Tensor:
        keys_N = self._keys(slots_N, index_N).to(logits_NV.device)
        return choose(logits_NV, keys_N, self._limits_S.at(slots_N))

    def _keys(self, slots_N: Ints, index_N: Ints) -> torch.Tensor:
        return torch.from_numpy(row_keys(self._seed_S[slots_N], index_N))


def _greedy(logits_NV: torch.Tensor, _slots_N: Ints, _index_N: Ints) -> torch.Tensor:
    return greedy(logits_NV)


def by_part(first_N: Flags, choose_first: Chooser, choose_rest: Chooser, rows: Rows) -> torch.Tensor:
    """Let one chooser have the rows marked in `first_N` and the other the rest; copy logits only if both have some."""
    if first_N.all():
        return choose_first(*rows)
    if not first_N.any():
        return choose_rest(*rows)
    logits_NV, slots_N, index_N = rows
    ids_N = torch.empty(len(slots_N), dtype=torch.int64, device=logits_NV.device)
    for part, chooser in ((np.flatnonzero(first_N), choose_first), (np.flatnonzero(~first_N), choose_rest)):
        at = torch.from_numpy(part).to(logits_NV.device)
        ids_N[at] = chooser(logits_NV[at], slots_N[part], index_N[part])
    return ids_N
