"""Look-ups of few rows, done one by one, find what those of many rows find, done with numpy."""

import random
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proposers import suffix
from proposers.shared import answer_index, hash_chains
from proposers.shared.answer_index import AnswerIndex
from proposers.shared.answer_ring import AnswerText
from proposers.suffix import SuffixProposer
from protos.config.engine import SpeculativeConfig
from protos.draft import Draft, DraftRow
from tests.support.naive_search import request

SALTS = ["", "a", "b"]
PART = st.tuples(st.integers(0, 5), st.lists(st.integers(0, 3), min_size=1, max_size=40))
REACH = 16


def filled(parts: list[tuple[int, list[int]]], few: int) -> AnswerIndex:
    """Return an index for 400 tokens, of which at most *few* are added one by one."""
    index = AnswerIndex(400 * 44, 4, REACH)
    texts = [AnswerText(SALTS[number % 3], reserved=30) for number in range(6)]
    with patch.object(answer_index, "FEW", few):
        for number, tokens in parts:
            index.extend([(texts[number], tokens)])
    return index


@settings(deadline=None)
@given(
    parts=st.lists(PART, max_size=30),
    patterns=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=4),
    salt=st.sampled_from(SALTS),
    least=st.integers(0, 6),
)
def test_answers_are_added_and_found_one_by_one(
    parts: list[tuple[int, list[int]]], patterns: list[list[int]], salt: str, least: int
) -> None:
    """The ring is small, so that texts are evicted, and so is the first table of heads, so that it grows."""
    with patch.object(hash_chains, "FEWEST_BITS", 3):
        together, single = filled(parts, 0), filled(parts, 1000)
        for longer in patterns:
            pattern = longer[-REACH:]
            [wanted] = together.matches([salt], [pattern], [least])
            assert single.matches([salt], [pattern], [least]) == [wanted]
            assert list(single.search(salt, pattern, least)) == wanted


def drafts(few: int, keys: dict[str, Any], k: int) -> Iterator[list[Draft]]:
    """Yield the drafts for three rows while their answers grow, of which at most *few* rows are looked up alone."""
    rng = random.Random(1)
    config = SpeculativeConfig(method="suffix", num_speculative_tokens=k, **keys)
    proposer = SuffixProposer.create(config, None)
    phrases = [[rng.randrange(30) for _ in range(12)] for _ in range(6)]
    texts: list[list[int]] = [[], [], []]
    for key in range(3):
        proposer.begin(key, request(texts[key]))
    for _ in range(60):
        for text in texts:
            text.extend(rng.choice(phrases)[: rng.randrange(1, 12)])
        with patch.object(suffix, "FEW", few):
            yield proposer.propose([DraftRow(key, k, text, key, depth=5) for key, text in enumerate(texts)])
        proposer.prepare()


@pytest.mark.parametrize("keys", [{}, {"draft_shape": "tree"}, {"suffix_decoding_min_token_prob": 0.4}], ids=str)
@pytest.mark.parametrize("k", [1, 3, 16])
def test_suffix_decoding_drafts_the_same_for_few_rows(keys: dict[str, Any], k: int) -> None:
    together, single = list(drafts(0, keys, k)), list(drafts(4, keys, k))
    assert single == together
    assert sum(len(draft) > 0 for some in single for draft in some) > 60
