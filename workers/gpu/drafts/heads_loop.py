"""Heads without attention as programs: all levels of their chain or static tree, and the sampling between them.

What `proposers.shared.heads.HeadsProposer` drafts for each row, with shapes that depend on the captured size alone:
every row drafts the largest tree, and the nodes that it wants are kept at the end.
"""

from typing import NamedTuple

import numpy as np
import torch

from proposers.shared.static_tree import StaticTree, TreeLevel
from workers.gpu.choosing import choose
from workers.gpu.drafts.candidates import candidates_at
from workers.gpu.drafts.graphed_models import GraphedHeads
from workers.gpu.drafts.grown_tree import GrownNodes, write_best
from workers.gpu.inputs import RoundInputs
from workers.gpu.sizes import SamplerKind


class HeadsChain:
    """Drafts chains for rounds of one size. See `workers.gpu.drafts.chain_loop.DraftProgram`.

    Args:
        heads: the draft.
        inputs: of the size; the draft tokens are written into its `tokens_RQ`.
        most: the longest chain.
    """

    def __init__(self, heads: GraphedHeads, inputs: RoundInputs, most: int) -> None:
        self._heads, self._inputs = heads, inputs
        self._num_steps = min(most, inputs.size.queries - 1)

    def run(self, kind: SamplerKind) -> None:
        """Run the loop."""
        found, limits = self._inputs.on_device, self._inputs.limits(1)
        states_RS, ids_R = self._heads.begin(), found["tokens_RQ"][:, 0]
        for step in range(self._num_steps):
            states_RS, logits_RV = self._heads.predict(states_RS, ids_R, step)
            self._inputs.penalise_(logits_RV, step, 1)
            ids_R = choose(kind, logits_RV, found["keys_RQ"][:, step], limits).clamp_min(0)
            found["tokens_RQ"][:, step + 1].copy_(ids_R)


class _Level(NamedTuple):
    """`TreeLevel` on the device, int64: M nodes of P inputs, Q of which are inputs of the next level.

    Attributes:
        width: candidates of each input.
        num_inputs: P.
        picked_M: which of the P * width candidates each node has.
        next_Q: which nodes are the next inputs.
        sources_Q: the inputs that these are drafted from.
    """

    width: int
    num_inputs: int
    picked_M: torch.Tensor
    next_Q: torch.Tensor
    sources_Q: torch.Tensor

    @classmethod
    def of(cls, level: TreeLevel, num_inputs: int, device: torch.device) -> "_Level":
        picked_M = level.input_M * level.width + level.ranks_M
        arrays = (picked_M, level.next_inputs_P, level.input_M[level.next_inputs_P])
        return cls(level.width, num_inputs, *(torch.from_numpy(array).to(device) for array in arrays))


class HeadsTree:
    """Drafts static trees for rounds of one size. See `workers.gpu.drafts.chain_loop.DraftProgram`.

    Args:
        heads: the draft.
        inputs: of the size; the trees are written where the target reads them.
        tree: the largest; the size has room for all its nodes, or for the first of them.
    """

    def __init__(self, heads: GraphedHeads, inputs: RoundInputs, tree: StaticTree) -> None:
        self._heads, self._inputs = heads, inputs
        tree, device = tree.first(inputs.size.queries - 1), inputs.on_device["tokens_RQ"].device
        levels = tree.levels if heads.module.is_grounded else tree.flat_levels
        num_inputs = [1, *(len(level.next_inputs_P) for level in levels)]
        self._levels = [_Level.of(level, num, device) for level, num in zip(levels, num_inputs, strict=False)]
        drafted_J = np.array([node for level in levels for node in level.nodes])
        self._order_J = torch.from_numpy(np.argsort(drafted_J)).to(device)
        self._nodes_J = torch.arange(len(tree.choices), device=device)
        self._depths_J = torch.tensor([len(choice) for choice in tree.choices], device=device)
        self._parents_J = torch.tensor(tree.parents, device=device)

    def run(self, kind: SamplerKind) -> None:
        """Run the loop."""
        rows = self._inputs.size.rows
        states_NS, ids_N = self._heads.begin(), self._inputs.on_device["tokens_RQ"][:, 0]
        drafted: list[torch.Tensor] = []
        for depth, level in enumerate(self._levels):
            states_NS, logits_NV = self._heads.predict(states_NS, ids_N, depth)
            found_NW, _ = candidates_at(kind, logits_NV, self._inputs, depth, level.width)
            ids_RM = found_NW.view(rows, -1).index_select(1, level.picked_M)
            drafted.append(ids_RM)
            states_RPS = states_NS.view(rows, level.num_inputs, -1)
            states_NS = states_RPS.index_select(1, level.sources_Q).flatten(0, 1)
            ids_N = ids_RM.index_select(1, level.next_Q).flatten()
        self._write(torch.cat(drafted, 1).index_select(1, self._order_J))

    def _write(self, tokens_RJ: torch.Tensor) -> None:
        """Write the nodes that each row wants: its first ones, without those that are too deep."""
        found = self._inputs.on_device
        is_wanted_RJ = self._nodes_J < found["drafted_R"][:, None]
        is_wanted_RJ &= self._depths_J <= found["levels_R"][:, None]
        scores_RJ = torch.where(is_wanted_RJ, 0.0, -torch.inf)  # of equals, the first are the best
        parents_RJ, depths_RJ = (each_J.expand_as(tokens_RJ) for each_J in (self._parents_J, self._depths_J))
        write_best(self._inputs, GrownNodes(tokens_RJ, parents_RJ, scores_RJ, depths_RJ))
