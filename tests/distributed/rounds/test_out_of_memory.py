"""Out of memory in each phase of a round: requests finish, nothing is lost, and no token changes."""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cluster import assemble
from runtime.core.controller import LocalInbox
from runtime.supervision.target_supervisor import TargetSupervisor
from tests.support.distributed import fake_nccl
from tests.support.distributed.engine import Engine, K, Models, StartEngine, assert_same, configure, requests, threaded
from tests.support.models.tiny_heads import METHODS
from workers.attention.kv import KVCache
from workers.draft.cache import DraftCache
from workers.draft.worker import DraftWorker
from workers.model.runner import ModelRunner
from workers.sampling.sampler import Sampler
from workers.target import TargetWorker
from workers.verification.acceptance import SampleAndMatch

FAILING = {0, 4, 10}
"""Calls that run out of memory: not so many that steps shrink to a single token."""


class Shortage:
    """Lets calls run out of memory when they have done their work, those of `FAILING`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.count = 0

    def in_calls_of(self, owner: Any, name: str, applies: Callable[..., bool] = lambda *_: True) -> None:
        call: Callable[..., Any] = getattr(owner, name)
        calls = itertools.count()

        def lacking(*arguments: Any, **keys: Any) -> Any:
            found = call(*arguments, **keys)
            if applies(*arguments) and next(calls) in FAILING:
                self.count += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines.")
            return found

        self._monkeypatch.setattr(owner, name, lacking)


@pytest.fixture
def shortage(monkeypatch: pytest.MonkeyPatch) -> Shortage:
    return Shortage(monkeypatch)


def in_thread(name: str) -> bool:
    return threading.current_thread().name.startswith(name)


def prefills(_runner: ModelRunner, _forward: Any, batch: Any, *_: Any) -> bool:
    return int(batch.lengths_R.max()) > K + 1


def decodes(_runner: ModelRunner, _forward: Any, batch: Any, *_: Any) -> bool:
    return bool((batch.starts_R > 0).all()) and int(batch.lengths_R.max()) == 1


def verifies(_runner: ModelRunner, _forward: Any, batch: Any, *_: Any) -> bool:
    return bool((batch.starts_R > 0).all()) and int(batch.lengths_R.max()) == K + 1


def is_large(_runner: ModelRunner, _forward: Any, batch: Any, *_: Any) -> bool:
    return bool((batch.starts_R > 0).all()) and len(batch.tokens_T) > 1


TARGET_PHASES: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "layout": (TargetWorker, "_lay_out", lambda *_: True),
    "prefill": (ModelRunner, "_call", prefills),
    "decode": (ModelRunner, "_call", decodes),
    "verify": (ModelRunner, "_call", verifies),
    "sampling": (Sampler, "sample", lambda *_: True),
    "acceptance": (SampleAndMatch, "accept", lambda *_: True),
}
DRAFT_PHASES: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "draft prefill": (DraftCache, "feed", lambda _cache, _slots, first, end: bool(((end - first) > 2).any())),
    "draft catch-up": (DraftCache, "feed", lambda *_: True),
    "draft loop": (DraftWorker, "extend", lambda *_: True),
}
FEATURE_PHASES: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "features": (TargetWorker, "kept_features", lambda *_: True),
    "features taken": (DraftWorker, "receive", lambda *_: True),
}


def speculation(models: Models, method: str, **options: Any) -> dict[str, Any]:
    named = {"method": METHODS[method], "model": str(models[1])} if method in METHODS else {"model": str(models[1])}
    return {"method": method, "num_speculative_tokens": K, **named, **options}


def one_process(models: Models, method: str = "draft_model", **options: Any) -> Engine:
    config = configure(
        models, speculative_config=speculation(models, method, **options), distributed_executor_backend="uni"
    )
    return Engine(assemble.build(config, LocalInbox(), report=lambda line: None))


def assert_finishes(engine: Engine, plain: dict[str, list[int]], shortage: Shortage) -> None:
    try:
        asked = requests(4, 12)
        engine.put(*asked)
        outputs = engine.finish()
    finally:
        engine.built.shutdown()
    assert_same(outputs, plain)
    assert {name: len(ids) for name, ids in outputs.items()} == {each.request_id: each.max_tokens for each in asked}
    assert shortage.count > 0
    assert set(engine.reasons.values()) == {"length"}


@pytest.mark.parametrize("phase", [*TARGET_PHASES, *DRAFT_PHASES])
def test_an_engine_in_one_process(models: Models, plain: dict[str, list[int]], shortage: Shortage, phase: str) -> None:
    engine = one_process(models)
    shortage.in_calls_of(*(TARGET_PHASES | DRAFT_PHASES)[phase])
    assert_finishes(engine, plain, shortage)


@pytest.mark.parametrize("phase", ["features", "features taken", "verify"])
def test_a_draft_that_reads_features(
    models: Models, plain: dict[str, list[int]], shortage: Shortage, phase: str
) -> None:
    engine = one_process(models, "test_all")
    shortage.in_calls_of(*(TARGET_PHASES | FEATURE_PHASES)[phase])
    assert_finishes(engine, plain, shortage)


def test_moves_of_a_tree(models: Models, plain: dict[str, list[int]], shortage: Shortage) -> None:
    """A move that was done in part cannot be repeated: everything is computed again."""
    engine = one_process(models, speculative_token_tree=str([(0,), (1,), (0, 0)]))
    shortage.in_calls_of(KVCache, "move")
    assert_finishes(engine, plain, shortage)
    assert engine.accepted > 0


@pytest.mark.parametrize("phase", ["prefill", "verify", "sampling", "draft loop", "draft catch-up"])
def test_a_worker_group(start_engine: StartEngine, plain: dict[str, list[int]], shortage: Shortage, phase: str) -> None:
    """The draft is on a worker of its own; no worker is replaced, and none leaves its group."""
    engine = start_engine()
    owner, name, applies = (TARGET_PHASES | DRAFT_PHASES)[phase]
    role = "draft" if phase in DRAFT_PHASES else "target"
    shortage.in_calls_of(owner, name, lambda *given: in_thread(role) and applies(*given))
    assert_finishes(engine, plain, shortage)
    assert engine.built.controller.stats().target_losses == 0
    assert engine.changes == {"started": 1}


@pytest.mark.parametrize(
    ("phase", "rank"), [("prefill", 1), pytest.param("verify", 0, marks=pytest.mark.full), ("sampling", 0)]
)
def test_a_rank_of_several(
    start_engine: StartEngine, plain: dict[str, list[int]], shortage: Shortage, phase: str, rank: int
) -> None:
    """Where ranks wait for each other they form the next group, with their weights; after that nobody waits."""
    engine = start_engine(tensor_parallel_size=2)
    assert engine.workers is not None
    owner, name, applies = TARGET_PHASES[phase]
    shortage.in_calls_of(owner, name, lambda *given: in_thread(f"target rank {rank}") and applies(*given))
    assert_finishes(engine, plain, shortage)
    assert shortage.count == len(FAILING)
    losses = 0 if phase == "sampling" else shortage.count
    assert engine.built.controller.stats().target_losses == losses
    assert all(not worker.incarnation for worker in engine.workers.ports if worker.role == "target")


def test_a_rank_over_nccl_is_replaced_without_end(
    models: Models, plain: dict[str, list[int]], shortage: Shortage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More often than a group may be lost: want of memory does not count."""
    monkeypatch.setattr("tests.distributed.rounds.test_out_of_memory.FAILING", {0, 2, 4, 6})
    monkeypatch.setattr("runtime.core.planner.TokenBudget.shrink", lambda budget, _: None)
    monkeypatch.setattr(TargetSupervisor, "_is_reusable", lambda _: False)  # as on devices
    fake_nccl.install(monkeypatch).timeout_s = 3.0  # ranks here cannot be killed while they wait
    engine = threaded(configure(models, draft=False, tensor_parallel_size=2, skip_self_check=True), backend="nccl")
    shortage.in_calls_of(ModelRunner, "_call", lambda *given: in_thread("target rank 1") and is_large(*given))
    assert_finishes(engine, plain, shortage)
    assert engine.built.controller.stats().target_losses == shortage.count == 4
