"""Methods of a draft's module: which graphs are compiled, what they are given, and that they compute the same."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from workers.compile import CompileError, Weights, padded_size
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


Compiled = list[tuple[bool, list[tuple[int, ...]]]]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """What was compiled: whether for one token, and the shapes of every later call."""
    found: Compiled = []

    def compile_call(
        call: Callable[..., Any], inputs: list[torch.Tensor], weights: Weights, *, is_single: bool
    ) -> Callable[..., Any]:
        shapes: list[tuple[int, ...]] = []
        found.append((is_single, shapes))

        def run(*tensors: torch.Tensor) -> Any:
            shapes.append(tuple(tensors[0].shape))
            return call(*tensors)

        return run

    monkeypatch.setattr(methods, "compile_call", compile_call)
    return found


def states(count: int) -> torch.Tensor:
    return torch.randn(count, H, generator=torch.Generator().manual_seed(count))


@torch.inference_mode()
def test_one_graph_for_one_token_and_one_for_more_of_each_variant(compiled: Compiled) -> None:
    plain, module = Heads(), Methods(Heads())
    with module.compiling(WEIGHTS):
        for step in range(4):
            for count in (1, 3, 5):
                module.logits(states(count), step)
    assert sorted(is_single for is_single, _ in compiled) == [False, False, True, True]
    count = 33
    assert padded_size(count) > count
    for step, size in ((0, count), (1, count), (3, 1)):
        assert torch.equal(module.logits(states(size), step), plain.logits(states(size), step % 2))
    assert [shapes[-1] for is_single, shapes in compiled if not is_single] == [(padded_size(count), H)] * 2
    assert module.summary() == "compiled 4 graphs"


@torch.inference_mode()
def test_nothing_is_compiled_once_requests_are_served(compiled: Compiled) -> None:
    module = Methods(Heads())
    with module.compiling(WEIGHTS):
        module.logits(states(1), 0)
    module.logits(states(3), 0)
    module.logits(states(1), 1)
    module.twice(states(3))
    assert len(compiled) == 1


@torch.inference_mode()
def test_the_forward_is_padded_along_its_tokens(compiled: Compiled) -> None:
    plain, module = Heads(), Methods(Heads())
    with module.compiling(WEIGHTS):
        module(torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64), states(3)[None])
    tokens_1T = torch.arange(33)[None] % 11
    features_1TH = states(33)[None]
    found_1TH = module(tokens_1T, tokens_1T, features_1TH)
    assert torch.equal(found_1TH, plain(tokens_1T, tokens_1T, features_1TH))
    assert compiled[0][1][-1] == (1, padded_size(33))


@torch.inference_mode()
def test_what_fails_runs_eager_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise CompileError("no way")

    monkeypatch.setattr(methods, "compile_call", fails)
    plain, module = Heads(), Methods(Heads())
    with module.compiling(WEIGHTS):
        assert torch.equal(module.logits(states(3), 1), plain.logits(states(3), 1))
    assert module.summary() == "compiled 0 graphs; some methods run eager: logits: no way"


@pytest.mark.full
@torch.inference_mode()
def test_compiled_equals_eager() -> None:
    plain, module = Heads(), Methods(Heads())
    with module.compiling(WEIGHTS):
        for count in (1, 3):
            module.logits(states(count), 1)
    assert module.summary() == "compiled 2 graphs"
    for count in (1, 2, 7, 33):
        torch.testing.assert_close(module.logits(states(count), 1), plain.logits(states(count), 1))
