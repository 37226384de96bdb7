"""Methods of a draft's module: which graphs are compiled, what they are given, and that they compute the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from workers.compile import CompileError, Weights, padded_size
from workers.compiled.graphs import Input
from workers.model import methods
from workers.model.methods import Methods

H = 8
WEIGHTS = Weights(torch.float32, 1 << 10, 1 << 40)


class Heads(nn.Module):
    """Two heads, and a layer over features."""

    compiled_methods: ClassVar[dict[str, int]] = {"forward": 1, "logits": 2}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(nn.Linear(H, 5) for _ in range(2))
        self.embed = nn.Embedding(11, H)

    def forward(
        self, tokens_1T: torch.Tensor, positions_1T: torch.Tensor, features_1TH: torch.Tensor | None
    ) -> torch.Tensor:
        embedded_1TH: torch.Tensor = self.embed(tokens_1T)
        return embedded_1TH if features_1TH is None else embedded_1TH + features_1TH

    def logits(self, states_NH: torch.Tensor, head: int) -> torch.Tensor:
        logits_NV: torch.Tensor = self.heads[head](states_NH)
        return logits_NV

    def twice(self, states_NH: torch.Tensor) -> torch.Tensor:
        return states_NH * 2


class Library:
    """Compiled graphs of a folder, which are the eager functions; notes the shapes of their inputs."""

    def __init__(self) -> None:
        self.calls: dict[str, Callable[..., Any]] = {}
        self.inputs: dict[str, list[Input]] = {}
        self.shapes: dict[str, list[tuple[int, ...]]] = {}
        self.off_by = 0.0

    def compile_graph(
        self, folder: Path, name: str, call: Callable[..., Any], inputs: list[Input], weights: Weights, *, single: bool
    ) -> None:
        self.calls[name], self.inputs[name], self.shapes[name] = call, inputs, []
        assert single == name.endswith("one")

    def load_graph(self, folder: Path, name: str) -> Callable[..., Any]:
        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            self.shapes[name].append(tuple(tensors[0].shape))
            return [self.calls[name](*tensors) + self.off_by]

        return run


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(methods, "compile_graph", made.compile_graph)
    monkeypatch.setattr(methods, "load_graph", made.load_graph)
    monkeypatch.setattr(methods, "read_index", lambda folder: made.inputs)
    return made


def states(count: int) -> torch.Tensor:
    return torch.randn(count, H, generator=torch.Generator().manual_seed(count))


def load(module: Methods) -> None:
    module.compile_into(Path(), WEIGHTS)
    module.load(Path(), lambda call, count: call(), torch.float32)


@torch.inference_mode()
def test_one_graph_for_one_token_and_one_for_more_of_each_variant(library: Library) -> None:
    plain, module = Heads(), Methods(Heads())
    with module.watched():
        for step in range(2):
            for count in (1, 3, 5):
                module.logits(states(count), step)
    load(module)
    assert sorted(library.calls) == ["logits-0-any", "logits-0-one", "logits-1-any", "logits-1-one"]
    count = 33
    assert padded_size(count) > count
    for step, size in ((0, count), (1, count), (3, 1)):
        assert torch.equal(module.logits(states(size), step), plain.logits(states(size), step % 2))
    assert [library.shapes[f"logits-{step}-any"][-1] for step in range(2)] == [(padded_size(count), H)] * 2
    assert library.shapes["logits-1-one"][-1] == (1, H)


@torch.inference_mode()
def test_what_was_not_seen_in_a_trial_runs_eager(library: Library) -> None:
    module = Methods(Heads())
    with module.watched():
        module.logits(states(1), 0)
    load(module)
    before = {name: len(shapes) for name, shapes in library.shapes.items()}
    module.logits(states(3), 0)
    module.logits(states(1), 1)
    module.twice(states(3))
    assert {name: len(shapes) for name, shapes in library.shapes.items()} == before


@pytest.mark.parametrize("has_features", [False, True])
@torch.inference_mode()
def test_the_forward_is_padded_along_its_tokens(library: Library, has_features: bool) -> None:
    plain, module = Heads(), Methods(Heads())
    few_1T, many_1T = torch.zeros(1, 3, dtype=torch.int64), torch.arange(33)[None] % 11
    with module.watched():
        module(few_1T, few_1T, states(3)[None] if has_features else None)
    load(module)
    features_1TH = states(33)[None] if has_features else None
    found_1TH = module(many_1T, many_1T, features_1TH)
    assert torch.equal(found_1TH, plain(many_1T, many_1T, features_1TH))
    assert library.shapes["forward-any"][-1] == (1, padded_size(33))


@torch.inference_mode()
def test_other_results_than_eager_are_refused(library: Library) -> None:
    plain, module = Heads(), Methods(Heads())
    with module.watched():
        module.logits(states(3), 1)
    library.off_by = 0.1
    with pytest.raises(CompileError, match="differ from eager"):
        load(module)
    assert torch.equal(module.logits(states(3), 1), plain.logits(states(3), 1))
