"""Sampling along draft trees: level by level, so that every token is sampled given the tokens accepted before it.

What the sampler does depends on the tokens before a position (penalties, bad words, grammars). In a chain those are the
draft's; in a tree they are those of one of many paths. So the paths of all trees grow together: sample after the roots,
then after the children equal to the sampled tokens, and so on; each token is written into its row's history at once.
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch

from protos.draft import Draft, TreePath
from workers.sampling.sample import Ints
from workers.sampling.sampler import Sampler

NOT_SAMPLED = -1


def tree_path(draft: Draft, sampled: Seq[int]) -> list[int]:
    """Return the nodes on the path of the target's tokens; see `workers.verification.acceptance.accept`."""
    path = TreePath(draft)
    while path.extend(sampled[1 + path.end]):
        pass
    return path.nodes


class TreeSampler:
    """Samples at the scored positions of one round in which there are trees.

    Args:
        sampler: the target's; tokens sampled along trees go into the history that it reads.
        logits_NV: float32, at every scored position.
        slots_N, index_N: int64; slot of each, and position in prompt + output of the token sampled there.
    """

    def __init__(self, sampler: Sampler, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> None:
        self._sampler, self._logits_NV = sampler, logits_NV
        self._slots_N, self._index_N = slots_N, index_N
        self._sampled_N: Ints = np.full(len(slots_N), NOT_SAMPLED, np.int64)

    def sample(self, drafts: Seq[Draft], counts_R: Ints) -> list[int]:
        """Return the token at every position; -1 where there is none, or off the path.

        Args:
            drafts: of every row. Chains are sampled all at once, with the trees' roots.
            counts_R: int64; how many of the positions are each row's: the root and its draft's nodes, or none.
        """
        first_R = (np.cumsum(counts_R) - counts_R).tolist()
        trees = [
            (first, draft)
            for first, draft, count in zip(first_R, drafts, counts_R.tolist(), strict=True)
            if count and not draft.is_chain
        ]
        is_chain_N = np.repeat(np.array([draft.is_chain for draft in drafts]), counts_R)
        roots = np.array([first for first, _ in trees], np.int64)
        self._sample_at(np.concatenate((np.flatnonzero(is_chain_N), roots)))
        self._sample_paths([(first, TreePath(draft)) for first, draft in trees])
        sampled: list[int] = self._sampled_N.tolist()
        return sampled

    def _sample_paths(self, paths: list[tuple[int, TreePath]]) -> None:
        """Extend the paths of all trees, a level at a time, from their roots, where tokens are sampled already."""
        while paths:
            paths = [(first, path) for first, path in paths if self._extend(first, path)]
            self._sample_at(np.array([first + 1 + path.end for first, path in paths], np.int64))

    def _extend(self, first: int, path: TreePath) -> bool:
        """Write the token sampled at the end of *path* into the row's history, and extend the path by it."""
        at = first + 1 + path.end
        token = int(self._sampled_N[at])
        if token == NOT_SAMPLED:
            return False
        self._sampler.slots.tokens[self._slots_N[at], self._index_N[at]] = token
        return path.extend(token)

    def _sample_at(self, at_M: Ints) -> None:
        """Sample at some of the positions."""
        if len(at_M):
            logits_MV = self._logits_NV[torch.from_numpy(at_M).to(self._logits_NV.device)]
            ids_M = self._sampler.sample(logits_MV, self._slots_N[at_M], self._index_N[at_M])
            self._sampled_N[at_M] = ids_M.cpu().numpy()
