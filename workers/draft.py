"""The draft worker: keeps the draft model's KV cache level with the sequences, and serves its proposer.

The draft shares the target's block tables but has a cache of its own, in which a block may be missing:
speculation was off while the target filled it, or the draft is new. So the worker remembers, for every
(block, version), how many leading positions it has computed, and recomputes the rest in bounded chunks.
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch
import torch.nn.functional as F

from protos.interfaces import DraftRow, Proposer
from protos.messages import Draft
from workers.batch import Batch, Ints
from workers.runner import ModelRunner
from workers.sampler import Sampler
from workers.slots import SlotTable

_NOTHING = Draft(())

NEAR = 16
"""A row that lacks fewer known tokens than this is caught up while it drafts: no wider than a batch may well be."""


class BlockValidity:
    """Which positions of which block contents the draft's cache holds."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.version: Ints = np.full(num_blocks, -1, np.int64)
        self.filled: Ints = np.zeros(num_blocks, np.int64)

    def prefix(self, blocks: Seq[int], versions: Seq[int]) -> int:
        """Return how many leading positions of a sequence with these blocks are held."""
        held = 0
        for block, version in zip(blocks, versions, strict=True):
            if self.version[block] != version:
                break
            held += int(self.filled[block])
            if self.filled[block] < self.block_size:
                break
        return held

    def mark(self, blocks: Seq[int], versions: Seq[int], first: int, end: int) -> None:
        """Note that a sequence's positions up to *end* are held, those before *first* having been noted already."""
        for i in range(first // self.block_size, -(-end // self.block_size)):
            block = blocks[i]
            self.version[block] = versions[i]
            self.filled[block] = min(self.block_size, end - i * self.block_size)


class DraftWorker:
    """Owns the draft model's cache; a `DraftRunner` to its proposer.

    Args:
        max_catch_up: most known tokens fed in one round; rows beyond it get no draft in that round.
    """

    def __init__(self, runner: ModelRunner, slots: SlotTable, sampler: Sampler, max_catch_up: int) -> None:
        self.runner, self.slots, self.sampler = runner, slots, sampler
        self.max_catch_up = max_catch_up
        self.validity = BlockValidity(runner.cache.num_blocks, slots.block_size)
        num_slots = len(slots.known_len)
        self._joined: Ints = np.full(num_slots, -1, np.int64)
        self._held: Ints = np.zeros(num_slots, np.int64)  # leading positions whose KV is right
        self._fed: list[tuple[int, list[int]]] = [(0, [])] * num_slots  # (position, drafted ids) fed behind them
        self._lagging: list[int] = []  # slots of the last round that `catch_up_some` looks after

    def propose(self, proposer: Proposer, rows: Seq[DraftRow]) -> list[Draft]:
        """Return a draft for every row; rows whose cache is too far behind are brought nearer and get none."""
        drafts = [_NOTHING] * len(rows)
        ready = self._within_budget(rows)
        if ready:
            found = proposer.propose([rows[i] for i in ready])
            for i, draft in zip(ready, found, strict=True):
                drafts[i] = draft
        return drafts

    def propose_at_once(self, proposer: Proposer, slots: Seq[int], rows: Seq[DraftRow]) -> list[Draft]:
        """Return a draft for every row without making anybody wait: rows whose cache is far behind get none.

        Args:
            proposer: guesses.
            slots: all that run in this round, so that `catch_up_some` knows who is behind.
            rows: those among them that want a draft.
        """
        lag = {slot: self._reach(slot) - self._refresh(slot) for slot in slots}
        drafts = [_NOTHING] * len(rows)
        near = [i for i, row in enumerate(rows) if lag[row.slot] < NEAR and self._fits(row)]
        self._lagging = [slot for slot in slots if lag[slot] > 0 and slot not in {rows[i].slot for i in near}]
        if near:
            for i, draft in zip(near, proposer.propose([rows[i] for i in near]), strict=True):
                drafts[i] = draft
        return drafts

    def catch_up_some(self, budget: int) -> bool:
        """Feed at most *budget* known tokens of the last round's rows that are behind; False where none is."""
        slots, first, end = [], [], []
        for slot in self._lagging:
            held = int(self._held[slot])
            count = min(budget, self._reach(slot) - held)
            if count > 0:
                slots.append(slot)
                first.append(held)
                end.append(held + count)
                budget -= count
        if slots:
            self._feed(np.array(slots), np.array(first), np.array(end))
        else:
            self._lagging = []
        return bool(slots)

    def _reach(self, slot: int) -> int:
        """Return how many leading positions could be held: known ones that have a block, but for the last known one."""
        slots = self.slots
        return min(int(slots.known_len[slot]) - 1, int(slots.num_blocks[slot]) * slots.block_size,
                   self.runner.loaded.max_model_len)

    def _fits(self, row: DraftRow) -> bool:
        """Whether the draft model's context holds the row with its guesses."""
        return int(self.slots.known_len[row.slot]) + row.k <= self.runner.loaded.max_model_len

    def catch_up(self, rows: Seq[DraftRow]) -> torch.Tensor:
        """Feed the known tokens that the cache lacks; return logits `[R, V]` after each row's last one."""
        slots_R = _slots(rows)
        known_R = self.slots.known_len[slots_R]
        logits_RV = self._feed(slots_R, self._held[slots_R], known_R)
        for slot in slots_R.tolist():
            self._fed[slot] = (int(self.slots.known_len[slot]), [])
        return logits_RV

    def extend(self, rows: Seq[DraftRow], token_ids: torch.Tensor, step: int) -> torch.Tensor:
        """Feed drafted token *step* (ids `[R]`); return logits `[R, V]` after it."""
        slots_R = _slots(rows)
        positions_R = self.slots.known_len[slots_R] + step
        batch = Batch(slots_R, positions_R, np.ones_like(slots_R), self._known_to_draft(token_ids.cpu().numpy()))
        logits_RV = self.runner.forward(batch, np.arange(len(slots_R)))
        for slot, token in zip(slots_R.tolist(), token_ids.tolist(), strict=True):
            self._fed[slot][1].append(token)  # only now: after a failure it must not count as held
        return logits_RV

    def sample(self, rows: Seq[DraftRow], logits: torch.Tensor, step: int) -> torch.Tensor:
        """Return ids `[R]`: the shared noise at the position the target will use it for."""
        slots_R = _slots(rows)
        index_R = self.slots.known_len[slots_R] + step
        ids_R = self.sampler.sample(_fit(logits, self.sampler.vocab_size), slots_R, index_R).clamp_min_(0)
        self.slots.tokens[slots_R, index_R] = ids_R.cpu().numpy()
        return ids_R

    def _within_budget(self, rows: Seq[DraftRow]) -> list[int]:
        """Return the rows that can be caught up in this round; feed a part of the first that cannot."""
        ready, left = [], self.max_catch_up
        for i, row in enumerate(rows):
            if not self._fits(row):
                continue
            behind = int(self.slots.known_len[row.slot]) - self._refresh(row.slot)
            if behind <= left:
                ready.append(i)
                left -= behind
            elif left > 0:
                self._feed_part(row.slot, left)
                left = 0
        return ready

    def _refresh(self, slot: int) -> int:
        """Return how many leading positions of *slot* are held, after the last verdict or a new sequence.

        One known token is always left to be fed: its logits are the first guess.
        """
        if self._joined[slot] != self.slots.joined[slot]:
            self._joined[slot] = self.slots.joined[slot]
            held = self._held_by_blocks(slot)
        else:
            held = self._held_after_verdict(slot)
        self._fed[slot] = (0, [])
        self._held[slot] = min(held, int(self.slots.known_len[slot]) - 1)
        return int(self._held[slot])

    def _held_by_blocks(self, slot: int) -> int:
        slots, count = self.slots, int(self.slots.num_blocks[slot])
        return self.validity.prefix(slots.blocks[slot, :count].tolist(), slots.versions[slot, :count].tolist())

    def _held_after_verdict(self, slot: int) -> int:
        """Drafted tokens that were fed and then accepted count as held."""
        held, (base, fed) = int(self._held[slot]), self._fed[slot]
        fed = fed[: max(0, int(self.slots.known_len[slot]) - base)]  # behind the known tokens stand our own guesses
        accepted = _agreeing(fed, self.slots.tokens[slot, base : base + len(fed)].tolist())
        if accepted:
            self.validity.mark(self.slots.blocks[slot], self.slots.versions[slot], held, held + accepted)
        return held + accepted

    def _feed_part(self, slot: int, count: int) -> None:
        first = self._held[slot : slot + 1]
        self._feed(np.array([slot]), first, first + count)

    def _feed(self, slots_R: Ints, first_R: Ints, end_R: Ints) -> torch.Tensor:
        """Run known tokens `first .. end` of each slot; note what the cache now holds; return the last logits."""
        lengths_R = end_R - first_R
        batch = Batch.from_history(self.slots.tokens, slots_R, first_R, lengths_R)
        self._known_to_draft(batch.tokens_T)
        logits_RV = self.runner.forward(batch, np.cumsum(lengths_R) - 1)
        for slot, first, end in zip(slots_R.tolist(), first_R.tolist(), end_R.tolist(), strict=True):
            self.validity.mark(self.slots.blocks[slot], self.slots.versions[slot], first, end)
        self._held[slots_R] = end_R
        return logits_RV

    def _known_to_draft(self, tokens_T: Ints) -> Ints:
        """Replace, in place, ids that the draft's smaller vocabulary lacks: a poorer guess, and no error."""
        return np.minimum(tokens_T, self.runner.loaded.vocab_size - 1, out=tokens_T)


def _slots(rows: Seq[DraftRow]) -> Ints:
    return np.array([row.slot for row in rows], np.int64)


def _agreeing(fed: Seq[int], known: Seq[int]) -> int:
    """Return the length of the common beginning of what was fed and what turned out to be true."""
    for count, (ours, true) in enumerate(zip(fed, known, strict=True)):
        if ours != true:
            return count
    return len(fed)


def _fit(logits_RV: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Cut or pad the draft's logits to the target's vocabulary: ids that either lacks are never proposed."""
    missing = vocab_size - logits_RV.shape[1]
    return F.pad(logits_RV, (0, missing), value=-torch.inf) if missing > 0 else logits_RV[:, :vocab_size]
