"""The workers' copy of the controller's state: tokens, block tables and sampling parameters by slot.

Arrays on the host, which Python reads once a step. The controller overrides them with every plan.
"""

import numpy as np
import numpy.typing as npt

from protos.messages import NewSequence, RoundPlan, Row, Sampling


class SlotTable:
    """Per-slot state of one worker.

    Args:
        num_slots: S.
        max_len: the longest sequence.
        block_size: tokens of a KV block.
        max_draft: places after the known tokens that a draft may take.

    Attributes:
        block_size, max_draft: as given.
        tokens: int64 `[S, L]`, prompt + output, then the round's draft: a chain's tokens, or a tree's nodes, which
            the tokens sampled along its path overwrite.
        known_len: int64 `[S]`, number of known tokens.
        computed: int64 `[S]`, how many places the target had computed before the round.
        prompt_len: int64 `[S]`.
        blocks: int32 `[S, B]`, block ids in order; `num_blocks` `[S]` of them.
        versions: int64 `[S, B]`, the version of each block's content.
        sampling: the slot's sampling parameters.
        generation: int64 `[S]`, that of the sequence in the slot, 0 before the first: slot and generation identify
            a sequence.
        constrained: bool `[S]`, whether the slot's sequence has a grammar.
    """

    def __init__(self, num_slots: int, max_len: int, block_size: int, max_draft: int = 64) -> None:
        self.block_size, self.max_draft = block_size, max_draft
        length = max_len + max_draft + 1
        self.tokens: npt.NDArray[np.int64] = np.zeros((num_slots, length), np.int64)
        self.known_len: npt.NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.computed: npt.NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.prompt_len: npt.NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.blocks: npt.NDArray[np.int32] = np.zeros((num_slots, -(-length // block_size)), np.int32)
        self.versions: npt.NDArray[np.int64] = np.zeros_like(self.blocks, np.int64)
        self.num_blocks: npt.NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.generation: npt.NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.constrained: npt.NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        self.sampling: list[Sampling] = [Sampling(seed=0)] * num_slots
        # Single elements are read and written faster through these.
        self._known, self._computed = self.known_len.data, self.computed.data

    def clear(self) -> None:
        """Remove all sequences."""
        for array in (
            self.tokens,
            self.known_len,
            self.computed,
            self.prompt_len,
            self.blocks,
            self.versions,
            self.num_blocks,
            self.generation,
            self.constrained,
        ):
            array[:] = 0
        self.sampling[:] = [Sampling(seed=0)] * len(self.sampling)

    def apply(self, plan: RoundPlan) -> None:
        """Update the slots of the new and running sequences in *plan*."""
        for new in plan.new:
            self._join(new)
        for row in plan.rows:
            self._update(row)

    def _join(self, new: NewSequence) -> None:
        slot = new.slot
        self.tokens[slot, : len(new.token_ids)] = new.token_ids
        self.known_len[slot] = len(new.token_ids)
        self.prompt_len[slot] = new.prompt_len
        self.num_blocks[slot] = 0
        self.generation[slot] = new.generation or self.generation[slot] + 1
        self.sampling[slot] = new.sampling
        self.constrained[slot] = new.sampling.grammar is not None

    def _update(self, row: Row) -> None:
        slot = row.slot
        if row.new_token_ids:
            self.tokens[slot, row.known_len - len(row.new_token_ids) : row.known_len] = row.new_token_ids
        self._known[slot], self._computed[slot] = row.known_len, row.start
        if row.new_block_ids:
            first = int(self.num_blocks[slot])
            last = first + len(row.new_block_ids)
            self.blocks[slot, first:last] = row.new_block_ids
            self.versions[slot, first:last] = row.new_block_versions
            self.num_blocks[slot] = last

    def room(self, slots_R: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return how many places the blocks of each slot have after its known tokens."""
        room_R: npt.NDArray[np.int64] = self.num_blocks[slots_R] * self.block_size - self.known_len[slots_R]
        return room_R

    def write_draft(self, slot: int, token_ids: tuple[int, ...] | list[int]) -> None:
        """Write draft tokens after the known tokens, from where they are fed and penalties count them."""
        known = self._known[slot]
        self.tokens[slot, known : known + len(token_ids)] = token_ids


def changes_logits(sampling: Sampling) -> bool:
    """Whether a request needs logits processors (`workers.sampling.logits_processors`)."""
    return has_penalties(sampling) or has_additions(sampling)


def has_penalties(sampling: Sampling) -> bool:
    """Whether the request has a penalty, for which tokens are counted."""
    return bool(sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty)


def has_additions(sampling: Sampling) -> bool:
    """Whether the request has masks or a bias, which are added to logits."""
    return bool(
        sampling.allowed_ids is not None
        or sampling.bad_words
        or sampling.logit_bias
        or (sampling.min_tokens and sampling.stop_ids)
    )
