"""Drafts as trees: what is left of malformed ones, how they are counted, and how they cross the wires."""

import random
import threading

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.draft import NO_DRAFT, Draft
from protos.messages import NewSequence, RoundPlan, Row, Sampling, Step
from runtime.core.sequence import SpeculationCounts
from tests.support.tree_proposer import random_tree
from workers.draft.wire import STAMP, broadcast_drafts, decode, encode
from workers.slots import SlotTable

VOCAB = 10


def at_random(low: int, high: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(low, high), max_size=7).map(tuple)


anything = st.builds(Draft, at_random(-1, VOCAB), at_random(-2, 6), st.lists(st.booleans(), max_size=7).map(tuple))
trees = st.builds(
    lambda size, seed: random_tree((1, 2, 3), size, VOCAB, random.Random(seed)).first(size),
    st.integers(1, 9),
    st.integers(0, 10_000),
)
chains = at_random(0, VOCAB - 1).map(Draft)


@given(st.one_of(anything, trees, chains), st.integers(0, 8))
@settings(max_examples=400, deadline=None)
def test_whatever_comes_out_can_be_scored(draft: Draft, k: int) -> None:
    found = draft.valid_prefix(k, VOCAB)
    size = len(found)
    assert size <= k
    assert found.tokens == draft.tokens[:size]
    assert all(0 <= token < VOCAB for token in found.tokens)
    assert len(found.parents) in {0, size}
    assert all(-1 <= parent < node for node, parent in enumerate(found.parents))
    assert len(found.probes) in {0, size}
    assert not (found.is_chain and found.probes)
    assert not size or not found.probes or any(found.probes)
    assert found.valid_prefix(k, VOCAB) == found


@given(st.one_of(trees, chains))
@settings(max_examples=200, deadline=None)
def test_what_is_well_formed_stays_as_it_is(draft: Draft) -> None:
    assert draft.valid_prefix(len(draft), VOCAB) == draft


def test_malformed_drafts_are_cut_or_dropped() -> None:
    assert Draft((1, 2), (-1,)).valid_prefix(9, VOCAB) == NO_DRAFT
    assert Draft((1, 2), probes=(True,)).valid_prefix(9, VOCAB) == NO_DRAFT
    assert Draft((1, 2, 3), (-1, 1, 0)).valid_prefix(9, VOCAB) == Draft((1,))
    assert Draft((1, 2, 3), (-1, -1, -2)).valid_prefix(9, VOCAB) == Draft((1, 2), (-1, -1))
    assert Draft((1, VOCAB, 3), (-1, -1, 0)).valid_prefix(9, VOCAB) == Draft((1,))
    assert Draft((1, 2), probes=(False, True)).valid_prefix(9, VOCAB) == Draft((1, 2), (-1, 0), (False, True))
    assert Draft((1, 2, 3), (-1, 0, 0), (False,) * 3).valid_prefix(2, VOCAB) == Draft((1, 2))


def test_depths_ancestors_and_widths_of_one_tree() -> None:
    #  0 - 2 - 4      node 1 is a probe, so 3 is never reached
    #  1 - 3   5 under 2
    draft = Draft((1, 2, 3, 4, 5, 6), (-1, -1, 0, 1, 2, 2), (False, True, False, False, False, False))
    assert draft.depths() == [1, 1, 2, 2, 3, 3]
    assert draft.ancestor_masks() == [0b1, 0b10, 0b101, 0b1010, 0b10101, 0b100101]
    assert draft.widths() == [1, 1, 2]
    assert Draft((7, 8)).widths() == [1, 1]
    assert Draft((7,), (-1,), (True,)).widths() == []


def test_positions_are_depths_and_probes_are_no_draft_tokens_in_the_counts() -> None:
    counts = SpeculationCounts()
    counts.add(Step(6, accepted=2, depth=3))
    counts.add(Step(2, accepted=0, depth=2))
    stats = counts.snapshot()
    assert (stats.steps, stats.proposed, stats.accepted, stats.accepted_per_pos) == (2, 8, 2, (1, 1, 0))


def table(ks: list[int]) -> tuple[SlotTable, list[Row]]:
    """Return slots with a known text each, and rows with *ks* draft tokens."""
    slots = SlotTable(len(ks), 32, 4)
    news = [NewSequence(slot, (1, 2, 3), 3, Sampling(seed=0), slot + 1) for slot in range(len(ks))]
    rows = [Row(slot, 0, 3, 3, k) for slot, k in enumerate(ks)]
    slots.apply(RoundPlan(0, rows, news))
    return slots, rows


@given(st.lists(st.one_of(trees, chains), min_size=1, max_size=5), st.data())
@settings(max_examples=100, deadline=None)
def test_drafts_cross_the_pair(drafts: list[Draft], data: st.DataObject) -> None:
    slots, rows = table([max(1, len(draft)) + data.draw(st.integers(0, 2)) for draft in drafts])
    width = max(row.k for row in rows)
    sent = encode(slots, rows, drafts)
    are_chains = all(draft.is_chain for draft in drafts)
    assert sent.shape == (len(rows), STAMP + width * (1 if are_chains else 2))
    assert decode(slots, rows, sent, VOCAB) == drafts
    late = sent.copy()
    late[0, data.draw(st.integers(0, 1))] -= 1
    assert decode(slots, rows, late, VOCAB) == [NO_DRAFT, *drafts[1:]]


@given(st.lists(st.one_of(trees, chains), min_size=1, max_size=3), st.integers(0, 1_000))
@settings(max_examples=100, deadline=None)
def test_noise_on_the_pair_does_no_harm(drafts: list[Draft], seed: int) -> None:
    slots, rows = table([max(1, len(draft)) for draft in drafts])
    sent = encode(slots, rows, drafts)
    dice = np.random.default_rng(seed)
    sent[:, 2:] = dice.integers(-30, 30, sent[:, 2:].shape)
    for row, draft in zip(rows, decode(slots, rows, sent, VOCAB), strict=True):
        assert draft.valid_prefix(row.k, VOCAB) == draft
    assert decode(slots, rows, np.hstack([sent] * 3), VOCAB) == [NO_DRAFT] * len(rows)
    assert decode(slots, rows, sent[:-1], VOCAB) == [NO_DRAFT] * len(rows)


class Meeting:
    """Rank *rank* of a group of two threads that can only broadcast; notes what was."""

    size = 2

    def __init__(self, rank: int, barrier: threading.Barrier, shared: list[torch.Tensor]) -> None:
        self.rank, self._barrier, self._shared = rank, barrier, shared

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        if self.rank == src:
            self._shared.append(tensor)
        self._barrier.wait(10)
        sent = self._shared[-1]
        self._barrier.wait(10)
        assert tensor.shape == sent.shape and tensor.dtype == sent.dtype
        return sent


@given(st.lists(st.one_of(trees, chains), min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_all_ranks_have_what_rank_0_has(drafts: list[Draft]) -> None:
    _, rows = table([max(1, len(draft)) for draft in drafts])
    barrier, shared, found = threading.Barrier(2), [], {}

    def life(rank: int) -> None:
        own = drafts if rank == 0 else [NO_DRAFT] * len(rows)
        found[rank] = broadcast_drafts(Meeting(rank, barrier, shared), rows, own)

    threads = [threading.Thread(target=life, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == {0: drafts, 1: drafts}
    width = max(row.k for row in rows)
    expected = [(len(rows), 1 + width)] + [(len(rows), width)] * (not all(draft.is_chain for draft in drafts))
    assert [tuple(tensor.shape) for tensor in shared] == expected


def test_a_draft_within_a_depth_keeps_its_first_levels_and_its_probes() -> None:
    #  0 - 2 - 4      node 1 is a probe, so 3 is below one
    #  1 - 3   5 under 2
    draft = Draft((1, 2, 3, 4, 5, 6), (-1, -1, 0, 1, 2, 2), (False, True, False, False, False, False))
    assert draft.within(3) is draft
    assert draft.within(2) == Draft((1, 2, 3, 4), (-1, -1, 0, 1), (False, True, False, False))
    assert draft.within(1) == Draft((1, 2, 4), (-1, -1, 1), (False, True, False))
    assert Draft((7, 8, 9)).within(2) == Draft((7, 8))
    assert Draft((7, 8, 9), (-1, 0, 0)).within(1) == Draft((7,))
    assert Draft((7, 8, 9)).within(0) == NO_DRAFT


@given(trees, st.integers(0, 6))
@settings(max_examples=100, deadline=None)
def test_what_is_left_within_a_depth_are_the_same_paths(draft: Draft, depth: int) -> None:
    cut = draft.within(depth)
    assert cut.valid_prefix(len(cut), VOCAB) == cut
    assert cut.widths() == draft.widths()[:depth]
    deep = [level > depth and not is_probe for level, is_probe in zip(cut.depths(), cut._probed(), strict=True)]
    assert not any(deep)
