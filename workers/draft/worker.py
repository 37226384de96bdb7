"""The draft worker: keeps the draft's KV cache up to date with the sequences, and runs the draft for its proposer.

The draft shares the target's block tables but has a cache of its own, in which blocks may be missing: speculation was
off while the target filled them, or the draft is new. A draft that reads only tokens recomputes them in bounded chunks.
One that is fed the target's features cannot: it continues after the gap, and does not attend to positions before it.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch

from protos.draft import NO_DRAFT, Draft, DraftRow
from protos.draft_module import Level
from protos.interfaces import Proposer
from protos.layers import Needs
from workers.attention.batch import Batch, Ints
from workers.draft.early_stop import EarlyStop
from workers.draft.sampling import DraftPositions, DraftSampler
from workers.draft.target_cache import cache_of
from workers.draft.trees import FedTree, add_level, block_masks, level_masks
from workers.features import COUNT, FIRST, GENERATION, SLOT, Features
from workers.model.draft_forward import DraftForward
from workers.sampling.sampler import Sampler, fit_vocab
from workers.slots import SlotTable
from workers.verification.draft_probs import DraftProbs

MAX_LAG = 16
"""A row that lacks fewer known tokens than this catches up while it drafts: the batch hardly grows."""


class DraftWorker:
    """Runs a draft with its cache over the sequences in the slots; the `DraftRunner` of its proposer.

    Args:
        forward: runs the draft.
        slots: the sequences.
        sampler: the target's sampling.
        max_catch_up: most known tokens fed in one round; rows beyond it get no draft in that round. It may be changed.
        needs: which of the target's features it is fed.
        shift: 1 if a cache entry holds the token after its position, 0 if it holds its own.
        draft_sampler: samples draft tokens, and may be replaced; None: the target's sampler does, with its noise.
        early_stop: ends chains by the draft's confidence; None: they have the length that was asked for.

    Attributes:
        least_survival: of the round's plan, for *early_stop*.
        left: what the round leaves of `max_catch_up`.
    """

    least_survival = 0.0
    left = 0

    def __init__(
        self,
        forward: DraftForward,
        slots: SlotTable,
        sampler: Sampler,
        max_catch_up: int,
        *,
        needs: Needs = "none",
        shift: int = 0,
        draft_sampler: DraftSampler | None = None,
        early_stop: EarlyStop | None = None,
    ) -> None:
        self.forward, self.slots, self.sampler = forward, slots, sampler
        self.max_catch_up = max_catch_up
        self.needs = needs
        self._shift = shift
        self.draft_sampler, self.early_stop = draft_sampler, early_stop
        self.forget()

    def forget(self) -> None:
        """Forget all sequences."""
        self.cache = cache_of(self.forward, self.slots, self.needs, self._shift)
        self._trees: dict[int, FedTree] = {}  # of this round, by slot
        self._lagging: list[int] = []  # slots of the last round that `catch_up_some` feeds

    def propose(self, proposer: Proposer, rows: Seq[DraftRow]) -> list[Draft]:
        """Return a draft for every row; rows whose cache lags too far catch up a part of it and get none."""
        return self._propose(proposer, rows, self.within_budget(_slots(rows), _levels(rows)).tolist())

    def propose_at_once(self, proposer: Proposer, slots: Seq[int], rows: Seq[DraftRow]) -> list[Draft]:
        """Return a draft for every row without delay: rows whose cache lags far get none.

        Args:
            proposer: makes the drafts.
            slots: all that run in this round; `catch_up_some` feeds those that lag.
            rows: the rows among them that want a draft.
        """
        lag = dict(zip(slots, self.cache.lacking(np.array(slots, np.int64)).tolist(), strict=True))
        near, self.left = [], self.max_catch_up
        for i in np.flatnonzero(self.cache.fits(_slots(rows), _levels(rows))).tolist():
            fed = max(0, lag[rows[i].slot]) + 1
            if fed <= min(self.left, MAX_LAG):
                near.append(i)
                self.left -= fed
                lag[rows[i].slot] = 0
        self._lagging = [slot for slot in slots if lag[slot] > 0]
        return self._propose(proposer, rows, near)

    def draft_probs(self, slots: Seq[int], drafts: Seq[Draft]) -> dict[int, DraftProbs]:
        """Return the distributions that the drafts of this round were sampled from, by slot."""
        return {} if self.draft_sampler is None else self.draft_sampler.draft_probs(slots, drafts)

    def catch_up_some(self, budget: int) -> bool:
        """Feed at most *budget* known tokens of the last round's slots that lag; return False when none does."""
        slots_R = np.array(self._lagging, np.int64)
        first_R = self.cache.held[slots_R]
        lag_R = np.maximum(0, self.cache.reach(slots_R) - first_R)
        counts_R = np.clip(budget - (np.cumsum(lag_R) - lag_R), 0, lag_R)
        fed = np.flatnonzero(counts_R)
        if len(fed):
            self.cache.feed(slots_R[fed], first_R[fed], (first_R + counts_R)[fed])
        else:
            self._lagging = []
        return len(fed) > 0

    def receive(self, features: Features) -> None:
        """Take the target's features of accepted tokens; those of sequences that have left their slots are dropped."""
        loaded = self.forward.loaded
        with torch.inference_mode():
            states_NX = self.forward.module.take_in(features.states_NF.to(loaded.device, loaded.dtype))
        parts = states_NX.split(features.table_M4[:, COUNT].tolist())
        for line, part_NX in zip(features.table_M4.tolist(), parts, strict=True):
            if self.slots.generation[line[SLOT]] == line[GENERATION]:
                self.cache.start_if_new(line[SLOT])
                self.cache.put(line[SLOT], line[FIRST], part_NX)

    def absorb(self, slots: Seq[int]) -> None:
        """Feed the waiting features of *slots*, whose prompts are in progress and want no draft yet."""
        slots_R = np.array(slots, np.int64)
        self._lagging = slots_R[self.cache.lacking(slots_R) > 0].tolist()
        while self._lagging:
            self.catch_up_some(self.max_catch_up)

    # Called by the proposer: `protos.draft_module.DraftRunner`.

    @property
    def module(self) -> Any:
        """See `DraftRunner`."""
        return self.forward.module

    @property
    def draws_by_path(self) -> bool:
        """See `DraftRunner`."""
        return self.draft_sampler is not None and self.draft_sampler.samples

    def features(self, rows: Seq[DraftRow]) -> torch.Tensor:
        """See `DraftRunner`."""
        return self.cache.waiting.newest([row.slot for row in rows])

    def newest(self, rows: Seq[DraftRow]) -> torch.Tensor:
        """See `DraftRunner`."""
        slots_R = _slots(rows)
        ids_R = self.slots.tokens[slots_R, self.slots.known_len[slots_R] - 1]
        return torch.from_numpy(ids_R).to(self.forward.loaded.device)

    def catch_up(self, rows: Seq[DraftRow]) -> torch.Tensor:
        """See `DraftRunner`."""
        slots_R = _slots(rows)
        output_RX = self.cache.feed(slots_R, self.cache.held[slots_R], self.cache.ends(slots_R))
        self.cache.begin_draft(slots_R)
        return output_RX

    def extend(
        self, rows: Seq[DraftRow], token_ids: torch.Tensor, step: int, features: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `DraftRunner`."""
        slots_R = _slots(rows)
        batch = Batch(
            slots_R,
            self.cache.ends(slots_R) + step,
            np.ones_like(slots_R),
            self.cache.clip_to_vocab(token_ids.cpu().numpy()),
            first_valid_R=self.cache.lowest(slots_R),
        )
        output_RX = self.forward.forward(batch, np.arange(len(slots_R)), features)
        self.cache.add_drafted(slots_R, token_ids.cpu().numpy())  # only after success: a failed token is not there
        return output_RX

    def grow(self, rows: Seq[DraftRow], level: Level) -> torch.Tensor:
        """See `DraftRunner`. Raises `ValueError` for more nodes than a row has room for."""
        slots_R, row_N = _slots(rows), level.row_N.cpu().numpy()
        before = add_level(
            [self._trees.setdefault(slot, FedTree()) for slot in slots_R.tolist()],
            row_N.tolist(),
            level.parents_N.tolist(),
        )
        here = np.unique(row_N)
        slots_M, before_M, lengths_M = slots_R[here], np.array(before)[here], np.bincount(row_N)[here]
        first_M = self.cache.ends(slots_M)
        self.cache.check_room(slots_M, first_M + before_M + lengths_M)
        tree_masks = level_masks([self._trees[slot] for slot in slots_M.tolist()], first_M, before_M, lengths_M)
        tokens_N = self.cache.clip_to_vocab(level.tokens_N.cpu().numpy().copy())
        batch = Batch(slots_M, first_M + before_M, lengths_M, tokens_N, tree_masks, self.cache.lowest(slots_M))
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
            first_R = self.cache.ends(slots_R)
            tree_masks = block_masks(first_R, counts_R, first_R - self.cache.held[slots_R] + counts_R)
        return self.cache.feed_with(slots_R, counts_R, tokens_N.cpu().numpy(), features_NX, tree_masks)

    def sample(self, rows: Seq[DraftRow], logits: torch.Tensor, step: int) -> torch.Tensor:
        """See `DraftRunner`."""
        slots_R = _slots(rows)
        known_R = self.slots.known_len[slots_R]
        index_R = known_R + step
        logits_RV = fit_vocab(logits, self.sampler.vocab_size)
        if self.draft_sampler is None:
            ids_R = self.sampler.sample(logits_RV, slots_R, index_R)
        else:
            paths_RD = self.slots.tokens[slots_R[:, None], known_R[:, None] + np.arange(step)]
            ids_R = self.draft_sampler.sample(logits_RV, DraftPositions(slots_R, index_R, paths_RD))
        ids_R.clamp_min_(0)
        stop = self.early_stop
        self.slots.tokens[slots_R, index_R] = (
            ids_R.cpu().numpy() if stop is None else stop.watch(logits_RV, ids_R, slots_R, index_R)
        )
        return ids_R

    def goes_on(self, rows: Seq[DraftRow]) -> list[bool]:
        """See `DraftRunner`."""
        return [True] * len(rows) if self.early_stop is None else self.early_stop.goes_on([r.slot for r in rows])

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
        logits_NV = fit_vocab(logits_NV, self.sampler.vocab_size)
        if self.draft_sampler is None:
            return self.sampler.candidates(logits_NV, slots_N, index_N, width)
        positions = DraftPositions(slots_N, index_N, self._paths(slots_N, depth, paths))
        return self.draft_sampler.candidates(logits_NV, positions, width)

    def _paths(self, slots_N: Ints, depth: int, paths: Callable[[], torch.Tensor] | None) -> Ints | None:
        if not self.draws_by_path:
            return None
        if depth == 0:
            return np.empty((len(slots_N), 0), np.int64)
        return None if paths is None else paths().cpu().numpy()

    def _propose(self, proposer: Proposer, rows: Seq[DraftRow], ready: Seq[int]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(rows)
        self._trees.clear()
        if self.draft_sampler is not None:
            self.draft_sampler.begin()
        if self.early_stop is not None:
            self.early_stop.begin(self.least_survival)
        if ready:
            with torch.inference_mode():
                found = proposer.propose([rows[i] for i in ready])
            for i, draft in zip(ready, found, strict=True):
                drafts[i] = draft
        return drafts

    def within_budget(self, slots_R: Ints, levels_R: Ints) -> Ints:
        """Return the rows that can draft so many levels in this round; feed a part of the first that lacks too much."""
        fed_R = self.cache.lacking(slots_R) + 1  # and the newest token
        fitting = np.flatnonzero(self.cache.fits(slots_R, levels_R))
        total_M = np.cumsum(fed_R[fitting])
        ready = fitting[np.logical_and.accumulate(total_M <= self.max_catch_up)]
        self.left = self.max_catch_up - int(fed_R[ready].sum())
        if len(ready) < len(fitting) and self.left > 0:
            at = slots_R[fitting[len(ready) :][:1]]
            self.cache.feed(at, self.cache.held[at], self.cache.held[at] + self.left)
            self.left = 0
        return ready


def _levels(rows: Seq[DraftRow]) -> Ints:
    return np.array([row.max_chain for row in rows], np.int64)


def _slots(rows: Seq[DraftRow]) -> Ints:
    return np.array([row.slot for row in rows], np.int64)
