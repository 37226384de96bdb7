"""The default shape of drafts follows the device that the engine's workers have."""

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from cluster import assemble
from protos.config.default_shape import CPU_LENGTHS
from protos.config.engine import EngineConfig, to_json
from protos.interfaces import Executor
from protos.messages import WorkerInfo
from protos.progress import ProgressCallback
from protos.worker_messages import Setup, WorkerId
from runtime.core.controller import LocalInbox
from tests.support.distributed.engine import Engine, configure, requests
from tests.support.distributed.fake_worker import FakeWorker
from tests.support.models import synthetic_layers, tiny_models
from workers.process.main import _configured

SHORT = CPU_LENGTHS["eagle3"]
INFO = WorkerInfo(num_blocks=64, block_size=16, max_model_len=128, vocab_size=10, speculates=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    target = tiny_models.build("llama", root / "target", vocab_size=97)
    return target, synthetic_layers.eagle3(target).write(root / "eagle3")


def without_a_shape(pair: tuple[Path, Path], **arguments: Any) -> EngineConfig:
    speculative = {"method": "eagle3", "model": str(pair[1])}
    return configure((pair[0], pair[0]), speculative_config=speculative, **arguments)


def test_an_engine_on_a_cpu_drafts_its_short_chains(pair: tuple[Path, Path]) -> None:
    engine = Engine(assemble.build(without_a_shape(pair, device="auto"), LocalInbox(), report=lambda line: None))
    engine.put(*requests(2))
    engine.finish()
    engine.built.shutdown()
    assert engine.built.info.num_speculative_tokens == engine.built.controller.policy.limit == SHORT
    drafted = [verdict.proposed for _, verdicts in engine.rounds for verdict in verdicts]
    assert max(drafted) == SHORT


@pytest.mark.parametrize(("device", "tokens", "places"), [("cpu", SHORT, SHORT), ("cuda", 59, 70)])
def test_the_controller_plans_for_the_device_of_the_workers(
    pair: tuple[Path, Path], device: str, tokens: int, places: int
) -> None:
    def make_executor(_config: EngineConfig, _report: ProgressCallback) -> Executor:
        return FakeWorker(structs.replace(INFO, device=device), 4)

    config = without_a_shape(pair, device="auto")
    built = assemble.build(config, LocalInbox(), lambda line: None, make_executor)
    assert (built.info.num_speculative_tokens, built.info.draft_places) == (tokens, places)
    assert built.controller.policy.limit == tokens
    assert built.config.speculative is not None and built.config.speculative.num_speculative_tokens == tokens


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize(("device", "shape"), [("cpu", (1, SHORT)), ("cuda:1", (10, 8))])
def test_a_worker_drafts_for_the_device_that_it_got(
    pair: tuple[Path, Path], role: Any, device: str, shape: tuple[int, int]
) -> None:
    setup = Setup(to_json(without_a_shape(pair, device="auto")), WorkerId(role, 0), 1, device, "gloo")
    speculative = _configured(setup).speculative
    assert speculative is not None and speculative.tree_shape == shape
