"""Draft trees grown level by level while guesses are confident: EAGLE-2 (Li et al. 2024, arXiv 2406.16858).

A node's score is the sum of log-probabilities on the way to it. Of each level the best few are fed and get children; of
all nodes ever made the best are drafted. No child scores above its parent, so what is drafted is a tree.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from protos.interfaces import DraftRow
from protos.learned import DraftRunner, Level
from protos.messages import Draft

Behind = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""From states `[N, X]` behind nodes of a depth to logits `[N, V]` and what is fed beside their children `[N, Y]`."""
_DROPPED = -torch.inf


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


@dataclass
class Tree:
    """Grows trees for the rows of one round, W nodes a level and row.

    Attributes:
        runner: feeds nodes.
        rows: R of them.
        behind: what the module's states say.
        width: W, children of a node and nodes fed of a level.
    """

    runner: DraftRunner
    rows: Seq[DraftRow]
    behind: Behind
    width: int
    nodes: Nodes = field(init=False)

    def grow(self, states_RX: torch.Tensor, depth: int) -> list[Draft]:
        """Return the best `row.k` nodes of *depth* levels below the states behind each row's newest known token."""
        row_R = torch.arange(len(self.rows), device=states_RX.device)
        logits_RV, features_RX = self.behind(states_RX, 0)
        self.width = min(self.width, logits_RV.shape[1])
        tokens_RW, scores_RW = self.runner.candidates(self.rows, row_R, logits_RV, 0, self.width)
        self.nodes = Nodes(tokens_RW, torch.full_like(tokens_RW, -1), scores_RW)
        beams_RW = torch.arange(self.width, device=states_RX.device).expand_as(tokens_RW)
        parents_RW = torch.full_like(tokens_RW, -1)  # counted among the nodes fed
        features_NX = features_RX.repeat_interleave(self.width, 0)
        for level in range(1, depth):
            states_NX = self._feed(beams_RW, parents_RW, features_NX)
            beams_RW, within_RW, features_NX = self._widen(beams_RW, states_NX, level)
            parents_RW = within_RW + (level - 1) * self.width
        return self.nodes.best(self.rows)

    def _feed(self, beams_RW: torch.Tensor, parents_RW: torch.Tensor, features_NX: torch.Tensor) -> torch.Tensor:
        row_N = torch.arange(len(self.rows), device=beams_RW.device).repeat_interleave(self.width)
        tokens_N = self.nodes.tokens_RM.gather(1, beams_RW).flatten()
        return self.runner.grow(self.rows, Level(row_N, tokens_N, parents_RW.flatten(), features_NX))

    def _widen(self, beams_RW: torch.Tensor, states_NX: torch.Tensor,
               level: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Make W children of each node just fed; return the best W of all, whose children they are, and features."""
        rows, width = beams_RW.shape
        logits_NV, features_NX = self.behind(states_NX, level)
        row_N = torch.arange(rows, device=beams_RW.device).repeat_interleave(width)
        tokens_NW, scores_NW = self.runner.candidates(self.rows, row_N, logits_NV, level, width)
        above_RW1 = self.nodes.scores_RM.gather(1, beams_RW).unsqueeze(-1)
        scores_RN = (scores_NW.view(rows, width, width) + above_RW1).flatten(1)
        first = self.nodes.tokens_RM.shape[1]
        self.nodes.add(tokens_NW.view(rows, -1), beams_RW.repeat_interleave(width, 1), scores_RN)
        best_RW = scores_RN.argsort(dim=1, descending=True, stable=True)[:, :width]
        within_RW = best_RW // width
        fed_N = (within_RW + torch.arange(rows, device=best_RW.device)[:, None] * width).flatten()
        return best_RW + first, within_RW, features_NX[fed_N]
