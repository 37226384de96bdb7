"""Acceptance of trees by the number of nodes asked for, and the choice of one size for all rows.

A tree has no order in which its nodes are worth less and less, as a chain has. So a few sizes are compared, and for
each the mean numbers of nodes and of accepted draft tokens are measured.
"""

from collections.abc import Sequence as Seq

import numpy as np

from runtime.policy.allocation import Allocation, RoundCosts
from runtime.policy.cost_model import Floats, Ints

ASSUMED_PER_LEVEL = 0.7
"""Acceptance of a level before anything was measured; a tree is taken to double its nodes with each level."""
PRIOR_DRAFTS = 4.0
"""Weight of the estimate from the sizes next to it, in drafts."""
MEMORY_DRAFTS = 200.0
"""When so many drafts of a size were seen, half of what was seen is forgotten."""
AGED_DRAFTS = 16.0
"""Of what was seen of a size, so many drafts still count after a while without drafts."""


class SizeModel:
    """What drafts bring for which so many nodes are asked for, for each of *sizes*, which ascend."""

    def __init__(self, sizes: Seq[int]) -> None:
        self.sizes: Ints = np.array(sizes, np.int64)
        self._drafts_S = np.zeros(len(sizes))
        self._accepted_S = np.zeros(len(sizes))
        self._nodes_S = np.zeros(len(sizes))
        levels_S = np.log2(self.sizes + 1.0)
        self._assumed_S = ASSUMED_PER_LEVEL * (1 - ASSUMED_PER_LEVEL**levels_S) / (1 - ASSUMED_PER_LEVEL)

    def observe(self, num_asked: int, num_nodes: int, accepted: int) -> None:
        """Add a draft of *num_nodes* nodes, of *num_asked* asked for, of which *accepted* were accepted."""
        index = int(np.searchsorted(self.sizes, num_asked).clip(max=len(self.sizes) - 1))
        self._drafts_S[index] += 1
        self._accepted_S[index] += accepted
        self._nodes_S[index] += min(num_nodes, self.sizes[index])
        if self._drafts_S[index] > MEMORY_DRAFTS:
            for counts_S in (self._drafts_S, self._accepted_S, self._nodes_S):
                counts_S[index] *= 0.5

    def age(self) -> None:
        """Let the next drafts count more: there was none for a while, and the text may be another."""
        share_S = np.minimum(1.0, AGED_DRAFTS / np.maximum(self._drafts_S, 1.0))
        self._drafts_S *= share_S
        self._accepted_S *= share_S
        self._nodes_S *= share_S

    def nodes(self) -> Floats:
        """Return the mean number of nodes for each size: a method may find fewer, or nothing."""
        prior_S = PRIOR_DRAFTS * self.sizes
        nodes_S: Floats = (self._nodes_S + prior_S) / (self._drafts_S + PRIOR_DRAFTS)
        return nodes_S

    def accepted(self) -> Floats:
        """Return the mean number of accepted draft tokens for each size; it never falls with the size."""
        factor_S = (self._accepted_S + PRIOR_DRAFTS * self._assumed_S) / (
            (self._drafts_S + PRIOR_DRAFTS) * self._assumed_S
        )
        seen_M = np.flatnonzero(self._drafts_S)
        if len(seen_M):
            nearby_S = np.interp(np.arange(len(self.sizes)), seen_M, factor_S[seen_M])
            share_S = self._drafts_S / (self._drafts_S + PRIOR_DRAFTS)
            factor_S = share_S * factor_S + (1 - share_S) * nearby_S
        accepted_S: Floats = np.maximum.accumulate(factor_S * self._assumed_S)
        return accepted_S


def choose_size(model: SizeModel, limits_R: Ints, num_sampling: int, costs: RoundCosts) -> Allocation:
    """Return the best size for all rows, or none; a row with a lower limit has that many nodes."""
    num_rows = int(np.count_nonzero(limits_R))
    plain_s = costs.plain()
    best = Allocation(np.zeros_like(limits_R)[:, None], num_sampling, plain_s, 1.0)
    measured = zip(model.sizes.tolist(), model.nodes().tolist(), model.accepted().tolist(), strict=True)
    for size, nodes, accepted in measured:
        k_R = np.minimum(limits_R, size)
        num_scored = round(float(k_R.sum()) * nodes / size)
        seconds = costs.target.at(costs.num_known + num_scored) + costs.drafting(size, num_rows)
        tokens = num_sampling + accepted * num_rows
        gain = tokens / seconds * plain_s / num_sampling
        if gain > best.gain:
            best = Allocation(k_R[:, None], tokens, seconds, gain)
    return best


def ladder(limit: int) -> list[int]:
    """Return the sizes that are compared: 1, 2, 4 ... and *limit*."""
    return [1 << power for power in range(limit.bit_length()) if 1 << power < limit] + [limit]
