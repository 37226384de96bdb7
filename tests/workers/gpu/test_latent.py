"""Models with latent attention attend over latents on the pretended GPU, and give the tokens of CPUs, which do not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from protos.config.engine import ModelConfig
from protos.layers import LayerShape
from tests.support.distributed.engine import assert_same, outputs_without_drafts, quick_turns
from tests.support.gpu.engine import only, serve
from tests.support.gpu.machine import interpreted_kernels, pretended_gpu
from tests.support.gpu.worker_group import PretendedWorkers, pretended_workers
from tests.support.identity import generate
from tests.support.models import synthetic_layers
from tests.support.models.tiny_models import build, perturb
from tests.workers.gpu.test_head_drafts import CHAIN, PROMPTS, TREE, VOCAB, drafting, sampling
from tests.workers.gpu.test_ranks import some_requests, started
from workers.attention.kv import KVCache
from workers.model.loader import load

pytestmark = pytest.mark.usefixtures("one_thread")

LATENT = LayerShape(1, 16, 12, values_in_keys=True)
ONE = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
PARAMS = sampling()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "target"
    return build("deepseek_v3", folder, vocab_size=VOCAB, num_hidden_layers=2, first_k_dense_replace=2)


@pytest.fixture
def shapes() -> Iterator[list[tuple[LayerShape, ...]]]:
    """The shapes of all caches that are made on the GPU."""
    found, make = [], KVCache.__init__

    def init(cache: KVCache, *given: Any) -> None:
        make(cache, *given)
        if cache.device.type == "cuda":
            found.append(cache.shapes)

    with mock.patch.object(KVCache, "__init__", init):
        yield found


def check(pair: tuple[Path, Path | None], method: str, shape: dict[str, Any], **options: Any) -> None:
    """Raise an error unless tokens, of requests some of which are drawn, are those of a CPU without drafts."""
    model, draft = pair
    options["speculative_config"] = {"method": method, **shape, **({} if draft is None else {"model": str(draft)})}
    with pretended_gpu() as machine, interpreted_kernels(), only(4, "greedy", "drawn"):
        served = serve(machine, model, PROMPTS, PARAMS, max_num_seqs=4, **options)
    options.pop("speculative_config")
    assert served.outputs == generate(model, PROMPTS, PARAMS, max_model_len=64, **options).outputs
    assert served.proposed > served.accepted > 0
    rounds = drafting(served)
    assert rounds
    assert {counts.budget()["syncs"] for _, counts in rounds} == {1}


@pytest.mark.parametrize("shape", [CHAIN, pytest.param(TREE, marks=pytest.mark.full)], ids=["chain", "tree"])
def test_a_target_and_its_draft(
    target: Path, tmp_path: Path, shapes: list[tuple[LayerShape, ...]], shape: dict[str, Any]
) -> None:
    check((target, perturb(target, tmp_path / "draft", noise=0.02)), "draft_model", shape)
    assert shapes == [(LATENT, LATENT)] * 2


def test_the_memory_of_a_token_is_that_of_the_latents(target: Path) -> None:
    with pretended_gpu():
        loaded = load(ModelConfig(model=str(target)))
    assert loaded.notes[0] == f"KV cache: {2 * 16 * 4} bytes per token (latents, which keys and values are made of)"


def test_mtp_heads(tmp_path: Path, shapes: list[tuple[LayerShape, ...]]) -> None:
    """Their layers have experts."""
    target = synthetic_layers.with_mtp("deepseek_v3", tmp_path / "target", vocab_size=VOCAB, **ONE)
    counted = torch.histc

    def histc(numbers: torch.Tensor, **options: Any) -> torch.Tensor:
        return counted(numbers.float(), **options)  # a CPU does not count whole numbers, a GPU does

    with mock.patch("torch.histc", histc):
        check((target, None), "mtp", CHAIN)
    assert shapes == [(LATENT,)] * 2


def test_every_rank_holds_the_latents(
    monkeypatch: pytest.MonkeyPatch, target: Path, shapes: list[tuple[LayerShape, ...]]
) -> None:
    models = target, target
    expected = outputs_without_drafts(models)
    few = only(4, "greedy", "drawn")
    with pretended_workers(monkeypatch) as workers, few, quick_turns(), interpreted_kernels():
        check_ranks(workers, models, expected)
    assert set(shapes) == {(LATENT, LATENT)}


def check_ranks(workers: PretendedWorkers, models: tuple[Path, Path], expected: dict[str, list[int]]) -> None:
    with started(workers, models, 2, None) as engine:
        engine.put(*some_requests())
        assert_same(engine.finish(), expected)


def test_weights_quantised_while_loading(target: Path, tmp_path: Path, shapes: list[tuple[LayerShape, ...]]) -> None:
    draft = perturb(target, tmp_path / "draft", noise=0.02)
    check((target, draft), "draft_model", CHAIN, quantization="int8")
    assert shapes == [(LATENT, LATENT)] * 2
