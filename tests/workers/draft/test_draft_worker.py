"""What the draft's cache holds is tracked exactly: never trusted where it is wrong, never recomputed where right."""

import logging
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protos.draft import DraftRow
from slipstream import SamplingParams
from tests.support.identity import CROWDED, generate
from tests.support.models.tiny_models import build
from workers.draft.cache import BlockValidity
from workers.draft.worker import DraftWorker


def mark(validity: BlockValidity, *marks: tuple[int, int, int, int]) -> None:
    """Mark blocks at once, each given as block, version, first and end."""
    validity.mark(*np.array(marks).T)


def test_a_prefix_is_held_as_far_as_versions_agree_and_blocks_are_full() -> None:
    validity = BlockValidity(num_blocks=8, block_size=4)
    mark(validity, (3, 1, 0, 4), (5, 1, 0, 4), (6, 1, 0, 2))
    assert validity.prefix([3, 5, 6], [1, 1, 1]) == 10
    assert validity.prefix([3, 5, 7], [1, 1, 1]) == 8
    assert validity.prefix([3, 5, 6], [1, 2, 1]) == 4
    assert validity.prefix([2], [1]) == 0


def test_marking_goes_on_where_it_stopped_within_a_block() -> None:
    validity = BlockValidity(num_blocks=4, block_size=4)
    mark(validity, (0, 1, 0, 3))
    assert validity.prefix([0, 1], [1, 1]) == 3
    mark(validity, (0, 1, 3, 4), (1, 1, 0, 2))
    assert validity.prefix([0, 1], [1, 1]) == 6


def test_a_block_given_to_other_content_is_forgotten() -> None:
    validity = BlockValidity(num_blocks=2, block_size=4)
    mark(validity, (0, 1, 0, 4))
    mark(validity, (0, 2, 0, 1))
    assert validity.prefix([0], [1]) == 0
    assert validity.prefix([0], [2]) == 1


RUNS = st.tuples(st.integers(0, 5), st.integers(1, 2), st.integers(0, 4), st.integers(0, 4)).map(
    lambda run: (run[0], run[1], min(run[2:]), max(run[2:]))
)


@given(st.lists(st.lists(RUNS, min_size=1, max_size=6), max_size=6))
def test_blocks_marked_at_once_are_those_marked_one_by_one(rounds: list[list[tuple[int, int, int, int]]]) -> None:
    # Sequences with a common prefix name the same block.
    at_once, one_by_one = BlockValidity(6, 4), BlockValidity(6, 4)
    for marks in rounds:
        mark(at_once, *marks)
        for each in marks:
            mark(one_by_one, each)
    for block, version in product(range(6), (1, 2)):
        assert at_once.prefix([block], [version]) == one_by_one.prefix([block], [version])
        for end in range(5):
            assert at_once.run_before([block], [version], end) == one_by_one.run_before([block], [version], end)


@pytest.mark.parametrize("table", [None, [[1, 3, 3], [4, 99, 0]]], ids=["always on", "on and off by batch size"])
def test_a_draft_that_is_the_target_is_never_wrong(table: list[list[int]] | None, tmp_path: Path) -> None:
    # Any position whose draft KV were stale, missing or another sequence's would show as a rejection. Shared
    # prefixes, chunked prompts, preemption and rounds without speculation all leave gaps to be found and filled.
    model = build("llama", tmp_path / "target")
    rng = random.Random(1)
    shared = [rng.randrange(3, 90) for _ in range(21)]
    prompts = [shared + [rng.randrange(3, 90) for _ in range(1 + 5 * i)] for i in range(6)]
    params = [SamplingParams(temperature=0.0, max_tokens=10 + 9 * i, ignore_eos=True) for i in range(6)]
    speculative: dict[str, object] = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    if table:
        speculative["num_speculative_tokens_per_batch_size"] = table
    run = generate(
        model,
        prompts * 2,
        params * 2,
        **CROWDED,
        speculative_config=speculative,
    )
    assert run.preemptions > 0
    assert run.accepted == run.proposed > 50


PROMPTS = [[7, 8, 9, 7, 8], [90, 60, 61, 95, 62, 63]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def test_a_draft_of_a_smaller_vocabulary_reads_ids_it_lacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = build("llama", tmp_path / "target")
    small = build("llama", tmp_path / "small", vocab_size=64)
    off = generate(target, PROMPTS, GREEDY, max_model_len=64)
    draft = {"method": "draft_model", "model": str(small), "num_speculative_tokens": 3}
    on = generate(target, PROMPTS, GREEDY, max_model_len=64, speculative_config=draft)
    assert on.outputs == off.outputs
    assert on.proposed > 0
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_draft_that_fails_costs_draft_tokens_and_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = build("llama", tmp_path / "target")
    off = generate(model, PROMPTS, GREEDY, max_model_len=64)
    extend, calls = DraftWorker.extend, []

    def failing(self: DraftWorker, rows: Sequence[DraftRow], token_ids: torch.Tensor, step: int) -> torch.Tensor:
        calls.append(step)
        if len(calls) % 3 == 0:
            raise RuntimeError("out of memory")
        return extend(self, rows, token_ids, step)

    monkeypatch.setattr(DraftWorker, "extend", failing)
    draft = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 4}
    on = generate(model, PROMPTS, GREEDY, max_model_len=64, speculative_config=draft)
    assert on.outputs == off.outputs
    assert on.accepted == on.proposed > 0
    assert "the draft failed" in caplog.text
