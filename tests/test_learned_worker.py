"""Learned proposers get what they ask for: drafts are what a computation of the whole text says, wherever they run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import assemble
from proposers import registry
from runtime.controller import LocalInbox
from tests import tiny_heads
from tests.gang_engine import Engine, K, Models, assert_same, configure, quick_turns, requests, threaded, tiny_pair
from tests.tiny_heads import METHODS, NOTES, Twin

HEADS = tuple(METHODS)
Heads = dict[str, Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return tiny_pair(tmp_path_factory.mktemp("models"), noise=0.02)


@pytest.fixture(scope="module")
def heads(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Heads:
    return {"test_last": tiny_heads.fit(models[0], tmp_path_factory.mktemp("heads") / "last"), "test_all": models[1]}


@pytest.fixture(autouse=True)
def _methods(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, path in METHODS.items():
        monkeypatch.setitem(registry._PROPOSERS, name, path)
    NOTES.clear()
    with quick_turns():
        yield


@pytest.fixture(scope="module")
def plain(models: Models) -> dict[str, list[int]]:
    engine = Engine(assemble.build(configure(models, draft=False, distributed_executor_backend="uni"), LocalInbox(),
                                   say=lambda line: None))
    engine.put(*requests())
    outputs = engine.finish()
    assert engine.proposed() == 0
    return outputs


def speculation(heads: Heads, method: str, **keys: Any) -> dict[str, Any]:
    return {"method": method, "model": str(heads[method]), "num_speculative_tokens": K, **keys}


def one_process(models: Models, speculative: dict[str, Any], **arguments: Any) -> Engine:
    config = configure(models, speculative_config=speculative, **arguments)
    return Engine(assemble.build(config, LocalInbox(), say=lambda line: None))


def assert_drafts_are_right(models: Models, heads: Heads, method: str, most: int = 60) -> None:
    """Greedy drafts are what the twin says, but for ties of fp32 in at most one of them."""
    twin = Twin(models[0], heads[method])
    again = {"test_last": twin.last, "test_all": twin.all}[method]
    greedy = [note for note in NOTES if note.temperature == 0.0]
    step = max(1, len(greedy) // most)
    wrong = [note for note in greedy[::step] if again(note) != note.draft]
    assert len(greedy) > 10
    assert len(wrong) <= 1, wrong[:3]


@pytest.mark.parametrize("method", HEADS)
def test_in_one_process(models: Models, heads: Heads, plain: dict[str, list[int]], method: str) -> None:
    engine = one_process(models, speculation(heads, method))
    engine.put(*requests())
    assert engine.finish() == plain
    assert engine.proposed() > engine.accepted > 0
    assert_drafts_are_right(models, heads, method)
    assert all(note.first == 0 for note in NOTES)
