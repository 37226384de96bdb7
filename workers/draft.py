"""The draft worker: keeps what drafts level with the sequences, and serves its proposer.

The draft shares the target's block tables but has a cache of its own, in which a block may be missing: speculation was
off while the target filled it, or the draft is new. So the worker remembers, for every (block, version), which
positions it has computed. A draft that reads tokens alone recomputes the rest in bounded chunks. One that is fed the
target's features cannot, since nobody has them any more: it goes on behind the gap, and does not see what lies before.

An *entry* is what the cache holds of one position. It is made of the token there, or of the one behind it and the
target's features (`Module.shift`).
"""

from collections.abc import Sequence as Seq
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from protos.interfaces import DraftRow, Needs
from protos.learned import Level
from protos.messages import Draft
from workers.batch import Batch, Ints
from workers.features import COUNT, FIRST, GENERATION, SLOT, Features, Waiting
from workers.module_runner import DraftForward, Entries
from workers.sampler import Sampler
from workers.slots import SlotTable
from workers.validity import BlockValidity

_NOTHING = Draft(())

NEAR = 16
"""A row that lacks fewer known tokens than this is caught up while it drafts: no wider than a batch may well be."""


class Proposes(Protocol):
    """The part of a proposer that a draft worker calls."""

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Return one draft a row, of 0 to `row.k` nodes."""
        ...


class DraftWorker:
    """Owns the draft's cache and its view of the sequences; a `DraftRunner` to its proposer.

    Args:
        forward: runs what drafts.
        slots: the sequences.
        sampler: the target's sampling.
        max_catch_up: most known tokens fed in one round; rows beyond it get no draft in that round.
        needs: which of the target's features there are.
        shift: 1 where an entry holds the token behind it, 0 where it holds its own.
    """

    def __init__(self, forward: DraftForward, slots: SlotTable, sampler: Sampler, max_catch_up: int, *,
                 needs: Needs = "none", shift: int = 0) -> None:
        self.forward, self.slots, self.sampler = forward, slots, sampler
        self.max_catch_up = max_catch_up
        self.needs = needs
        self.validity = BlockValidity(forward.num_blocks, slots.block_size)
        num_slots = len(slots.known_len)
        self._shift = shift
        self._lag = 1 if shift or needs == "all" else 0  # of its entries behind the known tokens
        self._waiting = Waiting(num_slots)
        self._joined: Ints = np.full(num_slots, -1, np.int64)
        self._from: Ints = np.zeros(num_slots, np.int64)  # the first entry behind the last gap
        self._held: Ints = np.zeros(num_slots, np.int64)  # entries up to here are right
        self._fed: list[tuple[int, list[int]]] = [(0, [])] * num_slots  # (position, drafted ids) fed behind them
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
        lag = {slot: self._reach(slot) - self._refresh(slot) for slot in slots}
        near = [i for i, row in enumerate(rows) if lag[row.slot] < NEAR and self._is_ready(row)]
        self._lagging = [slot for slot in slots if lag[slot] > 0 and slot not in {rows[i].slot for i in near}]
        return self._ask(proposer, rows, near)

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

    def receive(self, features: Features) -> None:
        """Take the target's features of tokens that were kept; those of sequences that left meanwhile are dropped."""
        loaded = self.forward.loaded
        with torch.inference_mode():
            states_NX = self.forward.module.take_in(features.states_NF.to(loaded.device, loaded.dtype))
        parts = states_NX.split(features.table_M4[:, COUNT].tolist())
        for line, part_NX in zip(features.table_M4.tolist(), parts, strict=True):
            if self.slots.joined[line[SLOT]] == line[GENERATION]:
                self._meet(line[SLOT])
                self._put(line[SLOT], line[FIRST], part_NX)

    def absorb(self, slots: Seq[int]) -> None:
        """Feed what waits of *slots*: prompts that go on, of which nobody wants a draft yet."""
        lagging, self._lagging = self._lagging, [slot for slot in slots if self._refresh(slot) < self._reach(slot)]
        while self._lagging:
            self.catch_up_some(self.max_catch_up)
        self._lagging = lagging

    # What the proposer asks: `protos.learned.DraftRunner`.

    @property
    def module(self) -> Any:
        """See `DraftRunner`."""
        return self.forward.module

    def features(self, rows: Seq[DraftRow]) -> torch.Tensor:
        """See `DraftRunner`."""
        return self._waiting.newest([row.slot for row in rows])

    def newest(self, rows: Seq[DraftRow]) -> torch.Tensor:
        """See `DraftRunner`."""
        slots_R = _slots(rows)
        return torch.from_numpy(self.slots.tokens[slots_R, self.slots.known_len[slots_R] - 1]).to(self._device)

    def catch_up(self, rows: Seq[DraftRow]) -> torch.Tensor:
        """See `DraftRunner`."""
        slots_R = _slots(rows)
        output_RX = self._feed(slots_R, self._held[slots_R], self._ends(slots_R))
        for slot in slots_R.tolist():
            self._fed[slot] = (int(self.slots.known_len[slot]), [])
        return output_RX

    def extend(self, rows: Seq[DraftRow], token_ids: torch.Tensor, step: int,
               features: torch.Tensor | None = None) -> torch.Tensor:
        """See `DraftRunner`."""
        slots_R = _slots(rows)
        batch = Batch(slots_R, self._ends(slots_R) + step, np.ones_like(slots_R),
                      self._known_to_draft(token_ids.cpu().numpy()))
        output_RX = self.forward.feed(Entries(batch, np.arange(len(slots_R)), features, self._from[slots_R]))
        for slot, token in zip(slots_R.tolist(), token_ids.tolist(), strict=True):
            self._fed[slot][1].append(token)  # only now: after a failure it must not count as held
        return output_RX

    def grow(self, rows: Seq[DraftRow], level: Level) -> torch.Tensor:
        """See `DraftRunner`."""
        raise NotImplementedError

    def block(self, rows: Seq[DraftRow], row_N: torch.Tensor, tokens_N: torch.Tensor,
              features_NX: torch.Tensor | None = None, *, sees_all: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DraftRunner`."""
        raise NotImplementedError

    def sample(self, rows: Seq[DraftRow], logits: torch.Tensor, step: int) -> torch.Tensor:
        """See `DraftRunner`: the shared noise at the position the target will use it for."""
        slots_R = _slots(rows)
        index_R = self.slots.known_len[slots_R] + step
        ids_R = self.sampler.sample(_fit(logits, self.sampler.vocab_size), slots_R, index_R).clamp_min_(0)
        self.slots.tokens[slots_R, index_R] = ids_R.cpu().numpy()
        return ids_R

    def candidates(self, rows: Seq[DraftRow], row_N: torch.Tensor, logits_NV: torch.Tensor, depth: int,
                   width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DraftRunner`."""
        slots_N = _slots(rows)[row_N.cpu().numpy()]
        index_N = self.slots.known_len[slots_N] + depth
        return self.sampler.best(_fit(logits_NV, self.sampler.vocab_size), slots_N, index_N, width)

    # What is held, and what waits.

    @property
    def _device(self) -> torch.device:
        return self.forward.loaded.device

    def _ends(self, slots_R: Ints) -> Ints:
        """Return how many entries the known tokens make."""
        ends_R: Ints = self.slots.known_len[slots_R] - self._lag
        return ends_R

    def _ask(self, proposer: Proposes, rows: Seq[DraftRow], ready: Seq[int]) -> list[Draft]:
        drafts = [_NOTHING] * len(rows)
        if ready:
            with torch.inference_mode():
                found = proposer.propose([rows[i] for i in ready])
            for i, draft in zip(ready, found, strict=True):
                drafts[i] = draft
        return drafts

    def _is_ready(self, row: DraftRow) -> bool:
        """Whether the draft's context holds the row with its guesses, and its features are here."""
        known = int(self.slots.known_len[row.slot])
        has_features = self.needs == "none" or int(self._waiting.end_S[row.slot]) == known - 1
        return has_features and known + row.k <= self.forward.loaded.max_model_len

    def _reach(self, slot: int) -> int:
        """Return how many entries could be held: all that can be made and have a block, but for the last one.

        That one is left to be fed by the round that drafts: what comes behind it is the first guess.
        """
        if not self.forward.loaded.layers:
            return 0
        slots = self.slots
        most = min(int(slots.num_blocks[slot]) * slots.block_size, self.forward.loaded.max_model_len)
        if self.needs == "all":
            most = min(most, int(self._waiting.end_S[slot]))
        return min(most, int(slots.known_len[slot]) - self._lag - 1)

    def _within_budget(self, rows: Seq[DraftRow]) -> list[int]:
        """Return the rows that can be caught up in this round; feed a part of the first that cannot."""
        ready, left = [], self.max_catch_up
        for i, row in enumerate(rows):
            behind = self._reach(row.slot) + 1 - self._refresh(row.slot)
            if not self._is_ready(row):
                continue
            if behind <= left:
                ready.append(i)
                left -= behind
            elif left > 0:
                self._feed_part(row.slot, left)
                left = 0
        return ready

    def _refresh(self, slot: int) -> int:
        """Return how many entries of *slot* are held, after the last verdict or a new sequence."""
        if not self._meet(slot):
            self._held[slot] = self._held_after_verdict(slot)
        self._fed[slot] = (0, [])
        self._held[slot] = min(int(self._held[slot]), max(0, int(self.slots.known_len[slot]) - self._lag - 1))
        return int(self._held[slot])

    def _meet(self, slot: int) -> bool:
        """Begin anew where another sequence joined *slot*; return whether one did."""
        is_new = bool(self._joined[slot] != self.slots.joined[slot])
        if is_new:
            self._joined[slot] = self.slots.joined[slot]
            self._waiting.clear(slot)
            self._from[slot] = 0
            self._held[slot] = 0 if self.needs == "all" else self.validity.prefix(*self._table(slot))
        return is_new

    def _put(self, slot: int, first: int, states_NX: torch.Tensor) -> None:
        """Let features wait; behind a gap, go on from there with as much before it as the cache happens to hold."""
        follows = self._waiting.put(slot, first, states_NX)
        if self.needs == "last":
            self._waiting.keep_newest(slot)
        elif not follows:
            self._from[slot] = self.validity.run_before(*self._table(slot), first)
            self._held[slot] = first

    def _table(self, slot: int) -> tuple[list[int], list[int]]:
        count = int(self.slots.num_blocks[slot])
        return self.slots.blocks[slot, :count].tolist(), self.slots.versions[slot, :count].tolist()

    def _held_after_verdict(self, slot: int) -> int:
        """Drafted tokens that were fed and then accepted count as held; not those made of recycled features."""
        held, (base, fed) = int(self._held[slot]), self._fed[slot]
        if self.needs == "all":
            return held
        fed = fed[: max(0, int(self.slots.known_len[slot]) - base)]  # behind the known tokens stand our own guesses
        accepted = _agreeing(fed, self.slots.tokens[slot, base : base + len(fed)].tolist())
        if accepted:
            self.validity.mark(self.slots.blocks[slot], self.slots.versions[slot], held, held + accepted)
        return held + accepted

    def _feed_part(self, slot: int, count: int) -> None:
        first = self._held[slot : slot + 1]
        self._feed(np.array([slot]), first, first + count)

    def _feed(self, slots_R: Ints, first_R: Ints, end_R: Ints) -> torch.Tensor:
        """Make the entries `first .. end` of each slot; note what the cache now holds; return what comes behind."""
        lengths_R = end_R - first_R
        batch = Batch.from_history(self.slots.tokens, slots_R, first_R, lengths_R)
        if self._shift:
            np.copyto(batch.tokens_T, self.slots.tokens[batch.slots_T, batch.positions_T + self._shift])
        self._known_to_draft(batch.tokens_T)
        features_TX = self._waiting.between(slots_R, first_R, end_R) if self.needs == "all" else None
        entries = Entries(batch, np.cumsum(lengths_R) - 1, features_TX, self._from[slots_R])
        output_RX = self.forward.feed(entries)
        if self.needs == "all":
            self._waiting.drop(slots_R, end_R)
        for slot, first, end in zip(slots_R.tolist(), first_R.tolist(), end_R.tolist(), strict=True):
            self.validity.mark(self.slots.blocks[slot], self.slots.versions[slot], first, end)
        self._held[slots_R] = end_R
        return output_RX

    def _known_to_draft(self, tokens_T: Ints) -> Ints:
        """Replace, in place, ids that the draft's smaller vocabulary lacks: a poorer guess, and no error."""
        return np.minimum(tokens_T, self.forward.loaded.vocab_size - 1, out=tokens_T)


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
