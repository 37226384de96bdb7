"""Learned proposers: drafts equal those of a computation of the whole text, wherever they run."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import assemble
from runtime.core.controller import LocalInbox
from tests.support.distributed.engine import (
    Engine,
    K,
    Models,
    assert_same,
    configure,
    late_comer,
    quick_turns,
    requests,
    threaded,
    tiny_pair,
)
from tests.support.models import tiny_heads
from tests.support.models.tiny_heads import METHODS, NOTES, Twin
from workers.draft import feature_channel
from workers.draft.engine import DraftEngine
from workers.draft.sender import DraftSender
from workers.step_costs import needs_step_costs
from workers.target_rank import UniExecutor

HEADS = tuple(METHODS)
Heads = dict[str, Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return tiny_pair(tmp_path_factory.mktemp("models"), noise=0.02)


@pytest.fixture(scope="module")
def heads(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Heads:
    return {"test_last": tiny_heads.fit(models[0], tmp_path_factory.mktemp("heads") / "last"), "test_all": models[1]}


@pytest.fixture(autouse=True)
def _start() -> Iterator[None]:
    NOTES.clear()
    with quick_turns():
        yield


@pytest.fixture(scope="module")
def plain(models: Models) -> dict[str, list[int]]:
    engine = Engine(
        assemble.build(
            configure(models, draft=False, distributed_executor_backend="uni"), LocalInbox(), report=lambda line: None
        )
    )
    engine.put(*requests())
    outputs = engine.finish()
    assert engine.proposed() == 0
    return outputs


def speculation(heads: Heads, method: str, **keys: Any) -> dict[str, Any]:
    return {"method": METHODS[method], "model": str(heads[method]), "num_speculative_tokens": K, **keys}


def one_process(models: Models, speculative: dict[str, Any], **arguments: Any) -> Engine:
    config = configure(models, speculative_config=speculative, **arguments)
    return Engine(assemble.build(config, LocalInbox(), report=lambda line: None))


def assert_drafts_are_right(models: Models, heads: Heads, method: str, most: int = 60) -> None:
    """Greedy drafts equal the twin's, but for ties of fp32 in at most one of them."""
    twin = Twin(models[0], heads[method])
    again = {"test_last": twin.last, "test_all": twin.all}[method]
    greedy = [note for note in NOTES if note.temperature == 0.0]
    step = max(1, len(greedy) // most)
    wrong = [note for note in greedy[::step] if again(note) != note.draft]
    assert greedy
    assert len(wrong) <= 1, wrong[:3]


@pytest.mark.parametrize("method", HEADS)
def test_in_one_process(models: Models, heads: Heads, plain: dict[str, list[int]], method: str) -> None:
    engine = one_process(models, speculation(heads, method))
    engine.put(*requests())
    assert engine.finish() == plain
    assert engine.proposed() > engine.accepted > 0
    assert_drafts_are_right(models, heads, method)
    assert all(note.first == 0 for note in NOTES)
    assert all(row.k == 0 for plan, _ in engine.rounds for row in plan.rows if row.length > 1), "none without features"


TIGHT: dict[str, Any] = {"num_gpu_blocks_override": 34, "max_num_batched_tokens": 16}
"""Too few blocks for all that run: some are preempted. Prompts are read in pieces."""
BY_SIZE = {"num_speculative_tokens_per_batch_size": [[1, 2, K], [3, 99, 0]]}
"""Off while many rows run, on again when they are few."""


@pytest.mark.parametrize("method", HEADS)
@pytest.mark.parametrize("keys", [{}, BY_SIZE], ids=["on", "off and on"])
def test_preempted_and_resumed(
    models: Models, heads: Heads, plain: dict[str, list[int]], method: str, keys: dict[str, Any]
) -> None:
    engine = one_process(models, speculation(heads, method, **keys), **TIGHT)
    engine.put(*requests())
    assert engine.finish() == plain
    assert engine.built.controller.stats().preemptions > 0
    assert engine.proposed() > engine.accepted > 0
    assert_drafts_are_right(models, heads, method)
    if keys and method == "test_all":
        assert any(note.first > 0 for note in NOTES), "what was computed while speculation was off is not seen"


@pytest.mark.parametrize("method", HEADS)
def test_colocated_with_ranks_that_share_the_target(
    models: Models, heads: Heads, plain: dict[str, list[int]], method: str
) -> None:
    config = configure(
        models, speculative_config=speculation(heads, method, placement="colocated"), tensor_parallel_size=2
    )
    engine = threaded(config)
    try:
        engine.put(*requests(4, 20))
        assert_same(engine.finish(), plain)
    finally:
        engine.built.shutdown()
    assert engine.proposed() > engine.accepted > 0
    assert not engine.drafted
    assert_drafts_are_right(models, heads, method)


@pytest.mark.parametrize("method", HEADS)
def test_on_a_worker_of_its_own_that_is_replaced(
    models: Models, heads: Heads, plain: dict[str, list[int]], method: str
) -> None:
    may_come = threading.Event()
    config = configure(models, speculative_config=speculation(heads, method, placement="dedicated"))
    engine = threaded(config, body=late_comer(may_come))
    assert engine.workers is not None
    try:
        engine.put(*requests())
        engine.until(lambda: engine.accepted >= 3)
        engine.workers.newest("draft").crash()
        engine.until(lambda: not engine.built.executor.drafting.is_up)
        lost = len(engine.rounds)
        engine.until(lambda: len(engine.rounds) > lost + 3)
        assert engine.proposed(lost) == 0
        revived, notes = len(engine.rounds), len(NOTES)
        may_come.set()
        engine.until_drafting(epoch=2)
        assert engine.finish() == plain
    finally:
        engine.built.shutdown()
    assert engine.proposed(revived) > 0
    assert engine.missed <= 1
    assert_drafts_are_right(models, heads, method)
    if method == "test_all":
        assert any(note.first > 0 for note in NOTES[notes:]), "a new draft has not seen earlier tokens"


@pytest.mark.parametrize("method", HEADS)
def test_a_warm_up_leaves_nothing(models: Models, heads: Heads, plain: dict[str, list[int]], method: str) -> None:
    engine = one_process(models, speculation(heads, method))
    executor = engine.built.executor
    assert isinstance(executor, UniExecutor)
    assert isinstance(executor.rank.source, DraftEngine)
    costs = dict(executor.rank.source.measure(3, K))
    assert set(costs) == {1, 2, 3}
    assert min(costs.values()) > 0.0
    NOTES.clear()
    engine.put(*requests(3))
    assert_same(engine.finish(), plain)
    assert_drafts_are_right(models, heads, method, most=20)


def test_rank_0_measures_the_draft_beside_it(models: Models, heads: Heads) -> None:
    config = configure(
        models,
        speculative_config=speculation(heads, "test_last", placement="colocated", policy="threshold"),
        tensor_parallel_size=2,
        enforce_eager=False,
    )  # a share of a model is not compiled
    engine = threaded(config)
    engine.built.shutdown()
    costs = engine.built.info.costs
    assert costs is not None
    assert set(costs.draft_s) == {1, 2, 4}


def test_costs_are_measured_where_somebody_asks(models: Models, heads: Heads) -> None:
    asks = speculation(heads, "test_last")
    derives, adapts = {**asks, "policy": "threshold"}, {**asks, "policy": "adaptive"}
    assert needs_step_costs(configure(models, speculative_config=derives, enforce_eager=False))
    assert needs_step_costs(configure(models, speculative_config=adapts, enforce_eager=True))
    for option in ({"disable_by_batch_size": 4}, BY_SIZE, {"policy": "fixed"}):
        assert not needs_step_costs(configure(models, speculative_config={**asks, **option}, enforce_eager=False))
    assert not needs_step_costs(configure(models, speculative_config=derives, enforce_eager=True))
    assert not needs_step_costs(configure(models, draft=False, enforce_eager=False))


def test_features_that_are_not_acknowledged_are_no_longer_sent(
    models: Models, heads: Heads, plain: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    are_lost, acknowledge = threading.Event(), DraftSender.acknowledge
    monkeypatch.setattr(
        DraftSender, "acknowledge", lambda end, count: None if are_lost.is_set() else acknowledge(end, count)
    )
    engine = threaded(configure(models, speculative_config=speculation(heads, "test_all", placement="dedicated")))
    try:
        engine.put(*requests(3)[1:])  # greedy ones: which rows get the few drafts depends on the threads
        engine.until(lambda: engine.proposed() > 0)
        are_lost.set()
        first = len(engine.rounds) + feature_channel.CREDIT + 4
        assert_same(engine.finish(), plain)
    finally:
        engine.built.shutdown()
    assert len(engine.rounds) > first
    assert engine.proposed(first) == 0, "rows whose features are lost get no drafts"
    assert engine.changes == {"started": 1}
    assert_drafts_are_right(models, heads, "test_all", most=20)
