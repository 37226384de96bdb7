"""Choosing tokens along trees: level by level, so that every choice sees the text that really came before it.

What the sampler does depends on the tokens before a position (penalties, bad words, grammars). In a chain those are the
drafted ones, wherever it matters; in a tree they are one of many paths. So the trees of a round are walked together:
the choice behind the root, then behind the child that equals it, and so on, each written into the row's history at
once.
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch

from protos.draft import Draft
from workers.attention.batch import Ints
from workers.sampling.grammar_sampler import GrammarSampler
from workers.verification.verify import Walk

NOT_CHOSEN = -1


class TreeSampler:
    """Chooses behind the scored positions of one round in which there are trees.

    Args:
        sampler: the ordinary pipeline; the choices along trees go into the history that it reads.
        logits_NV: float32, behind every scored position.
        slots_N, index_N: int64; slot of each, and position in prompt + output of the token chosen there.
    """

    def __init__(self, sampler: GrammarSampler, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> None:
        self._sampler, self._logits_NV = sampler, logits_NV
        self._slots_N, self._index_N = slots_N, index_N
        self._chosen_N: Ints = np.full(len(slots_N), NOT_CHOSEN, np.int64)

    def choose(self, drafts: Seq[Draft], counts_R: Ints) -> list[int]:
        """Return the choice behind every position; -1 where none could be made, or that no walk came to.

        Chains are chosen all at once, with the trees' roots; probes at the end, and what stands before them then is
        the row's true text as far as it is known, and any drafted tokens behind it.

        Args:
            drafts: of every row.
            counts_R: int64; how many of the positions are each row's: the root and its draft's nodes, or none.
        """
        first_R = (np.cumsum(counts_R) - counts_R).tolist()
        trees = [
            (first, draft)
            for first, draft, count in zip(first_R, drafts, counts_R.tolist(), strict=True)
            if count and not draft.is_chain
        ]
        is_chain_N = np.repeat(np.array([draft.is_chain for draft in drafts]), counts_R)
        roots_W = np.array([first for first, _ in trees], np.int64)
        self._choose(np.concatenate((np.flatnonzero(is_chain_N), roots_W)))
        self._walk([(first, Walk(draft)) for first, draft in trees])
        self._choose(
            np.array(
                [first + 1 + node for first, draft in trees for node, is_probe in enumerate(draft.probes) if is_probe],
                np.int64,
            )
        )
        chosen: list[int] = self._chosen_N.tolist()
        return chosen

    def _walk(self, walks: list[tuple[int, Walk]]) -> None:
        """Go down all trees, a level at a time; what is chosen behind their roots is known already."""
        while walks:
            walks = [(first, walk) for first, walk in walks if self._goes_on(first, walk)]
            self._choose(np.array([first + 1 + walk.node for first, walk in walks], np.int64))

    def _goes_on(self, first: int, walk: Walk) -> bool:
        """Write down what was chosen where a walk stands, and let it go there."""
        at = first + 1 + walk.node
        y = int(self._chosen_N[at])
        if y == NOT_CHOSEN:
            return False
        self._sampler.slots.tokens[self._slots_N[at], self._index_N[at]] = y
        return walk.take(y)

    def _choose(self, at_M: Ints) -> None:
        """Choose behind some of the positions."""
        if len(at_M):
            logits_MV = self._logits_NV[torch.from_numpy(at_M).to(self._logits_NV.device)]
            ids_M = self._sampler.sample(logits_MV, self._slots_N[at_M], self._index_N[at_M])
            self._chosen_N[at_M] = ids_M.cpu().numpy()
