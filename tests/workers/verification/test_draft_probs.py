"""Draft probabilities: how they are sent and checked, and which drafts a grammar may prune."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from protos.draft import NO_DRAFT, Draft
from protos.messages import NewSequence, RoundPlan, Row, Sampling
from workers.draft.wire import STAMP, decode, decode_probs, encode
from workers.slots import SlotTable
from workers.verification.draft_probs import (
    DRAFT_PROBS_SIZE,
    DraftProbs,
    are_valid,
    deterministic_children,
    sampled_children,
)
from workers.verification.probes import subtree
from workers.verification.rejection import RejectionSampler

VOCAB = 23


def table_of(drafts: list[Draft]) -> tuple[SlotTable, list[Row]]:
    slots = SlotTable(len(drafts), 32, 4)
    rows = [Row(slot, 0, 3, 3, k=5) for slot in range(len(drafts))]
    slots.apply(
        RoundPlan(
            0, rows, [NewSequence(slot, [1, 2, 3], 3, Sampling(seed=slot), slot + 1) for slot in range(len(drafts))]
        )
    )
    return slots, rows


def some_probs(count: int, size: int, seed: int = 0) -> DraftProbs:
    rng = np.random.default_rng(seed)
    ids_ML = np.stack([rng.permutation(VOCAB)[:size] for _ in range(count)])
    return DraftProbs(ids_ML, -np.sort(-rng.dirichlet(np.ones(size), count).astype(np.float32), 1))


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize("with_tree", [False, True])
def test_distributions_cross_the_pair(size: int, with_tree: bool) -> None:
    tree = Draft((4, 5, 6, 7), (-1, -1, 0, 2))
    drafts = [Draft((1, 2, 3)), tree if with_tree else Draft((9,)), NO_DRAFT, Draft((8, 8))]
    slots, rows = table_of(drafts)
    probs = {0: some_probs(3, size), 1: some_probs(3 if with_tree else 1, size, seed=1)}
    table = encode(slots, rows, drafts, probs)
    assert table.shape == (4, STAMP + 5 * (1 + with_tree + 2 * size))
    assert decode(slots, rows, table, VOCAB) == [NO_DRAFT] * 4  # where no distributions are expected
    found = decode(slots, rows, table, VOCAB, DRAFT_PROBS_SIZE)
    assert found == drafts
    received = decode_probs(rows, found, table)
    for slot, expected in probs.items():
        assert received[slot].ids_ML.tolist() == expected.ids_ML.tolist()
        assert received[slot].q_ML.tolist() == expected.q_ML.tolist()
    assert are_valid([drafts[slot] for slot in probs], [received[slot] for slot in probs], VOCAB) == [True, True]


def test_a_draft_without_probabilities_is_never_accepted() -> None:
    drafts = [Draft((1, 2, 3)), Draft((4, 5), (-1, -1))]
    slots, rows = table_of(drafts)
    received = decode_probs(rows, drafts, encode(slots, rows, drafts, {0: some_probs(3, 1)}))
    assert not sampled_children(drafts[1], received[1])[-1].children.q_WL.any()


def test_tables_without_distributions_bring_none_and_too_wide_ones_nothing() -> None:
    drafts = [Draft((1, 2, 3)), Draft((4, 5), (-1, -1))]
    slots, rows = table_of(drafts)
    assert decode_probs(rows, drafts, encode(slots, rows, drafts)) == {}
    wide = np.zeros((2, STAMP + 5 * (3 + 2 * DRAFT_PROBS_SIZE)), np.int32)
    assert decode(slots, rows, wide, VOCAB, DRAFT_PROBS_SIZE) == [NO_DRAFT] * 2


def test_certain_draft_tokens_leave_out_probes_and_what_was_drafted_twice() -> None:
    draft = Draft((4, 5, 4, 6, 7), (-1, -1, -1, 0, 0), (False, False, False, True, False))
    nodes = draft.acceptable_nodes()
    found = deterministic_children(subtree(draft, nodes))
    assert found.keys() == {-1, 0}
    assert (found[-1].ids_L.tolist(), list(found[-1].children.nodes)) == ([4, 5], [0, 1])
    assert [nodes[node] for node in found[0].children.nodes] == [4]


def test_what_a_grammar_forbids_is_left_out_only_where_it_was_not_drawn() -> None:
    """Leaving out sampled tokens for what they are would bias the distribution of the others."""
    slots, rows = table_of([NO_DRAFT] * 3)
    slots.sampling[:] = [Sampling(seed=0), Sampling(seed=0, temperature=0.0), Sampling(seed=0)]
    rows[2] = Row(2, 0, 3, 3, k=2, draft=Draft((7, 8)))
    drafts = [Draft((1, 2)), Draft((3, 4)), Draft((7, 8))]
    sampler: Any = SimpleNamespace(slots=slots, prune=lambda rows, drafts: [NO_DRAFT for _ in drafts])
    assert RejectionSampler(sampler, "standard", samples_drafts=True).prune(rows, drafts) == [
        drafts[0],
        NO_DRAFT,
        NO_DRAFT,
    ]
    assert RejectionSampler(sampler, "block", samples_drafts=False).prune(rows, drafts) == [NO_DRAFT] * 3
