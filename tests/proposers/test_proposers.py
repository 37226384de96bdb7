"""Every proposer of the registry obeys the protocol; each one's drafts equal a straightforward computation."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proposers import registry
from proposers.ngram import NgramProposer
from proposers.shared.chains import Chains
from protos.config.engine import SpeculativeConfig
from protos.draft import DraftRow
from protos.errors import ConfigError


@pytest.mark.parametrize("name", registry.names())
def test_every_registered_proposer_says_where_it_lives(name: str) -> None:
    proposer = registry.load(name)
    assert isinstance(proposer.on_worker, bool)
    assert callable(proposer.create)
    assert callable(proposer.propose)


def test_an_unknown_method_is_refused_with_the_ones_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'eagel'.*draft_model.*ngram"):
        registry.load("eagel")


def naive_lookup(tokens: list[int], k: int, min_n: int, max_n: int) -> tuple[int, ...]:
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if n < len(tokens) and tokens[start : start + n] == tokens[-n:]:
                return tuple(tokens[start + n : start + n + k])
    return ()


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    k=st.integers(1, 6),
    bounds=st.tuples(st.integers(1, 4), st.integers(0, 3)),
)
def test_ngram_equals_a_naive_search(tokens: list[int], k: int, bounds: tuple[int, int]) -> None:
    min_n, max_n = bounds[0], bounds[0] + bounds[1]
    [draft] = NgramProposer(min_n, max_n).propose([DraftRow(slot=0, k=k, token_ids=tokens)])
    assert draft.tokens == naive_lookup(tokens, k, min_n, max_n)


def test_ngram_is_not_fooled_by_bytes_that_match_across_token_borders() -> None:
    # 0x00010000 and 0x00000001 share byte patterns at other alignments.
    rng = random.Random(0)
    tokens = [rng.choice([0, 1, 256, 65536, 16777216]) for _ in range(400)]
    [draft] = NgramProposer(2, 4).propose([DraftRow(slot=0, k=5, token_ids=tokens)])
    assert draft.tokens == naive_lookup(tokens, 5, 2, 4)


def test_rows_are_served_independently_and_without_a_match_get_nothing() -> None:
    rows = [DraftRow(0, 3, [1, 2, 3, 1, 2]), DraftRow(1, 2, [1, 2, 3, 4, 5])]
    assert [draft.tokens for draft in NgramProposer(2, 2).propose(rows)] == [(3, 1, 2), ()]


def cascade(*methods: str) -> SpeculativeConfig:
    return SpeculativeConfig(method=methods, num_speculative_tokens=4)


def test_one_method_of_a_cascade_may_run_on_the_worker_and_it_comes_last() -> None:
    assert registry.worker_method(cascade("suffix", "draft_model")) == "draft_model"
    assert registry.worker_method(cascade("suffix", "ngram")) is None
    assert [type(one).__name__ for one in registry.controller_proposers(cascade("suffix", "ngram", "draft_model"))] == [
        "SuffixProposer",
        "NgramProposer",
    ]
    with pytest.raises(ConfigError, match=r"2 run on the draft worker \(medusa, draft_model\)"):
        registry.worker_method(cascade("medusa", "ngram", "draft_model"))
    with pytest.raises(ConfigError, match="after 'draft_model' would never be used"):
        registry.worker_method(cascade("draft_model", "ngram"))


@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=6), seed=st.integers(0, 1 << 16))
def test_chains_end_where_they_are_complete_or_stopped(lengths: list[int], seed: int) -> None:
    rng = random.Random(seed)
    chains = Chains([DraftRow(slot, length) for slot, length in enumerate(lengths)])
    wanted: dict[int, list[int]] = {slot: [] for slot in range(len(lengths))}
    state_R = torch.tensor([row.slot for row in chains.rows])
    while chains.active:
        before = [row.slot for row in chains.active]
        assert state_R.tolist() == before
        ids_R = torch.tensor([rng.randrange(100) for _ in before])
        goes_on = [rng.random() < 0.7 for _ in before]
        kept = chains.add(ids_R, goes_on)
        for slot, token in zip(before, ids_R.tolist(), strict=True):
            wanted[slot].append(token)
        left = [slot for slot, more in zip(before, goes_on, strict=True) if more and len(wanted[slot]) < lengths[slot]]
        assert [row.slot for row in chains.active] == left
        state_R = state_R[kept]
    assert [list(draft.tokens) for draft in chains.drafts()] == list(wanted.values())
