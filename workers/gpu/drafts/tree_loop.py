"""Dynamic draft trees (EAGLE-2) as a program: all levels, their candidates, and the choice of the best nodes.

It computes what `proposers.shared.dynamic_tree.DynamicTree` does, with shapes that depend on the captured size alone:
every level has room for W nodes of each row, and those that are not fed are padding with the score -inf. Nothing is
read on the host between levels.
"""

from typing import NamedTuple

import torch

from proposers.shared.dynamic_tree import TreeShape
from workers.attention.batch import WORD
from workers.gpu.drafts.candidates import candidates_at
from workers.gpu.drafts.draft_steps import DraftSteps, GrownLevel
from workers.gpu.drafts.grown_tree import GrownNodes, write_best
from workers.gpu.drafts.protocol import GraphedModel, Prediction
from workers.gpu.inputs import RoundInputs
from workers.gpu.sizes import SamplerKind


class _Best(NamedTuple):
    """The W best nodes of a level in each row, best first.

    Attributes:
        nodes_RW: indices into `GrownNodes`.
        scores_RW: sums of log-probabilities on their paths; -inf where there is no node, or none is fed.
        own_RW: log-probability of each after its parent.
        features_RWX: to feed with them; None if there are none.
        words_RWX: int64, bits: which of the nodes fed so far are their ancestors.
    """

    nodes_RW: torch.Tensor
    scores_RW: torch.Tensor
    own_RW: torch.Tensor
    features_RWX: torch.Tensor | None
    words_RWX: torch.Tensor

    def at(self, order_RW: torch.Tensor) -> "_Best":
        """Return the nodes in another order."""
        features_RWX = None if self.features_RWX is None else _gathered(self.features_RWX, order_RW)
        nodes_RW, scores_RW, own_RW = (
            each.gather(1, order_RW) for each in (self.nodes_RW, self.scores_RW, self.own_RW)
        )
        return _Best(nodes_RW, scores_RW, own_RW, features_RWX, _gathered(self.words_RWX, order_RW))


class TreeLoop:
    """Drafts trees for rounds of one size. See `workers.gpu.drafts.chain_loop.DraftProgram`.

    Args:
        model: the draft.
        inputs: of the size; the trees are written where the target reads them.
        shape: of the trees.
        vocab_size: of the target.
    """

    def __init__(self, model: GraphedModel, inputs: RoundInputs, shape: TreeShape, vocab_size: int) -> None:
        self._model, self._inputs, self._steps = model, inputs, DraftSteps(model, inputs)
        self._width, self._threshold = min(shape.width, vocab_size), shape.threshold
        self._levels = min(shape.depth, inputs.size.queries - 1)
        self._num_fed = self._width * (self._levels - 1)

    def run(self, kind: SamplerKind) -> None:
        """Run the loop."""
        nodes, best = self._first_level(kind)
        before_R = torch.zeros_like(self._inputs.on_device["levels_R"])
        depths_RA = before_R.new_zeros(len(before_R), max(1, self._num_fed), dtype=torch.int64)
        for level in range(1, self._levels):
            best, is_fed_RW = self._fed(best, level)
            best = best._replace(words_RWX=self._with_own_bits(best.words_RWX, before_R))
            self._note_depths(depths_RA, before_R, level)
            counts_R = is_fed_RW.sum(1, dtype=torch.int32)
            best = best._replace(scores_RW=torch.where(is_fed_RW, best.scores_RW, -torch.inf))
            tokens_RW = nodes.tokens_RM.gather(1, best.nodes_RW)
            grown = GrownLevel(level, tokens_RW, best.features_RWX, before_R, counts_R, best.words_RWX, depths_RA)
            prediction = self._model.predict(self._steps.grow(grown), level)
            nodes, best = self._expand(kind, nodes, best, prediction, level)
            before_R = before_R + counts_R
        write_best(self._inputs, nodes)

    def _first_level(self, kind: SamplerKind) -> tuple[GrownNodes, _Best]:
        """Return the children of the roots, and the best of them."""
        logits_RV, features_RX = self._model.predict(self._steps.catch_up(), 0)
        tokens_RW, scores_RW = self._candidates(kind, logits_RV, 0)
        nodes = GrownNodes(tokens_RW, torch.full_like(tokens_RW, -1), scores_RW, torch.ones_like(tokens_RW))
        order_RW = scores_RW.argsort(dim=1, descending=True, stable=True)
        features_RWX = None if features_RX is None else features_RX[:, None].expand(-1, self._width, -1)
        words_RWX = tokens_RW.new_zeros(*tokens_RW.shape, max(1, -(-self._num_fed // WORD)))
        scores_RW = scores_RW.gather(1, order_RW)
        return nodes, _Best(order_RW, scores_RW, scores_RW, features_RWX, words_RWX)

    def _fed(self, best: _Best, level: int) -> tuple[_Best, torch.Tensor]:
        """Return the nodes with those first that are fed at *level*, and which they are, `[R, W]`."""
        found = self._inputs.on_device
        limits_R = torch.where(found["levels_R"] > level, found["widths_R"], 0)
        ranks_W = torch.arange(self._width, device=limits_R.device)
        is_fed_RW = (ranks_W < limits_R[:, None]) & (best.scores_RW > -torch.inf)
        if not self._threshold:
            return best, is_fed_RW
        is_fed_RW &= best.own_RW.exp() >= self._threshold
        order_RW = is_fed_RW.int().argsort(dim=1, descending=True, stable=True)
        return best.at(order_RW), is_fed_RW.gather(1, order_RW)

    def _expand(
        self, kind: SamplerKind, nodes: GrownNodes, best: _Best, prediction: Prediction, level: int
    ) -> tuple[GrownNodes, _Best]:
        """Return all nodes with the children of the nodes of *level*, and the best of these children."""
        logits_NV, features_NX = prediction
        rows, width = best.nodes_RW.shape
        tokens_NW, own_NW = self._candidates(kind, logits_NV, level)
        own_RWW = own_NW.view(rows, width, width)
        scores_RW1 = best.scores_RW[:, :, None]
        scores_RC = torch.minimum(scores_RW1 + own_RWW, scores_RW1).flatten(1)  # not above the parents' by rounding
        first = nodes.tokens_RM.shape[1]
        tokens_RC = tokens_NW.view(rows, -1)
        parents_RC = best.nodes_RW[:, :, None].expand(-1, -1, width).flatten(1)
        nodes = nodes.with_more(GrownNodes(tokens_RC, parents_RC, scores_RC, torch.full_like(tokens_RC, level + 1)))
        order_RW = scores_RC.argsort(dim=1, descending=True, stable=True)[:, :width]
        parent_RW = order_RW // width
        children = _Best(
            order_RW + first,
            scores_RC.gather(1, order_RW),
            own_RWW.flatten(1).gather(1, order_RW),
            None if features_NX is None else _gathered(features_NX.view(rows, width, -1), parent_RW),
            _gathered(best.words_RWX, parent_RW),
        )
        return nodes, children

    def _candidates(self, kind: SamplerKind, logits_NV: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        return candidates_at(kind, logits_NV, self._inputs, depth, self._width)

    def _with_own_bits(self, words_RWX: torch.Tensor, before_R: torch.Tensor) -> torch.Tensor:
        """Add to the ancestors of nodes that are fed in their order the bit of each node itself."""
        places_RW = before_R[:, None] + torch.arange(self._width, device=before_R.device)
        words_X = torch.arange(words_RWX.shape[2], device=before_R.device)
        bits_RW = torch.ones_like(places_RW) << (places_RW % WORD)
        is_here_RWX = (places_RW // WORD)[:, :, None] == words_X
        return words_RWX | torch.where(is_here_RWX, bits_RW[:, :, None], 0)

    def _note_depths(self, depths_RA: torch.Tensor, before_R: torch.Tensor, level: int) -> None:
        """Write the depth of the nodes that are fed at *level*. What is behind them is written at later levels."""
        places_A = torch.arange(depths_RA.shape[1], device=before_R.device)
        depths_RA.masked_fill_(places_A >= before_R[:, None], level - 1)


def _gathered(values_RNX: torch.Tensor, at_RW: torch.Tensor) -> torch.Tensor:
    """Return the values of some of N nodes of each row, `[R, W, X]`."""
    return values_RNX.gather(1, at_RW[:, :, None].expand(-1, -1, values_RNX.shape[2]))
