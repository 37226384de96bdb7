"""The draft worker: keeps what drafts level with the sequences, and serves its proposer.

The draft shares the target's block tables but has a cache of its own, in which a block may be missing: speculation was
off while the target filled it, or the draft is new. So it is remembered, for every (block, version), which positions
were computed. A draft that reads tokens alone recomputes the rest in bounded chunks. One that is fed the target's
features cannot, since nobody has them any more: it goes on behind the gap, and does not see what lies before.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from protos.draft import Draft, DraftRow
from protos.draft_module import Level
from protos.layers import Needs
from workers.attention.batch import Batch, Ints, TreeMasks
from workers.draft.cache import DraftCache, Grown, plant, whole_block
from workers.draft.sampling import CoupledNoise, DraftSampler, Points
from workers.features import COUNT, FIRST, GENERATION, SLOT, Features
from workers.model.draft_forward import DraftForward
from workers.sampling.sampler import Sampler
from workers.slots import SlotTable
from workers.verification.draft_probs import DraftProbs

_NOTHING = Draft(())

NEAR = 16
"""A row that lacks fewer known tokens than this is caught up while it drafts: no wider than a batch may well be."""


class Proposes(Protocol):
    """The part of a proposer that a draft worker calls."""

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Return one draft a row, of 0 to `row.k` nodes."""
        ...


class DraftWorker:
    """Has a cache and its view of the sequences; a `DraftRunner` to its proposer.

    Args:
        forward: runs what drafts.
        slots: the sequences.
        sampler: the target's sampling.
        max_catch_up: most known tokens fed in one round; rows beyond it get no draft in that round.
        needs: which of the target's features there are.
        shift: 1 where a cache entry holds the token behind it, 0 where it holds its own.
        drawing: how guesses are chosen; by the target's noise where nothing is said.
    """

    def __init__(
        self,
        forward: DraftForward,
        slots: SlotTable,
        sampler: Sampler,
        max_catch_up: int,
        *,
        needs: Needs = "none",
        shift: int = 0,
        drawing: DraftSampler | None = None,
    ) -> None:
        self.forward, self.slots, self.sampler = forward, slots, sampler
        self.max_catch_up = max_catch_up
        self.needs = needs
        self._shift = shift
        self._drawing: DraftSampler = drawing or CoupledNoise(sampler)
        self.forget()

    def forget(self) -> None:
        """Forget all sequences."""
        self._cache = DraftCache(self.forward, self.slots, self.needs, self._shift)
        num_slots = len(self.slots.known_len)
        self._fed: list[tuple[int, list[int]]] = [(0, [])] * num_slots  # (position, drafted ids) fed behind it
        self._trees: dict[int, Grown] = {}  # of this round, by slot
        self._lagging: list[int] = []  # slots of the last round that `catch_up_some` looks after

    # What the rounds ask.

    def propose(self, proposer: Proposes, rows: Seq[DraftRow]) -> list[Draft]:
        """Return a draft for every row; rows whose cache is too far behind are brought nearer and get none."""
        return self._ask(proposer, rows, self._within_budget(rows))

    def propose_at_once(self, proposer: Proposes, slots: Seq[int], rows: Seq[DraftRow]) -> list[Draft]:
        """Return a draft for every row without making anybody wait: rows whose cache is far behind get none.

        Args:
            proposer: guesses.
            slots: all that run in this round, so that `catch_up_some` knows who is behind.
            rows: those among them that want a draft.
        """
        lag = {slot: -self._refresh(slot) + self._cache.reach(slot) for slot in slots}
        near = [i for i, row in enumerate(rows) if lag[row.slot] < NEAR and self._cache.fits(row.slot, row.k)]
        self._lagging = [slot for slot in slots if lag[slot] > 0 and slot not in {rows[i].slot for i in near}]
        return self._ask(proposer, rows, near)

    def laws(self, slots: Seq[int], drafts: Seq[Draft]) -> dict[int, DraftProbs]:
        """Return what the drafts of this round were drawn from, by slot; of those that were drawn."""
        if not self._drawing.by_path:
            return {}
        found = {slot: self._drawing.laws(slot, draft) for slot, draft in zip(slots, drafts, strict=True)}
        return {slot: laws for slot, laws in found.items() if laws is not None}

    def catch_up_some(self, budget: int) -> bool:
        """Feed at most *budget* known tokens of the last round's rows that are behind; False where none is."""
        slots, first, end = [], [], []
        for slot in self._lagging:
            held = int(self._cache.held[slot])
            count = min(budget, self._cache.reach(slot) - held)
            if count > 0:
                slots.append(slot)
                first.append(held)
                end.append(held + count)
                budget -= count
        if slots:
            self._cache.feed(np.array(slots), np.array(first), np.array(end))
        else:
            self._lagging = []
        return bool(slots)

    def receive(self, features: Features) -> None:
        """Take the target's features of tokens that were kept; those of sequences that left meanwhile are dropped."""
        loaded = self.forward.loaded
        with torch.inference_mode():
            states_NX = self.forward.module.take_in(features.states_NF.to(loaded.device, loaded.dtype))
        parts = states_NX.split(features.table_M4[:, COUNT].tolist())
        for line, part_NX in zip(features.table_M4.tolist(), parts, strict=True):
            if self.slots.joined[line[SLOT]] == line[GENERATION]:
                self._cache.meet(line[SLOT])
                self._cache.put(line[SLOT], line[FIRST], part_NX)

    def absorb(self, slots: Seq[int]) -> None:
        """Feed what waits of *slots*: prompts that go on, of which nobody wants a draft yet."""
        self._lagging = [slot for slot in slots if self._refresh(slot) < self._cache.reach(slot)]
        while self._lagging:
            self.catch_up_some(self.max_catch_up)

    # What the proposer asks: `protos.draft_module.DraftRunner`.

    @property
    def module(self) -> Any:
        """See `DraftRunner`."""
        return self.forward.module

    @property
    def draws_by_path(self) -> bool:
        """See `DraftRunner`."""
        return self._drawing.by_path

    def features(self, rows: Seq[DraftRow]) -> torch.Tensor:
        """See `DraftRunner`."""
        return self._cache.waiting.newest([row.slot for row in rows])

    def newest(self, rows: Seq[DraftRow]) -> torch.Tensor:
        """See `DraftRunner`."""
        slots_R = _slots(rows)
        ids_R = self.slots.tokens[slots_R, self.slots.known_len[slots_R] - 1]
        return torch.from_numpy(ids_R).to(self.forward.loaded.device)

    def catch_up(self, rows: Seq[DraftRow]) -> torch.Tensor:
        """See `DraftRunner`."""
        slots_R = _slots(rows)
        output_RX = self._cache.feed(slots_R, self._cache.held[slots_R], self._cache.ends(slots_R))
        for slot in slots_R.tolist():
            self._fed[slot] = (int(self.slots.known_len[slot]), [])
        return output_RX

    def extend(
        self, rows: Seq[DraftRow], token_ids: torch.Tensor, step: int, features: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `DraftRunner`."""
        slots_R = _slots(rows)
        batch = Batch(
            slots_R,
            self._cache.ends(slots_R) + step,
            np.ones_like(slots_R),
            self._cache.known_to_draft(token_ids.cpu().numpy()),
            first_valid_R=self._cache.lowest(slots_R),
        )
        output_RX = self.forward.forward(batch, np.arange(len(slots_R)), features)
        for slot, token in zip(slots_R.tolist(), token_ids.tolist(), strict=True):
            self._fed[slot][1].append(token)  # only now: after a failure it must not count as held
        return output_RX

    def grow(self, rows: Seq[DraftRow], level: Level) -> torch.Tensor:
        """See `DraftRunner`. Raises `ValueError` for more nodes than a row has room for."""
        slots_R, row_N = _slots(rows), level.row_N.cpu().numpy()
        before = plant(
            [self._trees.setdefault(slot, Grown()) for slot in slots_R.tolist()],
            row_N.tolist(),
            level.parents_N.tolist(),
        )
        here = np.unique(row_N)
        slots_M, before_M, lengths_M = slots_R[here], np.array(before)[here], np.bincount(row_N)[here]
        first_M = self._cache.ends(slots_M)
        starts_M, ends_M = first_M + before_M, first_M + before_M + lengths_M
        self._cache.check_room(slots_M, ends_M)
        tree_masks = TreeMasks.of(
            [
                self._trees[slot].mask(first, count)
                for slot, first, count in zip(slots_M.tolist(), first_M.tolist(), before_M.tolist(), strict=True)
            ],
            ends_M,
            lengths_M,
        )
        tokens_N = self._cache.known_to_draft(level.tokens_N.cpu().numpy().copy())
        batch = Batch(slots_M, starts_M, lengths_M, tokens_N, tree_masks, self._cache.lowest(slots_M))
        return self.forward.forward(batch, np.arange(len(row_N)), level.features_NX)

    def block(
        self,
        rows: Seq[DraftRow],
        row_N: torch.Tensor,
        tokens_N: torch.Tensor,
        features_NX: torch.Tensor | None = None,
        *,
        sees_all: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DraftRunner`. Raises `ValueError` for more tokens than a row has room for."""
        slots_R = _slots(rows)
        counts_R = np.bincount(row_N.cpu().numpy(), minlength=len(rows))
        tree_masks = None
        if sees_all:
            first_R = self._cache.ends(slots_R)
            tree_masks = TreeMasks.of(
                [whole_block(first, size) for first, size in zip(first_R.tolist(), counts_R.tolist(), strict=True)],
                first_R + counts_R,
                first_R - self._cache.held[slots_R] + counts_R,
            )
        return self._cache.feed_with(slots_R, counts_R, tokens_N.cpu().numpy(), features_NX, tree_masks)

    def sample(self, rows: Seq[DraftRow], logits: torch.Tensor, step: int) -> torch.Tensor:
        """See `DraftRunner`: the noise of the position that is guessed."""
        slots_R = _slots(rows)
        known_R = self.slots.known_len[slots_R]
        index_R = known_R + step
        paths_RD = None
        if self.draws_by_path:
            paths_RD = self.slots.tokens[slots_R[:, None], known_R[:, None] + np.arange(step)]
        points = Points(slots_R, index_R, paths_RD)
        ids_R = self._drawing.one(_fit(logits, self.sampler.vocab_size), points).clamp_min_(0)
        self.slots.tokens[slots_R, index_R] = ids_R.cpu().numpy()
        return ids_R

    def candidates(
        self,
        rows: Seq[DraftRow],
        row_N: torch.Tensor,
        logits_NV: torch.Tensor,
        depth: int,
        width: int,
        *,
        paths: Callable[[], torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DraftRunner`."""
        slots_N = _slots(rows)[row_N.cpu().numpy()]
        index_N = self.slots.known_len[slots_N] + depth
        points = Points(slots_N, index_N, self._paths(slots_N, depth, paths))
        return self._drawing.several(_fit(logits_NV, self.sampler.vocab_size), points, width)

    def _paths(self, slots_N: Ints, depth: int, paths: Callable[[], torch.Tensor] | None) -> Ints | None:
        if not self.draws_by_path:
            return None
        if depth == 0:
            return np.empty((len(slots_N), 0), np.int64)
        return None if paths is None else paths().cpu().numpy()

    # What is held, and what waits.

    def _ask(self, proposer: Proposes, rows: Seq[DraftRow], ready: Seq[int]) -> list[Draft]:
        drafts = [_NOTHING] * len(rows)
        self._trees.clear()
        self._drawing.begin()
        if ready:
            with torch.inference_mode():
                found = proposer.propose([rows[i] for i in ready])
            for i, draft in zip(ready, found, strict=True):
                drafts[i] = draft
        return drafts

    def _within_budget(self, rows: Seq[DraftRow]) -> list[int]:
        """Return the rows that can be caught up in this round; feed a part of the first that cannot."""
        ready, left = [], self.max_catch_up
        for i, row in enumerate(rows):
            behind = -self._refresh(row.slot) + self._cache.reach(row.slot) + 1
            if not self._cache.fits(row.slot, row.k):
                continue
            if behind <= left:
                ready.append(i)
                left -= behind
            elif left > 0:
                first = self._cache.held[row.slot : row.slot + 1]
                self._cache.feed(np.array([row.slot]), first, first + left)
                left = 0
        return ready

    def _refresh(self, slot: int) -> int:
        """Return how many entries of *slot* are held now; what was drafted in the last round is settled."""
        held = self._cache.refresh(slot, self._fed[slot])
        self._fed[slot] = (0, [])
        return held


def _slots(rows: Seq[DraftRow]) -> Ints:
    return np.array([row.slot for row in rows], np.int64)


def _fit(logits_RV: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Cut or pad the draft's logits to the target's vocabulary: ids that either lacks are never proposed."""
    missing = vocab_size - logits_RV.shape[1]
    return F.pad(logits_RV, (0, missing), value=-torch.inf) if missing > 0 else logits_RV[:, :vocab_size]
