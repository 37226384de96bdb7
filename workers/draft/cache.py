"""The draft's KV cache: feeds known tokens to the draft, and records which cache entries are valid.

An *entry* is the K and V of one position. It is computed from the token there, or from the next token and the target's
features (`Module.shift`).
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch

from protos.layers import Needs
from workers.attention.batch import Batch, Flags, Ints, TreeMasks
from workers.features import Waiting
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
        self._last_generation = [-1] * num_slots
        self._from: Ints = np.zeros(num_slots, np.int64)  # the first entry after the last gap
        self._has_gaps = False
        self.held: Ints = np.zeros(num_slots, np.int64)
        # Single elements are read and written faster through these.
        self._held, self._known, self._generation = self.held.data, slots.known_len.data, slots.generation.data
        self._num_blocks, self._blocks, self._versions = slots.num_blocks.data, slots.blocks.data, slots.versions.data
        self._fed: list[tuple[int, list[int]]] = [(0, [])] * num_slots  # position, and draft tokens fed there

    def ends(self, slots_R: Ints) -> Ints:
        """Return how many entries the known tokens have."""
        ends_R: Ints = self.slots.known_len[slots_R] - self.lag
        return ends_R

    def lowest(self, slots_R: Ints) -> Ints | None:
        """Return the first entry that each row attends to; None if all rows attend to all."""
        return np.ascontiguousarray(self._from[slots_R]) if self._has_gaps else None

    def reach(self, slot: int) -> int:
        """Return how many entries could be valid: all that can be computed and have a block, but for the last one.

        The last one is fed in the round that drafts, whose first draft token is sampled from its output.
        """
        loaded = self.forward.loaded
        if not loaded.layers:
            return 0
        most = min(
            self._num_blocks[slot] * self.slots.block_size, loaded.max_model_len, self._known[slot] - self.lag - 1
        )
        return most if self.needs != "all" else min(most, int(self.waiting.end_S[slot]))

    def fits(self, slot: int, depth: int) -> bool:
        """Whether the draft's context has room for *depth* levels, and the features to begin with have arrived."""
        known = self._known[slot]
        has_features = self.needs == "none" or int(self.waiting.end_S[slot]) == known - 1 > 0
        return has_features and known + depth <= self.forward.loaded.max_model_len

    def refresh(self, slot: int) -> int:
        """Update and return the number of valid entries of *slot*, after the last verdict or for a new sequence."""
        if not self.start_if_new(slot) and self.needs != "all":
            self._keep_accepted(slot, *self._fed[slot])
        self._fed[slot] = (0, [])
        most = max(0, self._known[slot] - self.lag - 1)
        if self.needs == "all":  # features that were fed or lost are gone
            most = max(most, self.waiting.base(slot))
        held = self.forward.resumes_at(slot, self._generation[slot], min(self._held[slot], most))
        self._held[slot] = held
        return held

    def begin_draft(self, slots_R: Ints) -> None:
        """Record that drafts begin after the known tokens of these slots."""
        for slot in slots_R.tolist():
            self._fed[slot] = (self._known[slot], [])

    def add_drafted(self, slots_R: Ints, token_ids: Seq[int]) -> None:
        """Record the draft token that was fed for each slot."""
        for slot, token in zip(slots_R.tolist(), token_ids, strict=True):
            self._fed[slot][1].append(token)

    def record_chains(self, slots_R: Ints, chains: Seq[list[int]]) -> None:
        """Record that the known tokens, and then these draft tokens of each slot, were fed."""
        self._record(slots_R, self.held[slots_R], self.ends(slots_R))
        for slot, fed in zip(slots_R.tolist(), chains, strict=True):
            self._fed[slot] = (self._known[slot], fed)

    def start_if_new(self, slot: int) -> bool:
        """Reset the state of *slot* if another sequence has joined it; return whether one has."""
        is_new = self._last_generation[slot] != self._generation[slot]
        if is_new:
            self._last_generation[slot] = self._generation[slot]
            if self.needs != "none":
                self.waiting.clear(slot)
            self._from[slot] = 0
            self.held[slot] = 0 if self.needs == "all" else self.validity.prefix(*self._table(slot))
        return is_new

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
        features_TX = self._merged_features(slots_R, first_R, end_R, is_known_T, features_NX)
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

    def _merged_features(
        self, slots_R: Ints, first_R: Ints, end_R: Ints, is_known_T: Flags, features_NX: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return the features of known and draft tokens in the order of the batch; zeros where there are none."""
        known_KX = self.waiting.between(slots_R, first_R, end_R) if self.needs == "all" else None
        given = known_KX if known_KX is not None else features_NX
        if given is None:
            return None
        features_TX = given.new_zeros(len(is_known_T), given.shape[1])
        if known_KX is not None:
            features_TX[torch.from_numpy(np.flatnonzero(is_known_T)).to(given.device)] = known_KX
        if features_NX is not None:
            features_TX[torch.from_numpy(np.flatnonzero(~is_known_T)).to(given.device)] = features_NX
        return features_TX

    def _record(self, slots_R: Ints, first_R: Ints, end_R: Ints) -> None:
        """Record that entries were fed."""
        if self.needs == "all":
            self.waiting.drop(slots_R, end_R)
        for slot, first, end in zip(slots_R.tolist(), first_R.tolist(), end_R.tolist(), strict=True):
            self._mark(slot, first, end)
        self.held[slots_R] = end_R

    def _mark(self, slot: int, first: int, end: int) -> None:
        """Record that positions *first* to *end* of a slot are valid."""
        size = self.slots.block_size
        for i in range(first // size, -(-end // size)):
            base = i * size
            offset = first - base if first > base else 0
            self.validity.mark(self._blocks[slot, i], self._versions[slot, i], offset, min(size, end - base))

    def _table(self, slot: int) -> tuple[list[int], list[int]]:
        count = int(self.slots.num_blocks[slot])
        return self.slots.blocks[slot, :count].tolist(), self.slots.versions[slot, :count].tolist()

    def _keep_accepted(self, slot: int, base: int, fed: list[int]) -> None:
        """Count draft tokens that were fed and then accepted; entries of a draft's own features are not valid."""
        known = self.slots.tokens[slot, base : min(base + len(fed), self._known[slot])].tolist() if fed else []
        accepted = len(fed) if fed == known else _common_prefix(fed, known)  # the slot holds the draft after them
        if accepted:
            held = self._held[slot]
            self._mark(slot, held, held + accepted)
            self._held[slot] = held + accepted


def _common_prefix(fed: Seq[int], known: Seq[int]) -> int:
    """Return how many leading tokens are equal."""
    for count, (drafted, token) in enumerate(zip(fed, known, strict=False)):
        if drafted != token:
            return count
    return min(len(fed), len(known))


class BlockValidity:
    """Which positions of each block are valid: one run `begin .. filled` for each block and version of its content."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        # Lists: they are read and written one by one.
        self.version = [-1] * num_blocks
        self.begin, self.filled = [0] * num_blocks, [0] * num_blocks

    def prefix(self, blocks: Seq[int], versions: Seq[int]) -> int:
        """Return how many leading positions of a sequence with these blocks are valid."""
        held = 0
        for block, version in zip(blocks, versions, strict=True):
            if self.version[block] != version or self.begin[block]:
                break
            held += self.filled[block]
            if self.filled[block] < self.block_size:
                break
        return held

    def run_before(self, blocks: Seq[int], versions: Seq[int], end: int) -> int:
        """Return where the run of valid positions that ends at *end* begins; *end* if there is none."""
        begin = end
        while begin > 0:
            i = (begin - 1) // self.block_size
            block, base = blocks[i], i * self.block_size
            if self.version[block] != versions[i] or base + self.filled[block] < begin:
                break
            begin = base + min(self.begin[block], begin - base)
            if begin > base:
                break
        return begin

    def mark(self, block: int, version: int, first: int, end: int) -> None:
        """Record that positions *first* to *end* of a block are valid.

        Earlier ones stay valid if they reach up to *first*, and become invalid otherwise.
        """
        if self.version[block] != version or self.filled[block] < first or self.begin[block] > first:
            self.version[block], self.begin[block] = version, first
        self.filled[block] = end
