"""Traced operators under `batch_invariant`: the same bits, or no trace."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed.ranks import in_memory
from tests.support.models.invariant_model import (
    LENGTH,
    VOCAB,
    Model,
    check,
    on_two_ranks,
    ways,
)
from tests.support.models.tiny_models import FAMILIES, build
from workers.distributed.groups import Group
from workers.invariant import trace as invariant

pytestmark = pytest.mark.usefixtures("one_thread")


def traced(folder: Path) -> None:
    model, looked_at = Model(folder), Model(folder)
    note = model.runner.warm_up()
    assert note.startswith("batch-invariant, ")
    assert "operators traced in" in note
    check(ways(model), looked_at.feed([(0, 0, LENGTH)])[0])


@pytest.mark.parametrize("family", ["llama"])
def test_a_list_of_operators_says_the_same_bits(family: str, tmp_path: Path) -> None:
    traced(build(family, tmp_path, vocab_size=VOCAB, num_hidden_layers=1))


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=() if family in {"llama", "mixtral"} else pytest.mark.full) for family in FAMILIES],
)
def test_so_do_lists_of_two_ranks(family: str, tmp_path: Path) -> None:
    on_two_ranks(build(family, tmp_path, vocab_size=VOCAB), is_listed=True)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_a_list_of_operators_says_the_same_bits_for_every_family(family: str, tmp_path: Path) -> None:
    traced(build(family, tmp_path, vocab_size=VOCAB))


def test_an_input_taken_for_another_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing distinguishes tensors by identity: positions that are the tokens' tensor are read as tokens."""
    traces = invariant.make_fx

    def confuse(forward: Callable[..., object], **options: object) -> Callable[..., object]:
        return lambda tokens, positions, wanted: traces(forward, **options)(tokens, tokens, wanted)

    monkeypatch.setattr(invariant, "make_fx", confuse)
    model = Model(build("llama", tmp_path, vocab_size=VOCAB, num_hidden_layers=1))
    expected = model.feed([(0, 0, LENGTH)])[0]
    assert model.runner.warm_up() == "batch-invariant, every operator checked: traced logits differ"
    check(ways(model), expected)


def test_a_rank_that_cannot_list_takes_part_in_the_others_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build("llama", tmp_path, vocab_size=VOCAB, num_hidden_layers=1)
    expected = Model(folder).feed([(0, 0, LENGTH)])[0]
    lists = invariant._trace
    taken: list[str] = []

    def for_one(*given: Any) -> Any:
        taken.append("")
        return lists(*given) if len(taken) == 1 else (None, "tracing failed: made up")

    monkeypatch.setattr(invariant, "_trace", for_one)

    def work(group: Group) -> tuple[str, torch.Tensor]:
        model = Model(folder, group=group)
        return model.runner.warm_up(), model.feed([(0, 0, LENGTH)])[0]

    found = in_memory(2, work)
    notes = sorted(note for note, _ in found)
    assert "operators traced in" in notes[0]
    assert notes[1] == "batch-invariant, every operator checked: tracing failed: made up"
    check({"prefill": found[0][1]}, expected)


def test_a_list_that_is_wrong_on_a_rank_without_logits_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build("llama", tmp_path, vocab_size=VOCAB, num_hidden_layers=1)
    expected = Model(folder).feed([(0, 0, LENGTH)])[0]
    traces, here = invariant.make_fx, threading.local()

    def confuse(forward: Callable[..., object], **options: object) -> Callable[..., object]:
        trace = traces(forward, **options)
        return lambda tokens, positions, wanted: trace(tokens, tokens if here.rank else positions, wanted)

    monkeypatch.setattr(invariant, "make_fx", confuse)

    def work(group: Group) -> tuple[str, torch.Tensor]:
        here.rank = group.rank
        model = Model(folder, group=group)
        return model.runner.warm_up(), model.feed([(0, 0, LENGTH)])[0]

    found = in_memory(2, work)
    assert {note for note, _ in found} == {"batch-invariant, every operator checked: traced logits differ"}
    check({"prefill": found[0][1]}, expected)
