"""The draft's KV cache: feeds known tokens to the draft, and records which cache entries are valid.

An *entry* is the K and V of one position. It is computed from the token there, or from the next token and the target's
features (`Module.shift`).
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch

from protos.layers import Needs
from workers.attention.batch import Batch, Flags, Ints, TreeMasks
from workers.features import Waiting, merged
from workers.model.draft_forward import DraftForward
from workers.slots import SlotTable


class DraftCache:
    """Feeds known tokens to the draft, and records which entries are valid.

    Args:
        forward: runs the draft.
        slots: the sequences.
        needs: which of the target's features it is fed.
        shift: 1 if an entry holds the token after its position, 0 if it holds its own.

    Attributes:
        waiting: features that have not been fed yet.
        lag: known tokens of a sequence minus its entries.
        held: int64 `[S]`, the number of valid entries of each slot.
    """

    def __init__(self, forward: DraftForward, slots: SlotTable, needs: Needs, shift: int) -> None:
        self.forward, self.slots, self.needs = forward, slots, needs
        self.shift = shift
        self.lag = 1 if shift or needs == "all" else 0
        num_slots = len(slots.known_len)
        self.waiting = Waiting(num_slots)
        self.validity = BlockValidity(forward.num_blocks, slots.block_size)
        self._last_generation: Ints = np.full(num_slots, -1, np.int64)
        self._from: Ints = np.zeros(num_slots, np.int64)  # the first entry after the last gap
        self._has_gaps = False
        self.held: Ints = np.zeros(num_slots, np.int64)
        # The draft tokens fed in the last round, and the position of the first.
        self._fed_SK: Ints = np.zeros((num_slots, slots.max_draft), np.int64)
        self._num_fed: Ints = np.zeros(num_slots, np.int64)
        self._fed_from: Ints = np.zeros(num_slots, np.int64)

    def ends(self, slots_R: Ints) -> Ints:
        """Return how many entries the known tokens have."""
        ends_R: Ints = self.slots.known_len[slots_R] - self.lag
        return ends_R

    def lowest(self, slots_R: Ints) -> Ints | None:
        """Return the first entry that each row attends to; None if all rows attend to all."""
        return np.ascontiguousarray(self._from[slots_R]) if self._has_gaps else None

    def reach(self, slots_R: Ints) -> Ints:
        """Return how many entries could be valid: all that can be computed and have a block, but for the last one.

        The last one is fed in the round that drafts, whose first draft token is sampled from its output.
        """
        loaded = self.forward.loaded
        if not loaded.layers:
            return np.zeros_like(slots_R)
        room_R = self.slots.num_blocks[slots_R] * self.slots.block_size
        most_R: Ints = np.minimum(np.minimum(room_R, loaded.max_model_len), self.ends(slots_R) - 1)
        return most_R if self.needs != "all" else np.minimum(most_R, self.waiting.end_S[slots_R])

    def fits(self, slots_R: Ints, depths_R: Ints) -> Flags:
        """Return where the draft's context has room for so many levels, and the features to begin with have arrived."""
        known_R = self.slots.known_len[slots_R]
        fits_R: Flags = known_R + depths_R <= self.forward.loaded.max_model_len
        if self.needs != "none":
            fits_R &= (self.waiting.end_S[slots_R] == known_R - 1) & (known_R > 1)
        return fits_R

    def refresh(self, slots_R: Ints) -> Ints:
        """Update and return the number of valid entries of slots, after the last verdict or for new sequences."""
        generation_R = self.slots.generation[slots_R]
        is_new_R = self._last_generation[slots_R] != generation_R
        if self.needs != "all":
            self._keep_accepted(slots_R[~is_new_R])
        for slot in slots_R[is_new_R].tolist():
            self.start_if_new(slot)
        most_R = np.maximum(0, self.ends(slots_R) - 1)
        if self.needs == "all":  # features that were fed or lost are gone
            most_R = np.maximum(most_R, np.array([self.waiting.base(slot) for slot in slots_R.tolist()], np.int64))
        self._num_fed[slots_R] = 0
        held_R = self.forward.resumes_at(slots_R, generation_R, np.minimum(self.held[slots_R], most_R))
        self.held[slots_R] = held_R
        return held_R

    def lacking(self, slots_R: Ints) -> Ints:
        """As `refresh`; return how many entries could be valid and are not."""
        held_R = self.refresh(slots_R)
        lacking_R: Ints = self.reach(slots_R) - held_R
        return lacking_R

    def begin_draft(self, slots_R: Ints) -> None:
        """Record that drafts begin after the known tokens of these slots."""
        self._fed_from[slots_R] = self.slots.known_len[slots_R]
        self._num_fed[slots_R] = 0

    def add_drafted(self, slots_R: Ints, tokens_R: Ints) -> None:
        """Record the draft token that was fed for each slot."""
        self._fed_SK[slots_R, self._num_fed[slots_R]] = tokens_R
        self._num_fed[slots_R] += 1

    def record_chains(self, slots_R: Ints, tokens_RK: Ints, counts_R: Ints) -> None:
        """Record that the known tokens, and then the first `counts_R` draft tokens of each slot, were fed."""
        self._record(slots_R, self.held[slots_R], self.ends(slots_R))
        self.begin_draft(slots_R)
        most = int(counts_R.max())
        self._fed_SK[slots_R, :most] = tokens_RK[:, :most]
        self._num_fed[slots_R] = counts_R

    def start_if_new(self, slot: int) -> None:
        """Reset the state of *slot* if another sequence has joined it."""
        generation = self.slots.generation[slot]
        if self._last_generation[slot] == generation:
            return
        self._last_generation[slot] = generation
        if self.needs != "none":
            self.waiting.clear(slot)
        self._from[slot] = 0
        self.held[slot] = 0 if self.needs == "all" else self.validity.prefix(*self._table(slot))

    def put(self, slot: int, first: int, states_NX: torch.Tensor, newest_X: torch.Tensor | None = None) -> None:
        """Store features until they are fed; after a gap, continue with the valid entries right before *first*.

        For *newest_X* see `Waiting.put`.
        """
        follows = self.waiting.put(slot, first, states_NX, newest_X)
        if self.needs == "last":
            self.waiting.keep_newest(slot)
        elif not follows:
            self._from[slot] = self.validity.run_before(*self._table(slot), first)
            self._has_gaps |= bool(self._from[slot])
            self.held[slot] = first

    def feed(self, slots_R: Ints, first_R: Ints, end_R: Ints) -> torch.Tensor:
        """Compute the entries `first .. end` of each slot; return the output of the last ones, `[R, X]`."""
        lengths_R = end_R - first_R
        batch = Batch.from_history(self.slots.tokens, slots_R, first_R, lengths_R, first_valid_R=self.lowest(slots_R))
        if self.shift:
            np.copyto(batch.tokens_T, self.slots.tokens[batch.slots_T, batch.places_T + self.shift])
        self.clip_to_vocab(batch.tokens_T)
        features_TX = self.waiting.between(slots_R, first_R, end_R) if self.needs == "all" else None
        output_RX = self.forward.forward(batch, np.cumsum(lengths_R) - 1, features_TX)
        self._record(slots_R, first_R, end_R)
        return output_RX

    def feed_with(
        self,
        slots_R: Ints,
        counts_R: Ints,
        tokens_N: Ints,
        features_NX: torch.Tensor | None,
        tree_masks: TreeMasks | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed the known tokens and `counts_R` draft tokens after them, whose entries do not count as valid.

        Returns:
            The output of each slot's last known entry, `[R, X]`, and of the draft tokens, `[N, X]`.
        """
        first_R, end_R = self.held[slots_R], self.ends(slots_R)
        lengths_R = end_R - first_R + counts_R
        self.check_room(slots_R, end_R + counts_R)
        batch = Batch.from_history(
            self.slots.tokens, slots_R, first_R, lengths_R, tree_masks=tree_masks, first_valid_R=self.lowest(slots_R)
        )
        is_known_T = batch.places_T < np.repeat(end_R, lengths_R)
        slots_K, places_K = batch.slots_T[is_known_T], batch.places_T[is_known_T]
        batch.tokens_T[is_known_T] = self.slots.tokens[slots_K, places_K + self.shift]
        batch.tokens_T[~is_known_T] = tokens_N
        self.clip_to_vocab(batch.tokens_T)
        last_R, drafted_N = batch.offsets_R + end_R - first_R - 1, np.flatnonzero(~is_known_T)
        known_KX = self.waiting.between(slots_R, first_R, end_R) if self.needs == "all" else None
        features_TX = merged(known_KX, is_known_T, features_NX)
        output_MX = self.forward.forward(batch, np.concatenate((last_R, drafted_N)), features_TX)
        self._record(slots_R, first_R, end_R)
        return output_MX[: len(last_R)], output_MX[len(last_R) :]

    def check_room(self, slots_R: Ints, end_R: Ints) -> None:
        """Raise `ValueError` for draft tokens that have no block: they would overwrite another sequence's."""
        room_R = self.slots.num_blocks[slots_R] * self.slots.block_size
        if (end_R > room_R).any():
            r = int(np.argmax(end_R - room_R))
            raise ValueError(
                f"a proposer feeds entries up to {end_R[r]} of a row that has blocks for {room_R[r]}: "
                "more than its k allows"
            )

    def clip_to_vocab(self, tokens_T: Ints) -> Ints:
        """Clip, in place, ids that are not in the draft's smaller vocabulary."""
        return np.minimum(tokens_T, self.forward.loaded.vocab_size - 1, out=tokens_T)

    def _record(self, slots_R: Ints, first_R: Ints, end_R: Ints) -> None:
        """Record that entries were fed."""
        if self.needs == "all":
            self.waiting.drop(slots_R, end_R)
        self._mark(slots_R, first_R, end_R)
        self.held[slots_R] = end_R

    def _mark(self, slots_R: Ints, first_R: Ints, end_R: Ints) -> None:
        """Record that positions *first* to *end* of each slot are valid."""
        size = self.slots.block_size
        first_block_R = first_R // size
        counts_R = -(-end_R // size) - first_block_R
        row_B = np.repeat(np.arange(len(slots_R)), counts_R)
        index_B = np.arange(len(row_B)) + (first_block_R - np.cumsum(counts_R) + counts_R)[row_B]
        slots_B, base_B = slots_R[row_B], index_B * size
        self.validity.mark(
            self.slots.blocks[slots_B, index_B].astype(np.int64),
            self.slots.versions[slots_B, index_B],
            np.maximum(first_R[row_B] - base_B, 0),
            np.minimum(end_R[row_B] - base_B, size),
        )

    def _table(self, slot: int) -> tuple[list[int], list[int]]:
        count = int(self.slots.num_blocks[slot])
        return self.slots.blocks[slot, :count].tolist(), self.slots.versions[slot, :count].tolist()

    def _keep_accepted(self, slots_R: Ints) -> None:
        """Count draft tokens that were fed and then accepted; entries of a draft's own features are not valid."""
        slots_R = slots_R[self._num_fed[slots_R] > 0]
        if not len(slots_R):
            return
        first_R, counts_R = self._fed_from[slots_R], self._num_fed[slots_R]
        column_K = np.arange(counts_R.max())
        # The slot holds the draft after its known tokens.
        counts_R = np.minimum(counts_R, self.slots.known_len[slots_R] - first_R)
        known_RK = self.slots.tokens[slots_R[:, None], first_R[:, None] + column_K]
        is_kept_RK = (self._fed_SK[slots_R, : len(column_K)] == known_RK) & (column_K < counts_R[:, None])
        accepted_R = np.logical_and.accumulate(is_kept_RK, axis=1).sum(1)
        slots_R, accepted_R = slots_R[accepted_R > 0], accepted_R[accepted_R > 0]
        end_R = self.held[slots_R] + accepted_R
        self._mark(slots_R, self.held[slots_R], end_R)
        self.held[slots_R] = end_R


class BlockValidity:
    """Which positions of each block are valid: one run `begin .. filled` for each block and version of its content."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._version: Ints = np.full(num_blocks, -1, np.int64)
        self._begin: Ints = np.zeros(num_blocks, np.int64)
        self._filled: Ints = np.zeros(num_blocks, np.int64)

    def prefix(self, blocks: Seq[int], versions: Seq[int]) -> int:
        """Return how many leading positions of a sequence with these blocks are valid."""
        held = 0
        for block, version in zip(blocks, versions, strict=True):
            if self._version[block] != version or self._begin[block]:
                break
            held += int(self._filled[block])
            if self._filled[block] < self.block_size:
                break
        return held

    def run_before(self, blocks: Seq[int], versions: Seq[int], end: int) -> int:
        """Return where the run of valid positions that ends at *end* begins; *end* if there is none."""
        begin = end
        while begin > 0:
            i = (begin - 1) // self.block_size
            block, base = blocks[i], i * self.block_size
            if self._version[block] != versions[i] or base + self._filled[block] < begin:
                break
            begin = base + min(int(self._begin[block]), begin - base)
            if begin > base:
                break
        return begin

    def mark(self, blocks_B: Ints, versions_B: Ints, first_B: Ints, end_B: Ints) -> None:
        """Record that positions *first* to *end* of blocks are valid.

        Earlier ones stay valid if they reach up to *first*, and become invalid otherwise. Sequences that share a prefix
        may name a block twice: what one of them marks counts for the next.
        """
        if len(set(blocks_B.tolist())) == len(blocks_B):
            self._mark(blocks_B, versions_B, first_B, end_B)
        else:
            for b in range(len(blocks_B)):
                at = slice(b, b + 1)
                self._mark(blocks_B[at], versions_B[at], first_B[at], end_B[at])

    def _mark(self, blocks_B: Ints, versions_B: Ints, first_B: Ints, end_B: Ints) -> None:
        """As `mark`, for blocks of which each is named once."""
        begins_anew_B = (
            (self._version[blocks_B] != versions_B)
            | (self._filled[blocks_B] < first_B)
            | (self._begin[blocks_B] > first_B)
        )
        anew = blocks_B[begins_anew_B]
        self._version[anew], self._begin[anew] = versions_B[begins_anew_B], first_B[begins_anew_B]
        self._filled[blocks_B] = end_B
