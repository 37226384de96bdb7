"""Merges the continuations of many matches at once, by `proposers.shared.continuations.chain`'s rule. numpy."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from proposers.shared.answer_ring import NOTHING
from proposers.shared.arrays import Ids

Counts = npt.NDArray[np.int64]


class Votes(NamedTuple):
    """The chains of G matches: tokens, lengths, and how many occurrences contain each token, summed over a chain."""

    tokens_GC: list[list[int]]
    length_G: list[int]
    frequency_G: list[int]


def most_frequent(texts_CPG: Ids, depth_G: Counts, fewest_G: npt.NDArray[np.float64]) -> Votes:
    """Follow the most frequent token of each match's continuations at each step.

    Args:
        texts_CPG: at most C tokens of P < 256 continuations of each match, most recent first; `NOTHING` after the last
            token of one, and where there are fewer continuations. The most recent wins among equally frequent tokens.
        depth_G: most tokens of each chain.
        fewest_G: a chain ends before the first token that fewer continuations contain; at least 1.
    """
    most, _, matches = texts_CPG.shape
    every_G = np.arange(matches)
    tokens_CG = np.full((most, matches), NOTHING, np.int32)
    length_G, frequency_G, goes_on_G = np.zeros(matches, np.int64), np.zeros(matches, np.int64), depth_G > 0
    token_PG = texts_CPG[0]
    for step in range(most):
        equal_PPG = (token_PG[:, None] == token_PG).view(np.uint8)
        count_PG = np.add.reduce(equal_PPG, 0, np.uint8) * (token_PG != NOTHING)
        first_G = count_PG.argmax(0)
        token_G, count_G = token_PG[first_G, every_G], count_PG[first_G, every_G]
        goes_on_G &= (count_G >= fewest_G) & (step < depth_G)
        tokens_CG[step] = token_G
        length_G += goes_on_G
        frequency_G += count_G * goes_on_G
        if step + 1 < most:
            token_PG = np.where(token_PG == token_G, texts_CPG[step + 1], NOTHING)
    return Votes(tokens_CG.T.tolist(), length_G.tolist(), frequency_G.tolist())
