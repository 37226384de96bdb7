"""Where drafted tokens stand that are no chain: nodes of a tree that grows level by level, and blocks."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from workers.attention.batch import TreeMask


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

    def area(self, first: int, num_before: int) -> TreeMask:
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
