"""Allocation of the blocks of the paged KV cache, and the prefix cache over their content."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count

from runtime.core.prefix_states import PrefixStates

Chain = int | str
"""Identifies the content from position 0 on: the node of the last published block, or the cache salt before any."""


class BlockManager:
    """Blocks 0 .. num_blocks - 1: reference counts, versions, and a prefix cache keyed by content.

    A full block of computed, committed tokens is published under the chain before it and its token ids. Token ids are
    compared exactly and nodes are never reused, so equal chains mean equal contents. A free block keeps its content
    until no empty block is left; then the least recently used one is evicted. A block's version changes whenever it is
    allocated for new content.

    `states` are those of recurrent layers after some of the published blocks; without any, no prefix is reused. None:
    the model has no recurrent layers.
    """

    def __init__(self, num_blocks: int, block_size: int, num_states: int | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.states = None if num_states is None else PrefixStates(num_states)
        self._owners = [0] * num_blocks
        self._versions = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._idle: dict[int, None] = {}
        self._index: dict[tuple[Chain, tuple[int, ...]], int] = {}
        self._published: dict[int, tuple[tuple[Chain, tuple[int, ...]], int]] = {}
        self._nodes = count()
        self._shared: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that no sequence owns, including those with cached content."""
        return len(self._empty) + len(self._idle)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold *num_tokens*."""
        return -(-num_tokens // self.block_size)

    def versions_of(self, block_ids: Sequence[int]) -> list[int]:
        """Return the current version of each block."""
        return [self._versions[block] for block in block_ids]

    def allocate(self, num_blocks: int) -> list[int]:
        """Allocate blocks for new content.

        Raises:
            RuntimeError: fewer are free; check `num_free` first.
        """
        if num_blocks > self.num_free:
            raise RuntimeError(f"{num_blocks} blocks wanted, {self.num_free} of {self.num_blocks} free")
        return [self._allocate_one() for _ in range(num_blocks)]

    def _allocate_one(self) -> int:
        if self._empty:
            block = self._empty.pop()
        else:
            block = next(iter(self._idle))
            del self._idle[block]
            self._unpublish(block)
        self._shared.discard(block)
        self._owners[block] = 1
        self._versions[block] += 1
        return block

    def free(self, block_ids: Sequence[int]) -> None:
        """Remove one owner of each block. The last blocks of a sequence are evicted first."""
        for block in reversed(block_ids):
            if self._owners[block] < 1:
                raise RuntimeError(f"block {block} was freed more often than it was owned")
            self._owners[block] -= 1
            if not self._owners[block]:
                self._retire(block)

    def _retire(self, block: int) -> None:
        if block in self._published:
            self._idle[block] = None
        else:
            self._empty.append(block)

    def match(self, token_ids: Sequence[int], salt: str) -> tuple[list[int], Chain]:
        """Find the longest published prefix that leaves at least one token to feed.

        Returns:
            Its blocks, not yet owned, and its chain (the salt if nothing was found).
        """
        chain: Chain = salt
        hit: list[int] = []
        size = self.block_size
        for end in range(size, len(token_ids), size):
            block = self._index.get((chain, tuple(token_ids[end - size : end])))
            if block is None:
                break
            hit.append(block)
            chain = self._published[block][1]
        return hit, chain

    def resumable(self, hit: list[int], salt: str) -> tuple[list[int], Chain]:
        """Return as much of what `match` found as a sequence can begin after, and its chain.

        With recurrent layers it ends with the last block after which a state is kept.
        """
        nodes = [self._published[block][1] for block in hit]
        while nodes and self.states is not None and nodes[-1] not in self.states:
            nodes.pop()
        return hit[: len(nodes)], nodes[-1] if nodes else salt

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks no sequence owns."""
        return sum(not self._owners[block] for block in block_ids)

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one owner to blocks that `match` found."""
        for block in block_ids:
            if not self._owners[block]:
                del self._idle[block]
            self._owners[block] += 1
            self._shared.add(block)

    def publish(self, block: int, parent: Chain, token_ids: tuple[int, ...]) -> Chain:
        """Add a full block of computed, committed tokens to the prefix cache; return the chain that ends with it.

        If the same content is already published, return the chain of that block.
        """
        key = (parent, token_ids)
        existing = self._index.get(key)
        if existing is not None:
            return self._published[existing][1]
        node = next(self._nodes)
        self._index[key] = block
        self._published[block] = (key, node)
        return node

    def forget(self, block_ids: Iterable[int]) -> None:
        """Remove blocks with invalid content from the prefix cache, whether or not they are owned."""
        for block in block_ids:
            if block in self._published:
                self._unpublish(block)
                if block in self._idle:
                    del self._idle[block]
                    self._empty.append(block)

    def forget_all(self) -> None:
        """Empty the prefix cache, because the workers' KV is lost. Versions keep growing."""
        self.forget(list(self._published))
        if self.states is not None:
            self.states.forget_all()

    def resize(self, num_blocks: int, num_states: int | None = None) -> None:
        """Use blocks 0 .. num_blocks - 1 from now on: those of new workers, all empty; and so many recurrent states.

        Raises:
            RuntimeError: there were never so many, or some are owned; requeue all sequences first.
        """
        if num_blocks > len(self._owners) or any(self._owners):
            raise RuntimeError(f"{num_blocks} of {len(self._owners)} blocks wanted, {sum(self._owners)} are owned")
        self.forget_all()
        if self.states is not None:
            self.states.resize(num_states or 0)
        self.num_blocks = num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))

    def _unpublish(self, block: int) -> None:
        key, node = self._published.pop(block)
        del self._index[key]
        if self.states is not None:
            self.states.drop(node)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Check owners, free blocks and the prefix cache against the block tables of all sequences.

        Raises:
            RuntimeError: names the block or the numbers that disagree.
        """
        owned = Counter(block for table in tables for block in table)
        for block in range(self.num_blocks):
            if self._owners[block] != owned[block]:
                raise RuntimeError(f"block {block} has {self._owners[block]} owners recorded, {owned[block]} in tables")
            if owned[block] > 1 and block not in self._shared:
                raise RuntimeError(f"block {block} has {owned[block]} owners and was never shared")
        free = [*self._empty, *self._idle]
        if len(set(free)) != len(free) or len(free) + len(owned) != self.num_blocks or set(free) & set(owned):
            raise RuntimeError(f"{len(free)} free and {len(owned)} used blocks are not {self.num_blocks}")
        if {b: k for k, b in self._index.items()} != {b: entry[0] for b, entry in self._published.items()}:
            raise RuntimeError("the prefix index and the published blocks differ")
        if any(len(content) != self.block_size for _, content in self._index):
            raise RuntimeError(f"a published block does not have {self.block_size} tokens")
        if self.states is not None:
            self.states.check_integrity(node for _, node in self._published.values())
