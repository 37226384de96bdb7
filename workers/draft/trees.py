"""The draft tokens of trees and blocks that are fed to the draft, and the masks of what they attend to."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from workers.attention.batch import Ints, TreeMask, TreeMasks


@dataclass
class FedTree:
    """The nodes of one row's tree, in the order in which they were fed to the draft."""

    _depths: list[int] = field(default_factory=list)
    _ancestors: list[int] = field(default_factory=list)  # bit j: node j is an ancestor, or the node itself

    def __len__(self) -> int:
        return len(self._depths)

    def add(self, parent: int) -> None:
        """Add a node below *parent*, -1 for the root."""
        node = len(self._depths)
        self._depths.append(0 if parent < 0 else self._depths[parent] + 1)
        self._ancestors.append(1 << node | (0 if parent < 0 else self._ancestors[parent]))

    def mask(self, first: int, num_before: int) -> TreeMask:
        """Return the mask of the nodes fed now, after *num_before* others; the tree begins at place *first*."""
        return TreeMask(first, [first + depth for depth in self._depths], self._ancestors[num_before:])


def block_masks(first_R: Ints, counts_R: Ints, lengths_R: Ints) -> TreeMasks | None:
    """Return the masks of blocks of `counts_R` tokens from place `first_R` on that attend to themselves in full.

    `lengths_R` is how many tokens of each row are fed, those before the block included.
    """
    masks = [
        TreeMask(first, range(first, first + size), [(1 << size) - 1] * size) if size else None
        for first, size in zip(first_R.tolist(), counts_R.tolist(), strict=True)
    ]
    return TreeMasks.of(masks, first_R + counts_R, lengths_R)


def add_level(trees: Seq[FedTree], row_N: Seq[int], parents_N: Seq[int]) -> list[int]:
    """Add a level's nodes to the trees of their rows; return how many nodes each tree had before."""
    before = [len(tree) for tree in trees]
    for row, parent in zip(row_N, parents_N, strict=True):
        trees[row].add(parent)
    return before


def level_masks(trees: Seq[FedTree], first_M: Ints, before_M: Ints, lengths_M: Ints) -> TreeMasks | None:
    """Return the masks of the newest level of each tree.

    Args:
        trees: of the rows that have nodes in the level.
        first_M: the place at which each tree begins.
        before_M: how many nodes each had before the level.
        lengths_M: how many nodes of it are in the level.
    """
    masks = [
        tree.mask(first, count) for tree, first, count in zip(trees, first_M.tolist(), before_M.tolist(), strict=True)
    ]
    return TreeMasks.of(masks, first_M + before_M + lengths_M, lengths_M)
