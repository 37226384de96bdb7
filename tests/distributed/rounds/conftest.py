"""A tiny pair, its tokens without drafts, and engines that end with the test."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from protos.worker_messages import Port
from tests.support.distributed.engine import (
    PATIENT_S,
    Engine,
    Models,
    StartEngine,
    configure,
    outputs_without_drafts,
    quick_turns,
    threaded,
    tiny_pair,
)
from tests.support.distributed.thread_workers import ThreadPort


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return tiny_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def _quick_turns() -> Iterator[None]:
    with quick_turns():
        yield


@pytest.fixture(scope="module")
def plain(models: Models) -> dict[str, list[int]]:
    """The expected outputs of every run."""
    return outputs_without_drafts(models)


@pytest.fixture
def start_engine(models: Models) -> Iterator[StartEngine]:
    started: list[Engine] = []

    def start(
        *,
        floor_s: float = PATIENT_S,
        on_start: Callable[[ThreadPort], None] = lambda port: None,
        body: Callable[[Port], None] | None = None,
        **arguments: Any,
    ) -> Engine:
        started.append(threaded(configure(models, **arguments), floor_s=floor_s, body=body, on_start=on_start))
        return started[-1]

    yield start
    for engine in started:
        engine.built.shutdown()
