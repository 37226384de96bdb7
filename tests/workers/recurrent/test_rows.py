"""Families with recurrent layers, over rows that continue and roll back, against the plain `transformers` forward."""

from pathlib import Path

import numpy as np
import pytest
import torch

from protos.config.engine import ModelConfig
from protos.errors import ConfigError, ModelError
from tests.support.distributed.ranks import in_memory
from tests.support.models.tiny_models import build
from tests.support.recurrent.rows import chunked, drafted, feed, runner_of, sequences
from tests.support.recurrent.tiny_hybrids import HYBRIDS, SPLIT, UNSPLIT
from tests.workers.model.test_models import reference_logits
from workers.distributed.groups import Group
from workers.model.loader import load
from workers.model.self_check import self_check

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = ("qwen3_next", "granitemoehybrid", "nemotron_h", "kimi_linear")
TOLERANCE = 2e-4
"""Of a logit in fp32, relative to the largest: `transformers`' chunks and single tokens differ by 1e-4."""


def close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.shape == reference.shape
        assert torch.isfinite(mine).all()
        assert (mine - reference).abs().max() <= TOLERANCE * max(1.0, reference.abs().max().item())


@pytest.fixture(autouse=True)
def _same_weights() -> None:
    """Draw the same random weights in any order of tests: with 1 set in 12, `transformers`' forms differ by 3e-4."""
    torch.manual_seed(0)


@pytest.mark.parametrize("family", HYBRIDS)
def test_chunks_and_rolled_back_drafts_equal_the_plain_forward(family: str, tmp_path: Path) -> None:
    rows = sequences()
    folder = build(family, tmp_path)
    theirs = reference_logits(folder, rows, "eager")
    runner = runner_of(folder, rows)
    close(chunked(runner, rows), theirs)
    close(drafted(runner, rows), [reference[2:-1] for reference in theirs])


@pytest.mark.parametrize(
    "family", [family if family in QUICK else pytest.param(family, marks=pytest.mark.full) for family in SPLIT]
)
def test_two_ranks_equal_one(family: str, tmp_path: Path) -> None:
    rows = sequences()
    folder = build(family, tmp_path)

    def work(group: Group) -> list[torch.Tensor]:
        runner = runner_of(folder, rows, group)
        self_check(runner.loaded, family)
        return chunked(runner, rows)

    close(in_memory(2, work)[0], reference_logits(folder, rows, "eager"))


@pytest.mark.parametrize("family", UNSPLIT)
def test_models_without_attention_are_not_split(family: str, tmp_path: Path) -> None:
    folder = build(family, tmp_path)
    with pytest.raises(ModelError, match=f"'{family}' has no plan for tensor parallelism; use tensor_parallel_size=1"):
        in_memory(2, lambda group: runner_of(folder, sequences(), group))


def test_a_slot_begins_anew_at_position_0(tmp_path: Path) -> None:
    rows = sequences()
    runner = runner_of(build("qwen3_next", tmp_path), rows)
    (first,) = feed(runner, [1], [0], [20])
    feed(runner, [0], [0], [20])
    runner.slots.tokens[0] = runner.slots.tokens[1]
    runner.slots.known_len[0] = runner.slots.known_len[1]
    (again,) = feed(runner, [0], [0], [20])
    assert torch.allclose(first, again, atol=1e-4)


def test_a_position_whose_state_is_not_kept(tmp_path: Path) -> None:
    runner = runner_of(build("lfm2", tmp_path), sequences())
    feed(runner, [1], [0], [21])
    feed(runner, [1], [20], [1])
    with pytest.raises(RuntimeError, match="slot 1 is to continue after position 12, but"):
        feed(runner, [1], [12], [1])
    with pytest.raises(RuntimeError, match="slot 0 is to continue after position 5, but"):
        feed(runner, [0], [5], [1])


def test_measuring_does_not_touch_the_states_of_requests(tmp_path: Path) -> None:
    rows = sequences()
    runner = runner_of(build("granitemoehybrid", tmp_path), rows)
    feed(runner, [0, 1], [0, 0], [37, 21])
    expected = feed(runner, [0, 1], [36, 20], [1, 1])
    assert runner.measure_size(8) > 0
    assert all(map(torch.equal, feed(runner, [0, 1], [36, 20], [1, 1]), expected))


def test_a_draft_resumes_where_a_state_is_kept(tmp_path: Path) -> None:
    runner = runner_of(build("bamba", tmp_path), sequences())

    def resumes_at(generation: int, held: int) -> int:
        return int(runner.resumes_at(np.array([1]), np.array([generation]), np.array([held]))[0])

    assert resumes_at(7, held=21) == 0
    feed(runner, [1], [0], [21])
    assert resumes_at(7, held=21) == 21
    assert resumes_at(7, held=20) == 20
    assert resumes_at(7, held=19) == 0
    assert resumes_at(8, held=21) == 0, "another sequence"


def test_batch_invariant_is_refused_by_name(tmp_path: Path) -> None:
    folder = build("lfm2", tmp_path)
    with pytest.raises(ConfigError, match=r"batch_invariant: .*'lfm2'.* recurrent layers"):
        load(ModelConfig(model=str(folder), batch_invariant=True))


def test_states_are_counted_in_bytes(tmp_path: Path) -> None:
    loaded = load(ModelConfig(model=str(build("qwen3_next", tmp_path)), dtype="bfloat16"))
    shape = loaded.recurrent[0]
    assert (shape.conv, shape.conv_dtype) == ((2 * 2 * 6 + 4 * 8, 3), torch.bfloat16)
    assert (shape.scan, shape.scan_dtype) == ((4, 6, 8), torch.float32)
    assert shape.num_bytes == 2 * 3 * 56 + 4 * np.prod(shape.scan)
    assert any("2 recurrent layers: 2208 bytes a state" in note for note in loaded.notes)
