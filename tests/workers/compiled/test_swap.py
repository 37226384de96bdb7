"""Requests that run while compiled forwards are swapped in: every one is answered, with the tokens of the eager engine.

The contract is that of docs/exactness.md for fp32: identical tokens, except after a near tie.
"""

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster import assemble
from protos.messages import Request, Sampling
from protos.sampling import SamplingParams
from runtime.core.controller import LocalInbox
from tests.support.distributed.engine import Engine, configure
from tests.support.identity import Reference, assert_identical
from tests.support.models.tiny_models import build, perturb
from tests.workers.compiled.test_warming import FakeChild
from workers.cache_folder import cache_folder
from workers.compile import Forward
from workers.compiled import store, warming
from workers.model import runner as running
from workers.model.runner import ModelRunner

ROUNDING = 1e-6
"""The compiled forwards of these tests differ from eager by noise of this size."""
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(store, "cache_folder", lambda *_: folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = build("llama", folder / "target", num_hidden_layers=1)
    return target, perturb(target, folder / "draft")


@dataclass
class FakeCompiler:
    """Its results are the eager ones with another rounding. It is done once `is_done` is set."""

    swapped: int = 0
    calls: int = 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        load = ModelRunner.load_compiled

        def load_compiled(runner: ModelRunner, folder: Path) -> None:
            patch.setattr(running, "load_graph", lambda folder, name: partial(self._rounded, runner._eager))
            load(runner, folder)
            self.swapped += 1

        patch.setattr(ModelRunner, "load_compiled", load_compiled)
        patch.setattr(warming, "Child", FakeChild)
        patch.setattr(warming, "has_compiler", lambda: True)
        FakeChild.count, FakeChild.failure, FakeChild.is_done = 0, None, False

    def _rounded(self, eager: Forward, *inputs: torch.Tensor) -> list[torch.Tensor]:
        self.calls += 1
        logits_NV = eager(*inputs)[0]
        return [logits_NV + ROUNDING * torch.randn(logits_NV.shape)]


def request(name: str, index: int) -> Request:
    """Return a greedy request; some have a common prefix, and repeat themselves."""
    shared = [11, 12, 13, 14, 15, 16, 17, 18, 19]
    ids = (*shared * (index % 2), *[5, 6, 7, 8 + index] * (2 + 2 * index))
    return Request(name, ids, SamplingParams(), Sampling(seed=0), max_tokens=30 + index)


def start(models: tuple[Path, Path], speculative: dict[str, Any] | None, **options: Any) -> Engine:
    """Start an engine with so few blocks that requests are preempted, and requests wait."""
    config = configure(models, speculative_config=speculative, num_gpu_blocks_override=48, **options)
    config = replace(config, model=replace(config.model, compile_in_background=True))
    return Engine(assemble.build(config, LocalInbox(), report=lambda line: None))


def check(engine: Engine, requests: list[Request], models: tuple[Path, Path]) -> None:
    """Check that every request has all its tokens, and that they are those of an eager engine."""
    assert engine.reasons == {request.request_id: "length" for request in requests}
    eager = start(models, None, enforce_eager=True)
    eager.put(*requests)
    wanted, found = eager.finish(), engine.outputs
    eager.built.shutdown()
    names = [request.request_id for request in requests]
    assert [len(found[name]) for name in names] == [request.max_tokens for request in requests]
    prompts = [request.prompt_token_ids for request in requests]
    assert_identical(prompts, [found[n] for n in names], [wanted[n] for n in names], Reference(models[0]))


@pytest.mark.parametrize("kind", ["off", "ngram", "draft_model"])
def test_requests_across_the_swap(kind: str, models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = FakeCompiler()
    compiler.install(monkeypatch)
    drafted = {"method": "draft_model", "model": str(models[1]), "num_speculative_tokens": 3, "policy": "adaptive"}
    kinds: dict[str, dict[str, Any] | None] = {"off": None, "ngram": NGRAM, "draft_model": drafted}
    engine = start(models, kinds[kind], enforce_eager=False)
    before = [request(f"before {index}", index) for index in range(6)]
    engine.put(*before)
    engine.until(lambda: engine.num_out >= 40)
    unfinished = engine.built.controller.scheduler.num_unfinished
    assert compiler.swapped == 0 < unfinished
    FakeChild.is_done = True
    engine.step()
    # The third is a draft of the same weights by which steps are measured.
    assert compiler.swapped == (3 if kind == "draft_model" else 1)
    compiler.calls = 0
    after = [request(f"after {index}", index) for index in range(6)]
    engine.put(*after)
    engine.finish()
    assert compiler.calls > 0
    check(engine, before + after, models)
    controller = engine.built.controller
    stats = controller.stats()
    assert bool(controller._clock._target_s) == (kind == "draft_model"), "its policy reads the costs of steps"
    assert stats.preemptions > 0
    assert stats.generated_tokens == sum(request.max_tokens for request in before + after)
    engine.built.shutdown()


@pytest.mark.full
def test_requests_across_the_swap_of_a_real_compiler(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # the compiling process reads it
    monkeypatch.setattr(store, "cache_folder", cache_folder)
    monkeypatch.setattr(warming, "NICE", 0)
    engine = start(models, NGRAM, enforce_eager=False)
    runner = engine.built.executor.rank.worker.runner  # type: ignore[attr-defined]
    requests: list[Request] = []

    def num_unfinished() -> int:
        return engine.built.controller.scheduler.num_unfinished

    def is_swapped() -> bool:
        time.sleep(0.05)  # leaves the cores to the compiler
        if num_unfinished() < 4:
            requests.append(request(str(len(requests)), len(requests) % 6))
            engine.put(requests[-1])
        return runner._run is not runner._eager

    engine.until(is_swapped, 300)
    assert num_unfinished() > 0
    engine.put(*(request(f"after {index}", index) for index in range(6)))
    requests += [request(f"after {index}", index) for index in range(6)]
    engine.finish()
    check(engine, requests, models)
    engine.built.shutdown()
