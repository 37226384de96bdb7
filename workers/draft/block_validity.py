"""Which entries of each block of the draft's KV cache are valid."""

from collections.abc import Sequence as Seq

import numpy as np

from workers.attention.batch import Ints


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
        if len(np.unique(blocks_B)) == len(blocks_B):
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
