"""How often tokens occurred in each sequence, counted on the device for penalties inside graphs."""

import numpy as np
import torch

from workers.sampling.sample import Ints, Penalties
from workers.slots import SlotTable

IN_PROMPT = 1 << 30
"""This bit of a count is set for tokens of the prompt; the bits below count those of the output."""

UNCOUNTED = 32
"""Graphs have room for so many tokens beside the draft tokens of one round: those of rounds that ran another way, the
newest one, and one that the device writes."""


class TokenCounts:
    """The counts of the sequences in S slots. Graphs add the newest tokens, which come with a round's input.

    What a graph has no room for, and a new sequence, is counted before: one copy, and some kernels.

    Args:
        slots: the sequences.
        vocab_size: V; tokens beyond are not counted.
        device: of the graphs.

    Attributes:
        seen_SV: int32 `[S + 1, V]`; the last row is that of padding.
    """

    def __init__(self, slots: SlotTable, vocab_size: int, device: torch.device) -> None:
        num_slots = len(slots.generation)
        self._slots, self._vocab_size = slots, vocab_size
        self.seen_SV = torch.zeros((num_slots + 1, vocab_size), dtype=torch.int32, device=device)
        self._generation_S = np.full(num_slots, -1, np.int64)
        self._counted_S = np.zeros(num_slots, np.int64)

    @staticmethod
    def num_bytes(num_slots: int, vocab_size: int) -> int:
        """Return the memory of the counts."""
        return (num_slots + 1) * vocab_size * torch.int32.itemsize

    def write_uncounted(self, into_RC: Ints, slots_R: Ints, penalties: Penalties, *, follows: bool) -> None:
        """Write the newest known tokens of each row that a graph is about to count; the rest is -1.

        Rows without penalties have none, nor have those after the given ones. The last column is for the tokens of a
        round that *follows* one whose tokens the host does not know yet; the device writes it.
        """
        into_RC[:] = -1
        rows = np.flatnonzero(~penalties.are_off)
        if not len(rows):
            return
        room, slots_P = into_RC.shape[1] - 1, slots_R[rows]
        known_P, counted_P = self._slots.known_len[slots_P], self._counted_S[slots_P]
        is_other_P = (self._generation_S[slots_P] != self._slots.generation[slots_P]) | (counted_P > known_P)
        for slot in slots_P[is_other_P | (known_P - counted_P > room)].tolist():
            self._count_all(slot)
        first_P = self._counted_S[slots_P]
        places_PC = first_P[:, None] + np.arange(room)
        tokens_PC = self._slots.tokens[slots_P[:, None], np.minimum(places_PC, self._slots.tokens.shape[1] - 1)]
        is_new_PC = (places_PC < known_P[:, None]) & (tokens_PC < self._vocab_size)
        into_RC[rows, :room] = np.where(is_new_PC, tokens_PC, -1)
        self._counted_S[slots_P] = known_P + follows

    def _count_all(self, slot: int) -> None:
        """Count all known tokens of a sequence anew."""
        slots = self._slots
        known, prompt = int(slots.known_len[slot]), int(slots.prompt_len[slot])
        is_known_L = slots.tokens[slot, :known] < self._vocab_size
        num_of_prompt = int(is_known_L[:prompt].sum())
        ids_M = torch.from_numpy(slots.tokens[slot, :known][is_known_L]).to(self.seen_SV.device)
        seen_V = self.seen_SV[slot].zero_()
        seen_V.index_fill_(0, ids_M[:num_of_prompt], IN_PROMPT)
        output_M = ids_M[num_of_prompt:]
        seen_V.scatter_add_(0, output_M, torch.ones_like(output_M, dtype=torch.int32))
        self._generation_S[slot], self._counted_S[slot] = slots.generation[slot], known
