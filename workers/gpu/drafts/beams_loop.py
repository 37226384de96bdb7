"""ReDrafter's beam search as a program: all its steps, and the choice of the best nodes.

What `proposers.recurrent.RecurrentBeams` drafts, with shapes that depend on the captured size alone: the beams of every
row are extended to their full length, and nodes below the levels that the row wants are left out.
"""

from typing import NamedTuple

import torch

from proposers.shared.dynamic_tree import TreeShape
from workers.gpu.drafts.candidates import candidates_at
from workers.gpu.drafts.graphed_models import GraphedHeads
from workers.gpu.drafts.grown_tree import GrownNodes, write_best
from workers.gpu.inputs import RoundInputs
from workers.gpu.sizes import SamplerKind


class _Beams(NamedTuple):
    """The W beams of each of R rows, best first.

    Attributes:
        states_NS: of R * W beams.
        tokens_RW: the last token of each.
        scores_RW: float32, sums of log-probabilities.
        places_RW: of their last tokens among all nodes; -1 for the root.
    """

    states_NS: torch.Tensor
    tokens_RW: torch.Tensor
    scores_RW: torch.Tensor
    places_RW: torch.Tensor


class BeamsLoop:
    """Drafts by beam search for rounds of one size. See `workers.gpu.drafts.chain_loop.DraftProgram`.

    Args:
        heads: the draft.
        inputs: of the size; the trees are written where the target reads them.
        shape: number and length of the beams.
    """

    def __init__(self, heads: GraphedHeads, inputs: RoundInputs, shape: TreeShape) -> None:
        self._heads, self._inputs, self._width = heads, inputs, shape.width
        self._num_steps = min(shape.depth, inputs.size.queries - 1)

    def run(self, kind: SamplerKind) -> None:
        """Run the loop."""
        tokens_RW = self._inputs.on_device["tokens_RQ"][:, :1]
        beams = _Beams(
            self._heads.begin(),
            tokens_RW,
            torch.zeros_like(tokens_RW, dtype=torch.float32),
            torch.full_like(tokens_RW, -1),
        )
        none_RM = tokens_RW[:, :0]
        nodes = GrownNodes(none_RM, none_RM, beams.scores_RW[:, :0], none_RM)
        for depth in range(self._num_steps):
            nodes, beams = self._extend(kind, nodes, beams, depth)
        write_best(self._inputs, nodes)

    def _extend(self, kind: SamplerKind, nodes: GrownNodes, beams: _Beams, depth: int) -> tuple[GrownNodes, _Beams]:
        """Extend each beam by its best tokens; return all nodes, and the best beams."""
        rows, width = beams.tokens_RW.shape
        states_NS, logits_NV = self._heads.predict(beams.states_NS, beams.tokens_RW.reshape(-1), depth)
        most = min(self._width, logits_NV.shape[1])
        tokens_NC, own_NC = candidates_at(kind, logits_NV, self._inputs, depth, most)
        before_RW1 = beams.scores_RW[:, :, None]
        all_RWC = torch.minimum(before_RW1 + own_NC.view(rows, width, most), before_RW1)  # not above them by rounding
        scores_RW, best_RW = all_RWC.flatten(1).topk(min(self._width, width * most), 1)
        sources_RW = best_RW // most
        tokens_RW = tokens_NC.view(rows, -1).gather(1, best_RW)
        first_R1 = torch.arange(0, rows * width, width, device=best_RW.device)[:, None]
        states_NS = states_NS.index_select(0, (first_R1 + sources_RW).view(-1))
        is_too_deep_R1 = self._inputs.on_device["levels_R"][:, None] <= depth
        added = GrownNodes(
            tokens_RW,
            beams.places_RW.gather(1, sources_RW),
            scores_RW.masked_fill(is_too_deep_R1, -torch.inf),
            torch.full_like(tokens_RW, depth + 1),
        )
        first, count = nodes.tokens_RM.shape[1], tokens_RW.shape[1]
        places_RW = torch.arange(first, first + count, device=best_RW.device).expand_as(best_RW)
        return nodes.with_more(added), _Beams(states_NS, tokens_RW, scores_RW, places_RW)
