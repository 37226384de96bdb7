"""Acceptance of trees by the number of nodes asked for, and the choice of one size for all rows.

A tree has no order in which its nodes are worth less and less, as a chain has. So a few sizes are compared, and for
each the mean numbers of nodes and of accepted draft tokens are measured.
"""

from collections.abc import Sequence as Seq

import numpy as np

from runtime.policy.allocation import Allocation
from runtime.policy.cost_model import NEVER, Floats, Ints, RoundCosts

ASSUMED_PER_LEVEL = 0.7
"""Acceptance of a level before anything was measured; a tree is taken to double its nodes with each level."""
PRIOR_DRAFTS = 4.0
"""Weight of what all sizes showed in the estimate of each, in drafts, and of the assumption in that, in tokens."""
MEMORY_DRAFTS = 200.0
"""When so many drafts of a size were seen, half of what was seen is forgotten."""
AGED_DRAFTS = 16.0
"""Of what was seen of a size, so many drafts still count after a while without drafts."""


class SizeModel:
    """What drafts bring for which so many nodes are asked for, for each of *sizes*, which ascend."""

    def __init__(self, sizes: Seq[int]) -> None:
        self.sizes: Ints = np.array(sizes, np.int64)
        # Drafts asked for, those with any node, nodes, and accepted ones.
        self._drafts_S, self._found_S, self._nodes_S, self._accepted_S = (np.zeros(len(sizes)) for _ in range(4))
        levels_S = np.log2(self.sizes + 1.0)
        self._assumed_S = ASSUMED_PER_LEVEL * (1 - ASSUMED_PER_LEVEL**levels_S) / (1 - ASSUMED_PER_LEVEL)

    def observe(self, num_asked: int, num_nodes: int, accepted: int) -> None:
        """Add a draft of *num_nodes* nodes, of *num_asked* asked for, of which *accepted* were accepted."""
        index = int(np.searchsorted(self.sizes, num_asked).clip(max=len(self.sizes) - 1))
        self._drafts_S[index] += 1
        self._found_S[index] += num_nodes > 0
        self._nodes_S[index] += min(num_nodes, self.sizes[index])
        self._accepted_S[index] += accepted
        if self._drafts_S[index] > MEMORY_DRAFTS:
            for counts_S in (self._drafts_S, self._found_S, self._nodes_S, self._accepted_S):
                counts_S[index] *= 0.5

    def age(self) -> None:
        """Let the next drafts count more: there was none for a while, and the text may be another."""
        share_S = np.minimum(1.0, AGED_DRAFTS / np.maximum(self._drafts_S, 1.0))
        for counts_S in (self._drafts_S, self._found_S, self._nodes_S, self._accepted_S):
            counts_S[:] = counts_S * share_S

    def nodes(self) -> Floats:
        """Return the mean number of nodes for each size: a method may find fewer, or nothing."""
        prior_S = PRIOR_DRAFTS * self.sizes
        nodes_S: Floats = (self._nodes_S + prior_S) / (self._drafts_S + PRIOR_DRAFTS)
        return nodes_S

    def found(self) -> Floats:
        """Return the share of drafts with any node for each size."""
        found_S: Floats = (self._found_S + PRIOR_DRAFTS) / (self._drafts_S + PRIOR_DRAFTS)
        return found_S

    def accepted(self) -> Floats:
        """Return the mean number of accepted draft tokens for each size; it never falls with the size."""
        expected_S = self._drafts_S * self._assumed_S
        of_assumed = (self._accepted_S.sum() + PRIOR_DRAFTS) / (expected_S.sum() + PRIOR_DRAFTS)
        prior_S = PRIOR_DRAFTS * of_assumed * self._assumed_S
        return rising((self._accepted_S + prior_S) / (self._drafts_S + PRIOR_DRAFTS), self._drafts_S + PRIOR_DRAFTS)


def rising(values_S: Floats, weights_S: Floats) -> Floats:
    """Return the values that never fall and are nearest to *values_S*, by weighted squares (isotonic regression).

    Neighbours that fall are replaced by their mean, until none do (pool adjacent violators; Barlow et al. 1972).
    """
    pools: list[tuple[float, float, int]] = []  # mean, weight, number of values
    for value, weight in zip(values_S.tolist(), weights_S.tolist(), strict=True):
        mean, total, number = value, weight, 1
        while pools and pools[-1][0] > mean:
            before, more, several = pools.pop()
            mean = (before * more + mean * total) / (more + total)
            total, number = total + more, number + several
        pools.append((mean, total, number))
    return np.repeat([mean for mean, _, _ in pools], [number for _, _, number in pools])


def choose_size(model: SizeModel, limits_R: Ints, num_sampling: int, costs: RoundCosts) -> Allocation:
    """Return the best size for all rows, or none; a row with a lower limit has that many nodes."""
    num_rows = int(np.count_nonzero(limits_R))
    size_S, plain_s = model.sizes, costs.plain()
    k_SR = np.minimum(limits_R[None, :], size_S[:, None])
    tokens_S = num_sampling + num_rows * model.accepted()
    scored_S = k_SR.sum(axis=1) * model.nodes() / size_S
    seconds_S = costs.scoring(scored_S, num_rows * np.log(np.maximum(1 - model.found(), NEVER)))
    seconds_S += [costs.drafting(size, num_rows) for size in size_S.tolist()]
    seconds_S += costs.prompts_s * tokens_S
    index = int(np.argmax(tokens_S / seconds_S))
    tokens, seconds = float(tokens_S[index]), float(seconds_S[index])
    gain = tokens / seconds * plain_s / num_sampling
    if gain <= 1:
        return Allocation(np.zeros_like(limits_R)[:, None], num_sampling, plain_s, 1.0)
    return Allocation(k_SR[index][:, None], tokens, seconds, gain, float(scored_S[index]))


def ladder(limit: int) -> list[int]:
    """Return the sizes that are compared: 1, 2, 4 ... and *limit*."""
    return [1 << power for power in range(limit.bit_length()) if 1 << power < limit] + [limit]
