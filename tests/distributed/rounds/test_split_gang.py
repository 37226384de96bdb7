"""A draft whose plans and tables are under way for a constant time, beside a target whose steps are long or short."""

import threading
import time
from typing import Any

import pytest

from benchmarks.late_draft import LatePort
from protos.worker_messages import Port
from tests.support.distributed.engine import StartEngine, requests
from workers.model.runner import ModelRunner
from workers.process.main import serve

FLOOR_S = 0.01
WAY_S = 0.15
"""There and back; several times what this draft computes for."""


def far(port: Port) -> None:
    """Run a worker; a draft is far away, and the shortest deadline is short."""
    serve(LatePort(port, WAY_S), floor_s=FLOOR_S)


def slow_down(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    """Make every step of the target take *step_s* longer."""
    run = ModelRunner.run

    def slow(self: ModelRunner, *args: Any) -> Any:
        if threading.current_thread().name != "draft":
            time.sleep(step_s)
        return run(self, *args)

    monkeypatch.setattr(ModelRunner, "run", slow)


def test_a_far_draft_is_waited_for_where_its_tokens_save_more(
    start_engine: StartEngine, plain: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_engine(body=far)
    slow_down(monkeypatch, 0.1)  # three steps take longer than the way
    engine.put(*requests(2, max_tokens=16))
    outputs = engine.finish()
    assert outputs == {name: plain[name][: len(ids)] for name, ids in outputs.items()}
    drafted = [any(verdict.proposed for verdict in verdicts) for _, verdicts in engine.rounds]
    assert any(drafted), "the deadline does not follow the way"
    last = len(drafted) - 1 - drafted[::-1].index(True)
    since = drafted[drafted.index(True) : last]
    assert sum(since) >= 0.7 * len(since), "and from then on it is met"


def test_a_far_draft_is_not_waited_for_where_steps_are_short(
    start_engine: StartEngine, plain: dict[str, list[int]]
) -> None:
    engine = start_engine(body=far)
    engine.put(*requests(3))
    outputs = engine.finish()
    assert outputs == {name: plain[name][: len(ids)] for name, ids in outputs.items()}
    assert engine.missed <= 2, "it costs one deadline, and one more where this machine was held up meanwhile"
