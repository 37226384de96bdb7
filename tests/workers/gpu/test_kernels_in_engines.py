"""Engines on the pretended GPU that interpret kernels: launches of a layer, and the tokens of an ordinary engine."""

import dataclasses
from collections import Counter
from pathlib import Path

import pytest

from slipstream import SamplingParams
from tests.support.gpu.engine import Served, llamas, one_ahead, only, serve
from tests.support.gpu.machine import interpreted_kernels, pretended_gpu
from tests.support.identity import generate
from tests.support.models import synthetic_layers
from tests.support.models.tiny_models import perturb
from workers.gpu.sizes import SamplerKind

MOST = 12
"""Kernels of one layer in a decode step that is not captured."""
OFF = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
GREEDY = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0)
PROMPTS = [[3 + i, 5, 9, 11][: 2 + i % 3] for i in range(8)]
CHAIN, TREE = {"num_speculative_tokens": 3}, {"num_speculative_tokens": 6, "eagle_topk": 2}
LIMITED = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.9, top_p=0.8, seed=5)


def served(
    model: Path, batch: int, params: SamplingParams = GREEDY, kind: SamplerKind = "greedy", **arguments: object
) -> Served:
    with pretended_gpu() as machine, interpreted_kernels(), only(batch, kind):
        few = {"max_num_seqs": batch, "max_num_batched_tokens": 32}  # warming runs the largest rounds
        return serve(machine, model, PROMPTS[:batch], params, **few, **arguments)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [llamas(tmp_path_factory.mktemp(f"layers{layers}"), layers, 1)[0] for layers in (1, 2)]


@pytest.mark.parametrize("batch", [1, pytest.param(8, marks=pytest.mark.full)])
def test_a_layer_launches_twelve_kernels(models: list[Path], batch: int) -> None:
    kernels = list[Counter[str]]()
    for model in models:
        found = served(model, batch, enforce_eager=True)
        kernels.append(found.decoding(batch)[-1].kernels)
        assert found.outputs == generate(model, PROMPTS[:batch], GREEDY, max_model_len=64).outputs
    layer = kernels[1] - kernels[0]
    assert layer.total() <= MOST
    assert layer["norm_kernel"] == 2
    assert layer["rotate_kernel"] == layer["swiglu_kernel"] == layer["write_kernel"] == 1


@pytest.mark.parametrize(("params", "kind"), [(GREEDY, "greedy"), (LIMITED, "limited")])
def test_kernels_are_captured(models: list[Path], params: SamplingParams, kind: SamplerKind) -> None:
    found = served(models[0], 1, params, kind)
    assert [each.graphs for each in found.decoding(1)] == one_ahead(len(found.decoding(1)))
    assert found.decoding(1)[-1].kernels.total() == 0
    assert found.outputs == generate(models[0], PROMPTS[:1], params, max_model_len=64).outputs


@pytest.mark.parametrize(
    ("shape", "batch"),
    [(CHAIN, 1), (CHAIN, 3), (TREE, 1), pytest.param(TREE, 3, marks=pytest.mark.full)],
    ids=["chain of one row", "chains", "tree of one row", "trees"],
)
def test_draws_of_targets_and_drafts_have_the_noise_of_their_rows(
    models: list[Path], tmp_path: Path, shape: dict[str, int], batch: int
) -> None:
    """The same tokens, and as many draft tokens accepted, as where torch samples: of a single row, too."""
    draft = perturb(models[0], tmp_path / "draft", noise=0.04)
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, seed=5)
    speculative = {"method": "draft_model", "model": str(draft), **shape}
    found = served(models[0], batch, params, "drawn", speculative_config=speculative)
    ordinary = generate(models[0], PROMPTS[:batch], params, max_model_len=64, speculative_config=speculative)
    assert found.outputs == ordinary.outputs
    assert (found.proposed, found.accepted) == (ordinary.proposed, ordinary.accepted)
    assert found.accepted > 0


def test_learned_drafts_attend_by_the_kernel(models: list[Path], tmp_path: Path) -> None:
    eagle = synthetic_layers.eagle(models[0]).write(tmp_path / "draft")
    speculative = {"method": "eagle", "model": str(eagle), "num_speculative_tokens": 2, "draft_shape": "chain"}
    params = dataclasses.replace(GREEDY, max_tokens=5)
    found = served(models[0], 1, params, speculative_config=speculative, enforce_eager=True)
    assert found.outputs == generate(models[0], PROMPTS[:1], params, max_model_len=64).outputs
    drafted = next(counts.kernels for plan, counts in found.rounds if plan.decodes and plan.rows[0].k == 2)
    assert drafted["attention_kernel"] == 3, "the target's layer, and the draft's for each draft token"
    assert not drafted["sdpa"]


def test_windows_of_the_targets_own_cache_are_read_by_the_kernel(models: list[Path]) -> None:
    speculative = {"method": "self_window", "num_speculative_tokens": 2, "draft_kv_window": 6}
    prompts, params = [[3, 5, 9, 11, 7, 7, 2, 8, 1]], dataclasses.replace(GREEDY, max_tokens=5)
    with pretended_gpu() as machine, interpreted_kernels(), only(1, "greedy"):
        few = {"max_num_seqs": 1, "max_num_batched_tokens": 32, "enforce_eager": True}
        found = serve(machine, models[0], prompts, params, speculative_config=speculative, **few)
    ordinary = generate(models[0], prompts, params, max_model_len=64, speculative_config=speculative)
    assert found.outputs == ordinary.outputs == generate(models[0], prompts, params, max_model_len=64).outputs
    assert (found.proposed, found.accepted) == (ordinary.proposed, ordinary.accepted)
    (drafted, *_) = found.decoding(1, 2)
    assert (drafted.kernels["attention_kernel"], drafted.kernels["sdpa"]) == (3, 0)


PENALISED = [
    SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.9, seed=5, presence_penalty=2.0, frequency_penalty=2.0),
    SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.0, repetition_penalty=3.0),
]


@pytest.mark.parametrize(
    "shape",
    [{"num_speculative_tokens": 2}, pytest.param(TREE, marks=pytest.mark.full), None],
    ids=["chain", "tree", "plain"],
)
def test_penalties_are_applied_by_graphs(models: list[Path], tmp_path: Path, shape: dict[str, int] | None) -> None:
    """As many draft tokens of chains are accepted as on the host, so their penalties are the same."""
    draft = perturb(models[0], tmp_path / "draft", noise=0.04)
    speculative = None if shape is None else {"method": "draft_model", "model": str(draft), **shape}
    few = {"max_num_seqs": 2, "max_num_batched_tokens": 16}
    with pretended_gpu() as machine, interpreted_kernels(), only(2, "drawn"):
        found = serve(machine, models[0], PROMPTS[:2], PENALISED, speculative_config=speculative, **few)
    ordinary = generate(models[0], PROMPTS[:2], PENALISED, max_model_len=64, speculative_config=speculative)
    assert found.outputs == ordinary.outputs
    unpenalised = [dataclasses.replace(each, **OFF) for each in PENALISED]
    assert found.outputs != generate(models[0], PROMPTS[:2], unpenalised, max_model_len=64).outputs
    if shape is not TREE:  # candidates for trees are chosen without penalties
        assert (found.proposed, found.accepted) == (ordinary.proposed, ordinary.accepted)
    budgets = [counts.budget() for plan, counts in found.rounds if plan.decodes]
    is_ahead = shape is None  # the first round launches the second, too, and the last is running already
    first, later = budgets[0], budgets[1:-1] if is_ahead else budgets[1:]
    assert first["to_device"] == 3 + is_ahead, "two sequences are counted anew"
    assert all(each["kernels"] == 0 and each["to_device"] == each["to_host"] == each["syncs"] == 1 for each in later)
