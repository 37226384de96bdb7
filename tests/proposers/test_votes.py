"""Chains made for many matches at once are those that `continuations.chain` makes for each."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from proposers.shared.answer_ring import NOTHING
from proposers.shared.continuations import chain
from proposers.shared.votes import most_frequent

MOST, PLACES = 4, 16
TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=MOST), min_size=1, max_size=PLACES)


def laid_out(texts: list[list[int]], junk: int) -> np.ndarray:
    """`[MOST, PLACES]`; behind a text's end there may be ids of another."""
    found = np.full((MOST, PLACES), NOTHING, np.int32)
    for place, text in enumerate(texts):
        found[: len(text), place] = text
        found[len(text) + 1 :, place] = junk
    return found


@settings(deadline=None, max_examples=100)
@given(
    matches=st.lists(st.tuples(TEXTS, st.integers(0, 9), st.integers(1, MOST)), min_size=1, max_size=6),
    least=st.sampled_from([0.0, 0.1, 0.3, 0.6, 1.0]),
    junk=st.integers(0, 2),
)
def test_all_chains_are_those_made_one_by_one(
    matches: list[tuple[list[list[int]], int, int]], least: float, junk: int
) -> None:
    totals = [len(texts) + others for texts, others, _ in matches]
    votes = most_frequent(
        np.stack([laid_out(texts, junk) for texts, _, _ in matches], 2),
        np.array([depth for _, _, depth in matches]),
        np.maximum(1.0, least * np.array(totals)),
    )
    for (texts, _, depth), total, tokens, length, frequency in zip(matches, totals, *votes, strict=True):
        wanted = chain([text[:depth] for text in texts], total, depth, least)
        assert tuple(tokens[:length]) == wanted.draft.tokens
        assert frequency / total == wanted.score
