"""Draft trees grown level by level while guesses are confident: EAGLE-2 (Li et al. 2024, arXiv 2406.16858).

A node's score is the sum of log-probabilities on the way to it. Of each level the best few are fed and get children; of
all nodes ever made the best are drafted. No child scores above its parent, so what is drafted is a tree. The nodes fed
are as many as the draft may have nodes, since that is what the cache has room for: small trees are narrow.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from protos.config.engine import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.draft_module import DraftRunner, Level

Behind = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""From states `[N, X]` behind nodes of a depth to logits `[N, V]` and what is fed beside their children `[N, Y]`.

Y is 0 where nothing is.
"""
_DROPPED = -torch.inf

USUAL_WIDTH, USUAL_DEPTH = 4, 6
"""Of a tree where nothing is said. EAGLE-2 was measured with 10 and 5 to 7, for trees of 60 nodes."""


@dataclass
class Nodes:
    """All nodes ever made, in the order in which they were: M a row for R rows. A parent of -1 is the root."""

    tokens_RM: torch.Tensor
    parents_RM: torch.Tensor
    scores_RM: torch.Tensor

    def add(self, tokens_RN: torch.Tensor, parents_RN: torch.Tensor, scores_RN: torch.Tensor) -> None:
        """Append N nodes a row."""
        self.tokens_RM = torch.cat([self.tokens_RM, tokens_RN], 1)
        self.parents_RM = torch.cat([self.parents_RM, parents_RN], 1)
        self.scores_RM = torch.cat([self.scores_RM, scores_RN], 1)

    def paths(self, row_N: torch.Tensor, nodes_N: torch.Tensor, depth: int) -> torch.Tensor:
        """Return the tokens that lead to nodes of a depth, their own included, int64 `[N, depth]`."""
        tokens = []
        for _ in range(depth):
            tokens.append(self.tokens_RM[row_N, nodes_N])
            nodes_N = self.parents_RM[row_N, nodes_N]
        return torch.stack(tokens[::-1], 1)

    def best(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Return for each row its `k` best nodes; among equals those made first, which parents are."""
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
    """How trees grow: *width* children behind each node that is fed, on at most *depth* levels."""

    width: int
    depth: int

    @classmethod
    def of(cls, config: SpeculativeConfig) -> "TreeShape":
        """Return the shape that *config* asks for; without branches, a chain of all tokens."""
        width = config.eagle_topk
        if config.draft_shape == "tree" and width == 1:
            width = USUAL_WIDTH
        if config.draft_shape == "chain" or width == 1:
            return cls(1, config.num_speculative_tokens)
        return cls(width, config.num_steps or USUAL_DEPTH)

    def depth_of(self, k: int) -> int:
        """Return the levels of a tree of k nodes."""
        return min(self.depth, k)

    def beams_of(self, k: int) -> int:
        """Return how many nodes of a level are fed: at most *width*, and k of all levels together."""
        return max(1, min(self.width, k // max(1, self.depth_of(k) - 1)))


CHAINS = TreeShape(1, MAX_SPECULATIVE_TOKENS)


@dataclass
class Beams:
    """The W best nodes of a level in R rows, best first.

    Attributes:
        nodes_RW: which they are.
        above_RW: their parents, counted among the nodes of their row that were fed; -1 for the root.
        features_RWX: what is fed beside them.
    """

    nodes_RW: torch.Tensor
    above_RW: torch.Tensor
    features_RWX: torch.Tensor


class Tree:
    """Grows trees for the rows of one round.

    Args:
        runner: feeds nodes.
        rows: R of them.
        behind: what the module's states say.
        shape: of the trees.
    """

    def __init__(self, runner: DraftRunner, rows: Seq[DraftRow], behind: Behind, shape: TreeShape) -> None:
        self._runner, self._rows, self._behind, self._shape = runner, rows, behind, shape

    def grow(self, states_RX: torch.Tensor) -> list[Draft]:
        """Return the best `row.k` nodes below the states behind each row's newest known token."""
        depth_R = [self._shape.depth_of(row.k) for row in self._rows]
        beams = self._begin(states_RX)
        fed_R = torch.zeros_like(self._row_R)
        for level in range(1, max(depth_R)):
            limits = [
                self._shape.beams_of(row.k) if level < depth else 0
                for row, depth in zip(self._rows, depth_R, strict=True)
            ]
            is_fed_RW = self._rank_W < torch.tensor(limits, device=fed_R.device)[:, None]
            is_fed_RW &= self._nodes.scores_RM.gather(1, beams.nodes_RW) > _DROPPED
            beams = self._go_on(beams, is_fed_RW, fed_R, level)
            fed_R = fed_R + is_fed_RW.sum(1)
        return self._nodes.best(self._rows)

    def _begin(self, states_RX: torch.Tensor) -> Beams:
        """Make the children of the roots."""
        self._row_R = torch.arange(len(self._rows), device=states_RX.device)
        logits_RV, features_RX = self._behind(states_RX, 0)
        self._width = min(self._shape.width, logits_RV.shape[1])
        self._rank_W = torch.arange(self._width, device=states_RX.device)
        tokens_RW, scores_RW = self._runner.candidates(self._rows, self._row_R, logits_RV, 0, self._width)
        root_RW = torch.full_like(tokens_RW, -1)
        self._nodes = Nodes(tokens_RW, root_RW, scores_RW)
        best_RW = scores_RW.argsort(dim=1, descending=True, stable=True)
        return Beams(best_RW, root_RW, features_RX[:, None].expand(-1, self._width, -1))

    def _go_on(self, beams: Beams, is_fed_RW: torch.Tensor, fed_R: torch.Tensor, level: int) -> Beams:
        """Feed some of the beams; make W children of each; return the best of all children."""
        row_N = self._row_R[:, None].expand_as(is_fed_RW)[is_fed_RW]
        tokens_N = self._nodes.tokens_RM.gather(1, beams.nodes_RW)[is_fed_RW]
        features_NX = beams.features_RWX[is_fed_RW] if beams.features_RWX.shape[2] else None
        fed = Level(row_N, tokens_N, beams.above_RW[is_fed_RW], features_NX)
        logits_NV, made_NX = self._behind(self._runner.grow(self._rows, fed), level)
        tokens_NW, scores_NW = self._runner.candidates(
            self._rows,
            row_N,
            logits_NV,
            level,
            self._width,
            paths=lambda: self._nodes.paths(row_N, beams.nodes_RW[is_fed_RW], level),
        )
        own_N = self._nodes.scores_RM.gather(1, beams.nodes_RW)[is_fed_RW]
        tokens_RWW = _spread(is_fed_RW, tokens_NW, 0)
        scores_RC = _spread(is_fed_RW, scores_NW + own_N[:, None], _DROPPED).flatten(1)
        first = self._nodes.tokens_RM.shape[1]
        self._nodes.add(tokens_RWW.flatten(1), beams.nodes_RW.repeat_interleave(self._width, 1), scores_RC)
        best_RW = scores_RC.argsort(dim=1, descending=True, stable=True)[:, : self._width]
        parent_RW = best_RW // self._width  # a place among the beams
        place_RW = fed_R[:, None] + is_fed_RW.cumsum(1) - 1
        features_RWX = _spread(is_fed_RW, made_NX, 0)[self._row_R[:, None], parent_RW]
        return Beams(best_RW + first, place_RW.gather(1, parent_RW), features_RWX)


def _spread(is_fed_RW: torch.Tensor, values_NX: torch.Tensor, filler: float) -> torch.Tensor:
    """Return the values of the nodes that were fed where those stand, `[R, W, X]`, and *filler* elsewhere."""
    spread_RWX = values_NX.new_full((*is_fed_RW.shape, values_NX.shape[1]), filler)
    spread_RWX[is_fed_RW] = values_NX
    return spread_RWX
