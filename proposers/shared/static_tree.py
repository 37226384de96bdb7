"""Trees whose shape is settled before anything is guessed: which ranks of guesses are tried behind which node.

A choice is a path of ranks: `(0, 2)` is the third-best guess behind the best one. Medusa writes its trees so, and so
does the key `speculative_token_tree`.
"""

import heapq
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from protos.draft import Draft
from protos.errors import ConfigError

Choice = tuple[int, ...]
Ints = npt.NDArray[np.int64]

FIRST_RATE = 0.6
"""How often the best guess is taken to be right; the one of rank r 1 / (r + 1)^2 as often, the first three 82 %."""


def rate(choice: Choice, decay: float) -> float:
    """Return how often all of *choice* is taken to be right, when guesses get worse by *decay* with each level."""
    found = 1.0
    for depth, rank in enumerate(choice):
        found *= FIRST_RATE * decay**depth / (rank + 1) ** 2
    return found


@dataclass(frozen=True)
class TreeLevel:
    """The M nodes of one depth, and how they come about.

    Attributes:
        nodes: their indices in the tree.
        froms_M: behind which of the points of this level each is guessed.
        ranks_M: which of the guesses made there each is.
        width: guesses needed at a point.
        points_P: the nodes that are points of the next level, counted within this one.
    """

    nodes: tuple[int, ...]
    froms_M: Ints
    ranks_M: Ints
    width: int
    points_P: Ints


@dataclass(frozen=True)
class StaticTree:
    """Choices, parents before children and the most promising first: its first k nodes are a tree, too."""

    choices: tuple[Choice, ...]

    @classmethod
    def of(cls, choices: Iterable[Choice], max_depth: int, decay: float) -> "StaticTree":
        """Return the tree of *choices*; those deeper than *max_depth* are left out.

        Raises:
            ConfigError: a choice is not behind another one.
        """
        kept = {tuple(choice) for choice in choices if len(choice) <= max_depth}
        for choice in sorted(kept):
            if len(choice) > 1 and choice[:-1] not in kept:
                raise ConfigError(f"the tree has {choice}, but not {choice[:-1]}, which it would hang on")
        return cls(tuple(sorted(kept, key=lambda choice: (-rate(choice, decay), choice))))

    @classmethod
    def best(cls, num_nodes: int, max_depth: int, decay: float) -> "StaticTree":
        """Return the tree of *num_nodes* choices that are right most often."""
        promising = _promising(max_depth, decay)
        return cls(tuple(next(promising) for _ in range(num_nodes)))

    @classmethod
    def chain(cls, length: int) -> "StaticTree":
        """Return the tree without branches."""
        return cls(tuple((0,) * depth for depth in range(1, length + 1)))

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """The parent of each node, -1 for the root."""
        place = {choice: node for node, choice in enumerate(self.choices)} | {(): -1}
        return tuple(place[choice[:-1]] for choice in self.choices)

    @cached_property
    def is_chain(self) -> bool:
        """Whether each node follows the one before."""
        return self.parents == tuple(range(-1, len(self.choices) - 1))

    @cached_property
    def depth(self) -> int:
        """Number of levels."""
        return max(map(len, self.choices), default=0)

    @cached_property
    def levels(self) -> tuple[TreeLevel, ...]:
        """The nodes by depth, guessed behind the nodes that they follow; the first level's one point is the root."""
        found, points = [], [-1]
        for nodes in self._by_depth():
            froms = [points.index(self.parents[node]) for node in nodes]
            points = [node for node in nodes if node in self.parents]
            found.append(self._level(nodes, froms, [nodes.index(node) for node in points]))
        return tuple(found)

    @cached_property
    def flat_levels(self) -> tuple[TreeLevel, ...]:
        """The nodes by depth where guesses do not depend on those before them: each level has one point."""
        return tuple(self._level(nodes, [0] * len(nodes), [0]) for nodes in self._by_depth())

    def _by_depth(self) -> list[list[int]]:
        return [
            [node for node, choice in enumerate(self.choices) if len(choice) == depth]
            for depth in range(1, self.depth + 1)
        ]

    def _level(self, nodes: list[int], froms: list[int], points: list[int]) -> TreeLevel:
        ranks = [self.choices[node][-1] for node in nodes]
        return TreeLevel(tuple(nodes), np.array(froms), np.array(ranks), max(ranks) + 1, np.array(points, np.int64))

    def first(self, count: int) -> "StaticTree":
        """Return the tree of the first *count* nodes, always the same object."""
        return self if count >= len(self.choices) else self._smaller(count)

    @lru_cache(maxsize=128)  # noqa: B019 - trees are few and live as long as their proposer
    def _smaller(self, count: int) -> "StaticTree":
        return StaticTree(self.choices[:count])

    def draft(self, tokens: Seq[int]) -> Draft:
        """Return the draft whose nodes these are: one token a node."""
        return Draft(tuple(tokens)) if self.is_chain else Draft(tuple(tokens), self.parents)


def _promising(max_depth: int, decay: float) -> Iterator[Choice]:
    """Yield choices, the most promising first. A choice comes before its children and its worse siblings."""
    frontier: list[tuple[float, Choice]] = [(0.0, (0,))]
    while True:
        _, choice = heapq.heappop(frontier)
        yield choice
        after = [(*choice[:-1], choice[-1] + 1)]
        if len(choice) < max_depth:
            after.append((*choice, 0))
        for found in after:
            heapq.heappush(frontier, (-rate(found, decay), found))
