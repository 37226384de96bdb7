"""Rounds that are run only to measure what they cost: half of the draft tokens are accepted, whatever they are."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from cluster.simulate.made_up import HalfAccepted
from protos.draft import Draft
from protos.messages import Row
from workers.verification.acceptance import Scored

CHAIN, TREE = Draft((11, 12, 13)), Draft((11, 21, 12, 22), (-1, -1, 0, 1))
ROUNDS = 4000


class Slots:
    """Notes the draft tokens that were written to each slot."""

    def __init__(self) -> None:
        self.written: dict[int, list[int]] = {}

    def write_draft(self, slot: int, tokens: list[int]) -> None:
        self.written[slot] = tokens


class FakeSampler:
    """Samples the number of each position, counted from 100."""

    def __init__(self) -> None:
        self.slots = Slots()

    def sample(self, logits_NV: torch.Tensor, slots_N: Any, index_N: Any) -> torch.Tensor:
        return torch.arange(100, 100 + len(logits_NV))


def scored(draft: Draft) -> Scored:
    """Return a round of two rows, of which the first one reads a prompt and the second one drafts."""
    count = 1 + len(draft)
    rows = [Row(0, 0, 4, 9), Row(1, 8, 1, 9, len(draft))]
    places = np.arange(count)
    return Scored(
        rows, [Draft(()), draft], np.array([0, count]), torch.zeros(count, 4), np.ones(count, np.int64), places, False
    )


@pytest.mark.parametrize("draft", [CHAIN, TREE], ids=["chain", "tree"])
def test_every_number_of_levels_is_accepted_equally_often(draft: Draft) -> None:
    """By a chi-squared test with a false-alarm rate of 1e-4 for the chain, which has three degrees of freedom."""
    sampler = FakeSampler()
    rule, lengths = HalfAccepted(sampler), Counter[int]()  # type: ignore[arg-type]
    for _ in range(ROUNDS):
        [(path, emitted)] = rule.accept(scored(draft))
        parents = draft.node_parents()
        assert [parents[node] for node in path] == [-1, *path][: len(path)]  # from the root down
        tokens = [draft.tokens[node] for node in path]
        assert emitted == [*tokens, 101 + path[-1] if path else 100]
        assert sampler.slots.written[1] == tokens
        lengths[len(path)] += 1
    expected = ROUNDS / (1 + max(draft.depths()))
    assert sum((count - expected) ** 2 / expected for count in lengths.values()) < 21.1
    assert sorted(lengths) == list(range(1 + max(draft.depths())))
