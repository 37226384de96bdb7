"""Dynamic draft trees: EAGLE-2 (Li et al. 2024, arXiv 2406.16858).

A node's score is the sum of the log-probabilities on its path. The best nodes of each level are expanded: fed to the
draft, which gives their children. Finally, the best of all nodes are drafted. No child has a higher score than its
parent, so they form a tree. Many more nodes are fed than the tree has in the end; if the KV cache lacks room for them,
fewer are expanded at each level.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from protos.config.engine import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.draft_module import DraftRunner, Level

Ints = npt.NDArray[np.int64]
Predict = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""Maps states `[N, X]` of nodes, and their depth, to logits `[N, V]` and the features fed with their children `[N, Y]`.

Y is 0 if there are none.
"""
_DROPPED = -torch.inf


@dataclass
class TreeNodes:
    """All nodes in the order in which they were added: M in each of R rows. The parent -1 is the root."""

    tokens_RM: torch.Tensor
    parents_RM: torch.Tensor
    scores_RM: torch.Tensor

    def add(self, tokens_RN: torch.Tensor, parents_RN: torch.Tensor, scores_RN: torch.Tensor) -> None:
        """Append N nodes to each row."""
        self.tokens_RM = torch.cat([self.tokens_RM, tokens_RN], 1)
        self.parents_RM = torch.cat([self.parents_RM, parents_RN], 1)
        self.scores_RM = torch.cat([self.scores_RM, scores_RN], 1)

    def paths(self, row_N: torch.Tensor, nodes_N: torch.Tensor, depth: int) -> torch.Tensor:
        """Return the tokens on the path to nodes of a depth, their own included, int64 `[N, depth]`."""
        tokens = []
        for _ in range(depth):
            tokens.append(self.tokens_RM[row_N, nodes_N])
            nodes_N = self.parents_RM[row_N, nodes_N]
        return torch.stack(tokens[::-1], 1)

    def best(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Return the `k` best nodes of each row; among equal scores, those added first, which parents are."""
        order_RM = self.scores_RM.argsort(dim=1, descending=True, stable=True).tolist()
        finite_R = (self.scores_RM > _DROPPED).sum(1).tolist()
        tokens_RM, parents_RM = self.tokens_RM.tolist(), self.parents_RM.tolist()
        return [
            _draft(sorted(order_RM[r][: min(row.k, finite_R[r])]), tokens_RM[r], parents_RM[r])
            for r, row in enumerate(rows)
        ]


def _draft(kept: Seq[int], tokens_M: Seq[int], parents_M: Seq[int]) -> Draft:
    place = {node: i for i, node in enumerate(kept)} | {-1: -1}
    return Draft(tuple(tokens_M[node] for node in kept), tuple(place[parents_M[node]] for node in kept))


@dataclass(frozen=True)
class TreeShape:
    """The shape of dynamic trees: *width* nodes fed per level, *width* children of each, at most *depth* levels.

    Nodes whose own probability is below *threshold* (`assistant_confidence_threshold`) are not fed: no children.
    """

    width: int
    depth: int
    threshold: float = 0.0

    @classmethod
    def of(cls, config: SpeculativeConfig) -> "TreeShape":
        """Return the shape of *config*; for chains, width 1 and depth `num_speculative_tokens`."""
        threshold = config.assistant_confidence_threshold
        return cls(*config.tree_shape, threshold=threshold if isinstance(threshold, float) else 0.0)

    def depth_of(self, row: DraftRow) -> int:
        """Return the number of levels of a row's tree."""
        return min(self.depth, row.max_chain)

    def num_fed(self, depth_R: Ints, room_R: Ints) -> Ints:
        """Return how many nodes are fed per level: *width*, or fewer if all levels together have less room.

        Args:
            depth_R: levels of the tree of each row.
            room_R: see `DraftRow.room`.
        """
        num_fed_R: Ints = np.clip(room_R // np.maximum(1, depth_R - 1), 1, self.width)
        return num_fed_R


CHAINS = TreeShape(1, MAX_SPECULATIVE_TOKENS)


@dataclass
class BestNodes:
    """The W best nodes of a level in R rows, best first.

    Attributes:
        nodes_RW: indices into `TreeNodes`.
        parents_RW: their parents, as indices into the nodes of the row that were fed; -1 for the root.
        features_RWX: features to feed with them.
        own_RW: log-probability of each after its parent.
    """

    nodes_RW: torch.Tensor
    parents_RW: torch.Tensor
    features_RWX: torch.Tensor
    own_RW: torch.Tensor


class DynamicTree:
    """Drafts trees for the rows of one round.

    Args:
        runner: feeds nodes.
        rows: R of them.
        predict: gives logits and features of the module's states.
        shape: of the trees.
    """

    def __init__(self, runner: DraftRunner, rows: Seq[DraftRow], predict: Predict, shape: TreeShape) -> None:
        self._runner, self._rows, self._predict, self._shape = runner, rows, predict, shape

    def draft(self, states_RX: torch.Tensor) -> list[Draft]:
        """Return a tree of the best `row.k` nodes of each row, given the states after its newest known token.

        Rows stop separately, at levels without confident nodes. That shape depends on the tokens, which the rule
        "coupled" allows.
        """
        depth_R = np.array([self._shape.depth_of(row) for row in self._rows])
        num_fed_R = self._shape.num_fed(depth_R, np.array([row.room for row in self._rows]))
        best = self._first_level(states_RX)
        fed_R = torch.zeros_like(self._row_R)
        for level in range(1, depth_R.max()):
            limits_R = torch.from_numpy(np.where(level < depth_R, num_fed_R, 0)).to(fed_R.device)
            is_fed_RW = self._rank_W < limits_R[:, None]
            is_fed_RW &= self._nodes.scores_RM.gather(1, best.nodes_RW) > _DROPPED
            if self._shape.threshold:
                is_fed_RW &= best.own_RW.exp() >= self._shape.threshold
                if not is_fed_RW.any():
                    break
            best = self._expand(best, is_fed_RW, fed_R, level)
            fed_R = fed_R + is_fed_RW.sum(1)
        return self._nodes.best(self._rows)

    def _first_level(self, states_RX: torch.Tensor) -> BestNodes:
        """Add the children of the roots and return them, best first."""
        self._row_R = torch.arange(len(self._rows), device=states_RX.device)
        logits_RV, features_RX = self._predict(states_RX, 0)
        self._width = min(self._shape.width, logits_RV.shape[1])
        self._rank_W = torch.arange(self._width, device=states_RX.device)
        tokens_RW, scores_RW = self._runner.candidates(self._rows, self._row_R, logits_RV, 0, self._width)
        root_RW = torch.full_like(tokens_RW, -1)
        self._nodes = TreeNodes(tokens_RW, root_RW, scores_RW)
        best_RW = scores_RW.argsort(dim=1, descending=True, stable=True)
        features_RWX = features_RX[:, None].expand(-1, self._width, -1)
        return BestNodes(best_RW, root_RW, features_RWX, scores_RW.gather(1, best_RW))

    def _expand(self, best: BestNodes, is_fed_RW: torch.Tensor, fed_R: torch.Tensor, level: int) -> BestNodes:
        """Feed some of the best nodes, add W children of each, and return the best of all children."""
        row_N = self._row_R[:, None].expand_as(is_fed_RW)[is_fed_RW]
        tokens_N = self._nodes.tokens_RM.gather(1, best.nodes_RW)[is_fed_RW]
        features_NX = best.features_RWX[is_fed_RW] if best.features_RWX.shape[2] else None
        fed = Level(row_N, tokens_N, best.parents_RW[is_fed_RW], features_NX)
        logits_NV, next_NX = self._predict(self._runner.grow(self._rows, fed), level)
        tokens_NW, scores_NW = self._runner.candidates(
            self._rows,
            row_N,
            logits_NV,
            level,
            self._width,
            paths=lambda: self._nodes.paths(row_N, best.nodes_RW[is_fed_RW], level),
        )
        path_N = self._nodes.scores_RM.gather(1, best.nodes_RW)[is_fed_RW]
        tokens_RWW = _spread(is_fed_RW, tokens_NW, 0)
        scores_RC = _spread(is_fed_RW, scores_NW + path_N[:, None], _DROPPED).flatten(1)
        first = self._nodes.tokens_RM.shape[1]
        self._nodes.add(tokens_RWW.flatten(1), best.nodes_RW.repeat_interleave(self._width, 1), scores_RC)
        best_RW = scores_RC.argsort(dim=1, descending=True, stable=True)[:, : self._width]
        parent_RW = best_RW // self._width  # index into *best*
        place_RW = fed_R[:, None] + is_fed_RW.cumsum(1) - 1
        features_RWX = _spread(is_fed_RW, next_NX, 0)[self._row_R[:, None], parent_RW]
        own_RW = _spread(is_fed_RW, scores_NW, _DROPPED).flatten(1).gather(1, best_RW)
        return BestNodes(best_RW + first, place_RW.gather(1, parent_RW), features_RWX, own_RW)


def _spread(is_fed_RW: torch.Tensor, values_NX: torch.Tensor, filler: float) -> torch.Tensor:
    """Return `[R, W, X]`: the values of the nodes that were fed at their places, *filler* elsewhere."""
    spread_RWX = values_NX.new_full((*is_fed_RW.shape, values_NX.shape[1]), filler)
    spread_RWX[is_fed_RW] = values_NX
    return spread_RWX
