"""What a draft's cache holds of each block's content: blocks are shared, given up and filled again by others."""

from collections.abc import Sequence as Seq

import numpy as np

from workers.attention.batch import Ints


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
