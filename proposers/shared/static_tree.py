"""Static draft trees: their shape is fixed in advance, by the ranks of the tokens on each path.

A choice is a path of ranks: `(0, 2)` is the third-best token after the best one. This is the notation of Medusa and of
the key `speculative_token_tree`.
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
"""Assumed acceptance rate of the best token; that of rank r is 1 / (r + 1)^2 of it (the first three: 82 %)."""


def rate(choice: Choice, decay: float) -> float:
    """Return the assumed rate at which all of *choice* is accepted; it decays by the factor *decay* per level."""
    found = 1.0
    for depth, rank in enumerate(choice):
        found *= FIRST_RATE * decay**depth / (rank + 1) ** 2
    return found


@dataclass(frozen=True)
class TreeLevel:
    """The M nodes of one depth. They are drafted from P inputs, nodes of the level before (or the root).

    Attributes:
        nodes: their indices in the tree.
        input_M: index of the input from which each node is drafted.
        ranks_M: rank of each node's token among the candidates of its input.
        width: candidates needed per input.
        next_inputs_P: indices, within this level, of the nodes that are inputs of the next one.
    """

    nodes: tuple[int, ...]
    input_M: Ints
    ranks_M: Ints
    width: int
    next_inputs_P: Ints


@dataclass(frozen=True)
class StaticTree:
    """Choices, parents before children and by descending rate: the first k nodes are a tree, too."""

    choices: tuple[Choice, ...]

    @classmethod
    def of(cls, choices: Iterable[Choice], max_depth: int, decay: float) -> "StaticTree":
        """Return the tree of *choices*; those deeper than *max_depth* are left out.

        Raises:
            ConfigError: the parent of a choice is missing.
        """
        kept = {tuple(choice) for choice in choices if len(choice) <= max_depth}
        for choice in sorted(kept):
            if len(choice) > 1 and choice[:-1] not in kept:
                raise ConfigError(f"the tree has {choice}, but not its parent {choice[:-1]}")
        return cls(tuple(sorted(kept, key=lambda choice: (-rate(choice, decay), choice))))

    @classmethod
    def best(cls, num_nodes: int, max_depth: int, decay: float) -> "StaticTree":
        """Return the tree of the *num_nodes* choices with the highest rates."""
        choices = _by_rate(max_depth, decay)
        return cls(tuple(next(choices) for _ in range(num_nodes)))

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
        """The nodes by depth, each drafted from its parent; the only input of the first level is the root."""
        found, inputs = [], [-1]
        for nodes in self._by_depth():
            sources = [inputs.index(self.parents[node]) for node in nodes]
            inputs = [node for node in nodes if node in self.parents]
            found.append(self._level(nodes, sources, [nodes.index(node) for node in inputs]))
        return tuple(found)

    @cached_property
    def flat_levels(self) -> tuple[TreeLevel, ...]:
        """The nodes by depth for heads that do not read draft tokens: each level has one input."""
        return tuple(self._level(nodes, [0] * len(nodes), [0]) for nodes in self._by_depth())

    def _by_depth(self) -> list[list[int]]:
        return [
            [node for node, choice in enumerate(self.choices) if len(choice) == depth]
            for depth in range(1, self.depth + 1)
        ]

    def _level(self, nodes: list[int], sources: list[int], inputs: list[int]) -> TreeLevel:
        ranks = [self.choices[node][-1] for node in nodes]
        return TreeLevel(tuple(nodes), np.array(sources), np.array(ranks), max(ranks) + 1, np.array(inputs, np.int64))

    def first(self, count: int) -> "StaticTree":
        """Return the tree of the first *count* nodes, always the same object."""
        return self if count >= len(self.choices) else self._smaller(count)

    @lru_cache(maxsize=128)  # noqa: B019 - trees are few and live as long as their proposer
    def _smaller(self, count: int) -> "StaticTree":
        return StaticTree(self.choices[:count])

    def draft(self, tokens: Seq[int]) -> Draft:
        """Return the draft with these tokens, one per node."""
        return Draft(tuple(tokens)) if self.is_chain else Draft(tuple(tokens), self.parents)


def _by_rate(max_depth: int, decay: float) -> Iterator[Choice]:
    """Yield choices by descending rate. A choice comes before its children and its lower-ranked siblings."""
    frontier: list[tuple[float, Choice]] = [(0.0, (0,))]
    while True:
        _, choice = heapq.heappop(frontier)
        yield choice
        after = [(*choice[:-1], choice[-1] + 1)]
        if len(choice) < max_depth:
            after.append((*choice, 0))
        for found in after:
            heapq.heappush(frontier, (-rate(found, decay), found))
