"""Costs of steps are kept for later starts with the same number of threads, and measured with all of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from protos.messages import StepCosts
from tests.support.distributed.engine import configure
from workers import build as building
from workers.compiled import store
from workers.compiled.warming import Warm
from workers.model.runner import ModelRunner
from workers.step_costs import Measurement
from workers.threads import CpuSample, ThreadCount

ADAPTIVE = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "policy": "adaptive"}
CONFIG = configure((Path("m"), Path("m")), speculative_config=ADAPTIVE, enforce_eager=False)


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(store, "cache_folder", lambda *_: tmp_path)
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)


@dataclass
class Runner:
    """A forward takes a second for each token, in a process with one thread."""

    calls: int = 0
    disturbed: int = 0
    """The size at which it takes a hundred seconds longer."""
    cold_s: float = 0.0
    """What the first forward takes longer."""

    def measure_size(self, num_rows: int) -> float:
        self.calls += 1
        slow_s = self.cold_s * (self.calls == 1) + 100.0 * (num_rows == self.disturbed)
        return num_rows / torch.get_num_threads() + slow_s


def measurement(runner: Runner) -> Measurement:
    return Measurement(CONFIG, cast("ModelRunner", runner), None, keys=("key",))


def test_costs_are_kept_for_a_number_of_threads() -> None:
    runner = Runner()
    for threads, calls in ((2, 5), (2, 5), (1, 10), (2, 10)):
        torch.set_num_threads(threads)
        assert measurement(runner).costs().target_s == {size: size / threads for size in (1, 2, 4, 8, 16)}
        assert runner.calls == calls


def test_a_size_that_was_disturbed_takes_no_longer_than_a_larger_one() -> None:
    torch.set_num_threads(1)
    assert measurement(Runner(disturbed=2)).costs().target_s == {1: 1.0, 2: 4.0, 4: 4.0, 8: 8.0, 16: 16.0}


def test_costs_measured_with_several_numbers_are_not_kept() -> None:
    torch.set_num_threads(2)
    runner = Runner()
    stages = measurement(runner).stages()
    next(stages)
    torch.set_num_threads(1)
    assert [costs for costs in stages if costs is not None] == [StepCosts({1: 1, 2: 2, 4: 4, 8: 8, 16: 8}, {})]
    assert measurement(runner).costs().target_s[16] == 16
    assert runner.calls == 10


def test_a_slow_beginning_does_not_make_small_steps_look_slow() -> None:
    """A plain step of one request would look slower than one with draft tokens."""
    torch.set_num_threads(1)
    costs = measurement(Runner(cold_s=0.5)).costs()
    assert costs.target_s == {1: 1, 2: 2, 4: 4, 8: 8, 16: 16.5}


def test_after_the_swap_steps_are_measured_with_all_threads() -> None:
    """The compiler, which has ended, had taken cores from the engine."""

    class Swap:
        is_ready = True

        def finish(self) -> Warm:
            return Warm(("key",))

        def stop(self) -> None: ...

    busy = CpuSample(at=0.0, cores=2, quota=2.0, busy_s=0.0, own_s=0.0)
    samples = iter([busy, busy._replace(at=1.0, busy_s=2.0, own_s=1.0), busy])
    threads = ThreadCount(2, torch.set_num_threads, lambda: next(samples))
    threads.revise()
    assert torch.get_num_threads() == 1
    worker: Any = type("Worker", (), {"runner": Runner()})
    ready = building.ReadyTarget(worker, None, StepCosts({}), cast("Any", Swap()))
    loaded: Any = type("Loaded", (), {"draft": None})
    *_, costs = building._compiled_later(CONFIG, loaded, cast("Any", None), ready, threads)
    assert costs == StepCosts({size: size / 2 for size in (1, 2, 4, 8, 16)}, {})
