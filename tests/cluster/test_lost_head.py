"""An engine that ends while Ray's head does not answer."""

import asyncio
import atexit
import threading
import time
from collections.abc import Callable

import pytest
import ray
from ray.exceptions import RayError

from cluster.ray import channel
from cluster.ray.channel import RayChannel
from cluster.ray.placement import Placement
from cluster.ray.processes import returns_within
from protos.config.engine import EngineConfig, ModelConfig
from protos.progress import ProgressCallback


class Provider:
    """A placement provider that ends by calling *release*."""

    def __init__(self, release: Callable[[], None]) -> None:
        self.release = release

    def acquire(self, config: EngineConfig, report: ProgressCallback, is_wanted: Callable[[], bool]) -> Placement:
        raise NotImplementedError


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What would no longer be called when the interpreter exits."""
    found: list[object] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(atexit, "unregister", found.append)
    monkeypatch.setattr(channel, "RELEASE_S", 0.2)
    return found


def close(release: Callable[[], None]) -> float:
    began = time.monotonic()
    asyncio.run(RayChannel(EngineConfig(ModelConfig("m")), provider=Provider(release)).close())
    return time.monotonic() - began


def test_an_engine_does_not_wait_for_a_head_that_does_not_answer(
    unregistered: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()

    def release() -> None:
        answers.wait(60)

    assert close(release) < 10
    answers.set()
    assert "no answer within 0.2 s" in caplog.text
    assert unregistered == [ray.shutdown]


def test_an_error_of_the_head_is_one_line(unregistered: list[object], caplog: pytest.LogCaptureFixture) -> None:
    def release() -> None:
        raise RayError("no GCS")

    close(release)
    assert "no GCS" in caplog.text
    assert len(caplog.records) == len(unregistered) == 1


def test_a_head_that_answers_is_left_as_ever(unregistered: list[object], caplog: pytest.LogCaptureFixture) -> None:
    released: list[bool] = []
    close(lambda: released.append(True))
    assert released == [True]
    assert not unregistered
    assert not caplog.records


def test_a_call_runs_here_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    threads: list[threading.Thread] = []
    assert returns_within(0.1, lambda: threads.append(threading.current_thread()))
    assert threads == [threading.main_thread()]
