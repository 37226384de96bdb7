"""What a draft has read of each sequence, and what it could read. The book-keeping of `workers.draft.worker`.

An *entry* is what the cache holds of one position. It is made of the token there, or of the one behind it and the
target's features (`Module.shift`).
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch

from protos.layers import Needs
from workers.attention.batch import Batch, Flags, Ints, TreeMask, TreeMasks
from workers.features import Waiting
from workers.model.draft_forward import DraftForward
from workers.slots import SlotTable


class DraftCache:
    """Feeds known tokens to what drafts, and remembers which entries are right.

    Args:
        forward: runs what drafts.
        slots: the sequences.
        needs: which of the target's features there are.
        shift: 1 where an entry holds the token behind it, 0 where it holds its own.

    Attributes:
        waiting: features that were not fed yet.
        lag: of a sequence's entries behind its known tokens.
    """

    def __init__(self, forward: DraftForward, slots: SlotTable, needs: Needs, shift: int) -> None:
        self.forward, self.slots, self.needs = forward, slots, needs
        self.shift = shift
        self.lag = 1 if shift or needs == "all" else 0
        num_slots = len(slots.known_len)
        self.waiting = Waiting(num_slots)
        self.validity = BlockValidity(forward.num_blocks, slots.block_size)
        self._joined: Ints = np.full(num_slots, -1, np.int64)
        self._from: Ints = np.zeros(num_slots, np.int64)  # the first entry behind the last gap
        self._has_gaps = False
        self.held: Ints = np.zeros(num_slots, np.int64)  # entries up to here are right

    def ends(self, slots_R: Ints) -> Ints:
        """Return how many entries the known tokens make."""
        ends_R: Ints = self.slots.known_len[slots_R] - self.lag
        return ends_R

    def lowest(self, slots_R: Ints) -> Ints | None:
        """Return each row's first entry that may be seen; None where all may."""
        return np.ascontiguousarray(self._from[slots_R]) if self._has_gaps else None

    def reach(self, slot: int) -> int:
        """Return how many entries could be held: all that can be made and have a block, but for the last one.

        That one is left to be fed by the round that drafts: what comes behind it is the first guess.
        """
        if not self.forward.loaded.layers:
            return 0
        slots = self.slots
        most = min(int(slots.num_blocks[slot]) * slots.block_size, self.forward.loaded.max_model_len)
        if self.needs == "all":
            most = min(most, int(self.waiting.end_S[slot]))
        return min(most, int(slots.known_len[slot]) - self.lag - 1)

    def fits(self, slot: int, k: int) -> bool:
        """Whether the draft's context holds the sequence with *k* guesses, and the features to begin with are here."""
        known = int(self.slots.known_len[slot])
        has_features = self.needs == "none" or int(self.waiting.end_S[slot]) == known - 1 > 0
        return has_features and known + k <= self.forward.loaded.max_model_len

    def refresh(self, slot: int, fed: tuple[int, list[int]]) -> int:
        """Return how many entries of *slot* are held, after the last verdict or a new sequence.

        Args:
            slot: of the sequence.
            fed: the position behind which drafted tokens were fed in the last round, and their ids.
        """
        if not self.meet(slot) and self.needs != "all":
            self._keep_accepted(slot, *fed)
        most = max(0, int(self.slots.known_len[slot]) - self.lag - 1)
        if self.needs == "all":  # of what was fed, or lost, there are no features any more
            most = max(most, self.waiting.base(slot))
        self.held[slot] = min(int(self.held[slot]), most)
        return int(self.held[slot])

    def meet(self, slot: int) -> bool:
        """Begin anew where another sequence joined *slot*; return whether one did."""
        is_new = bool(self._joined[slot] != self.slots.joined[slot])
        if is_new:
            self._joined[slot] = self.slots.joined[slot]
            self.waiting.clear(slot)
            self._from[slot] = 0
            self.held[slot] = 0 if self.needs == "all" else self.validity.prefix(*self._table(slot))
        return is_new

    def put(self, slot: int, first: int, states_NX: torch.Tensor) -> None:
        """Let features wait; behind a gap, go on from there with as much before it as the cache happens to hold."""
        follows = self.waiting.put(slot, first, states_NX)
        if self.needs == "last":
            self.waiting.keep_newest(slot)
        elif not follows:
            self._from[slot] = self.validity.run_before(*self._table(slot), first)
            self._has_gaps |= bool(self._from[slot])
            self.held[slot] = first

    def feed(self, slots_R: Ints, first_R: Ints, end_R: Ints) -> torch.Tensor:
        """Make the entries `first .. end` of each slot from what is known; return what comes behind them, `[R, X]`."""
        lengths_R = end_R - first_R
        batch = Batch.from_history(self.slots.tokens, slots_R, first_R, lengths_R, first_valid_R=self.lowest(slots_R))
        if self.shift:
            np.copyto(batch.tokens_T, self.slots.tokens[batch.slots_T, batch.places_T + self.shift])
        self.known_to_draft(batch.tokens_T)
        features_TX = self.waiting.between(slots_R, first_R, end_R) if self.needs == "all" else None
        output_RX = self.forward.forward(batch, np.cumsum(lengths_R) - 1, features_TX)
        self._note(slots_R, first_R, end_R)
        return output_RX

    def feed_with(
        self,
        slots_R: Ints,
        counts_R: Ints,
        tokens_N: Ints,
        features_NX: torch.Tensor | None,
        tree_masks: TreeMasks | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed all that is known, and `counts_R` drafted tokens behind it, which are forgotten.

        Returns:
            What comes behind each slot's last known entry, `[R, X]`, and behind the drafted tokens, `[N, X]`.
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
        self.known_to_draft(batch.tokens_T)
        last_R, drafted_N = batch.offsets_R + end_R - first_R - 1, np.flatnonzero(~is_known_T)
        features_TX = self._beside(slots_R, first_R, end_R, is_known_T, features_NX)
        output_MX = self.forward.forward(batch, np.concatenate((last_R, drafted_N)), features_TX)
        self._note(slots_R, first_R, end_R)
        return output_MX[: len(last_R)], output_MX[len(last_R) :]

    def check_room(self, slots_R: Ints, end_R: Ints) -> None:
        """Refuse drafted tokens that have no block: they would be written over another sequence's."""
        room_R = self.slots.num_blocks[slots_R] * self.slots.block_size
        if (end_R > room_R).any():
            r = int(np.argmax(end_R - room_R))
            raise ValueError(
                f"a proposer feeds entries up to {end_R[r]} of a row that has blocks for {room_R[r]}: "
                "more than its k allows"
            )

    def known_to_draft(self, tokens_T: Ints) -> Ints:
        """Replace, in place, ids that the draft's smaller vocabulary lacks: a poorer guess, and no error."""
        return np.minimum(tokens_T, self.forward.loaded.vocab_size - 1, out=tokens_T)

    def _beside(
        self, slots_R: Ints, first_R: Ints, end_R: Ints, is_known_T: Flags, features_NX: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return the features of known and drafted entries in the order of the batch; zeros where there are none."""
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

    def _note(self, slots_R: Ints, first_R: Ints, end_R: Ints) -> None:
        """Note that entries were fed."""
        if self.needs == "all":
            self.waiting.drop(slots_R, end_R)
        for slot, first, end in zip(slots_R.tolist(), first_R.tolist(), end_R.tolist(), strict=True):
            self.validity.mark(self.slots.blocks[slot], self.slots.versions[slot], first, end)
        self.held[slots_R] = end_R

    def _table(self, slot: int) -> tuple[list[int], list[int]]:
        count = int(self.slots.num_blocks[slot])
        return self.slots.blocks[slot, :count].tolist(), self.slots.versions[slot, :count].tolist()

    def _keep_accepted(self, slot: int, base: int, fed: list[int]) -> None:
        """Count drafted tokens that were fed and then accepted; those made of recycled features do not count."""
        held = int(self.held[slot])
        fed = fed[: max(0, int(self.slots.known_len[slot]) - base)]  # behind the known tokens stand our own guesses
        accepted = _agreeing(fed, self.slots.tokens[slot, base : base + len(fed)].tolist())
        if accepted:
            self.validity.mark(self.slots.blocks[slot], self.slots.versions[slot], held, held + accepted)
        self.held[slot] = held + accepted


def _agreeing(fed: Seq[int], known: Seq[int]) -> int:
    """Return the length of the common beginning of what was fed and what turned out to be true."""
    for count, (ours, true) in enumerate(zip(fed, known, strict=True)):
        if ours != true:
            return count
    return len(fed)


class BlockValidity:
    """Which positions of which block contents the draft's cache holds: of each block one run, `begin .. filled`."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.version: Ints = np.full(num_blocks, -1, np.int64)
        self.begin: Ints = np.zeros(num_blocks, np.int64)
        self.filled: Ints = np.zeros(num_blocks, np.int64)

    def prefix(self, blocks: Seq[int], versions: Seq[int]) -> int:
        """Return how many leading positions of a sequence with these blocks are held."""
        held = 0
        for block, version in zip(blocks, versions, strict=True):
            if self.version[block] != version or self.begin[block]:
                break
            held += int(self.filled[block])
            if self.filled[block] < self.block_size:
                break
        return held

    def run_before(self, blocks: Seq[int], versions: Seq[int], end: int) -> int:
        """Return where the unbroken run of held positions that reaches up to *end* begins; *end* where none does."""
        begin = end
        while begin > 0:
            i = (begin - 1) // self.block_size
            block, base = blocks[i], i * self.block_size
            if self.version[block] != versions[i] or base + self.filled[block] < begin:
                break
            begin = base + int(min(self.begin[block], begin - base))
            if begin > base:
                break
        return begin

    def mark(self, blocks: Seq[int], versions: Seq[int], first: int, end: int) -> None:
        """Note that a sequence's positions *first* to *end* are held.

        What was noted of a block before stays noted where it reaches up to *first*, and is forgotten otherwise.
        """
        for i in range(first // self.block_size, -(-end // self.block_size)):
            block, base = blocks[i], i * self.block_size
            offset = max(0, first - base)
            if self.version[block] != versions[i] or self.filled[block] < offset or self.begin[block] > offset:
                self.begin[block] = offset
            self.version[block] = versions[i]
            self.filled[block] = min(self.block_size, end - base)


@dataclass
class Grown:
    """The nodes of one row's tree, in the order in which they were fed."""

    _depths: list[int] = field(default_factory=list)
    _ways: list[int] = field(default_factory=list)  # bit j: node j lies on the way from the root, or is the node

    def __len__(self) -> int:
        return len(self._depths)

    def add(self, parent: int) -> None:
        """Add a node behind another, -1 for the root."""
        node = len(self._depths)
        self._depths.append(0 if parent < 0 else self._depths[parent] + 1)
        self._ways.append(1 << node | (0 if parent < 0 else self._ways[parent]))

    def mask(self, first: int, num_before: int) -> TreeMask:
        """Return what the nodes see that are fed now, behind *num_before* others; the first stands at place *first*."""
        return TreeMask(first, [first + depth for depth in self._depths], self._ways[num_before:])


def whole_block(first: int, size: int) -> TreeMask | None:
    """Return the area of a block from place *first* on in which every token sees all; None where it is empty."""
    return TreeMask(first, range(first, first + size), [(1 << size) - 1] * size) if size else None


def plant(trees: Seq[Grown], row_N: Seq[int], parents_N: Seq[int]) -> list[int]:
    """Add a level's nodes to the trees of their rows; return how many nodes each tree had before."""
    before = [len(tree) for tree in trees]
    for row, parent in zip(row_N, parents_N, strict=True):
        trees[row].add(parent)
    return before
