"""Drafts that read the target's features: graphs draft what the ordinary path drafts, and wait once a round."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream import SamplingParams
from tests.support.gpu.counts import Counts
from tests.support.gpu.engine import Served, lasting_tensors, only, serve
from tests.support.gpu.machine import pretended_gpu
from tests.support.identity import generate
from tests.support.models import synthetic_layers, tiny_models
from workers.gpu.sizes import SamplerKind

VOCAB = 23
"""So few ids that random drafts are sometimes right."""
PROMPTS = [[3, 5, 9, 11], [8, 4, 4], [7, 7, 20, 2, 9, 13]]
CHAIN = {"num_speculative_tokens": 4, "draft_shape": "chain"}
TREE = {"num_speculative_tokens": 8, "eagle_topk": 3, "num_steps": 3}
STEP = {"kernels": 0, "graphs": 1, "to_device": 1, "blocking": 0, "to_host": 1, "syncs": 1}
Pair = tuple[Path, Path | None]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("models") / "target", vocab_size=VOCAB, spread=0.2)


def eagle(target: Path, folder: Path) -> Pair:
    return target, synthetic_layers.eagle(target).write(folder)


def eagle3(target: Path, folder: Path) -> Pair:
    return target, synthetic_layers.eagle3(target, kept=12, layers=2).write(folder)


def mtp(_target: Path, folder: Path) -> Pair:
    """A target of its own, whose checkpoint has the layers."""
    return synthetic_layers.with_mtp("qwen2", folder, vocab_size=VOCAB), None


METHODS = {"eagle": eagle, "eagle3": eagle3, "mtp": mtp}


def sampling(**first: Any) -> list[SamplingParams]:
    """Return parameters of three requests; *first* are those of one that ends before the others."""
    return [
        SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.0, **first),
        SamplingParams(max_tokens=14, ignore_eos=True, temperature=0.0),
        SamplingParams(max_tokens=18, ignore_eos=True, seed=9),
    ]


def compare(
    pair: Pair,
    method: str,
    shape: dict[str, Any],
    params: list[SamplingParams],
    kinds: tuple[SamplerKind, ...] = ("greedy", "drawn"),
    **options: Any,
) -> Served:
    """Return what an engine with graphs does, which must propose and return what an ordinary one does."""
    model, draft = pair
    speculative = {"method": method, **({} if draft is None else {"model": str(draft)}), **shape}
    with pretended_gpu() as machine, only(4, *kinds):
        served = serve(machine, model, PROMPTS, params, max_num_seqs=4, speculative_config=speculative, **options)
    ordinary = generate(model, PROMPTS, params, max_model_len=64, speculative_config=speculative, **options)
    assert served.outputs == ordinary.outputs == generate(model, PROMPTS, params, max_model_len=64).outputs
    assert (served.proposed, served.accepted) == (ordinary.proposed, ordinary.accepted)
    assert served.proposed > served.accepted > 0
    static = lasting_tensors(served.rank)
    for graph in machine.capture.graphs:
        graph.reads_only(static)
    return served


def drafting(served: Served) -> list[tuple[bool, Counts]]:
    """Return of the rounds in which every row drafts, but for the first one, whether they move K and V."""
    rounds = [(plan, counts) for plan, counts in served.rounds if plan.decodes]
    return [(bool(plan.moves), counts) for plan, counts in rounds[1:] if all(row.k for row in plan.rows)]


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("method", METHODS)
def test_a_round_is_at_most_three_graphs_and_waits_once(
    target: Path, tmp_path: Path, method: str, shape: dict[str, Any]
) -> None:
    served = compare(METHODS[method](target, tmp_path / "draft"), method, shape, sampling())
    rounds = drafting(served)
    assert len(rounds) >= 5
    for moves, counts in rounds:
        assert counts.budget() == {**STEP, "graphs": 3 if moves else 2}


@pytest.mark.parametrize("make", [eagle, eagle3])
def test_features_survive_rounds_on_the_ordinary_path(
    target: Path, tmp_path: Path, make: Callable[[Path, Path], Pair]
) -> None:
    """The first request has a penalty, so that graphs run once it has ended."""
    served = compare(make(target, tmp_path / "draft"), make.__name__, CHAIN, sampling(presence_penalty=1.5))
    decoding = [(len(plan.rows), counts.graphs) for plan, counts in served.rounds if plan.decodes]
    assert {graphs for rows, graphs in decoding if rows == 3} == {0}
    assert 2 in {graphs for rows, graphs in decoding if rows < 3}


def test_features_survive_rounds_without_drafts(target: Path, tmp_path: Path) -> None:
    """Each round's features take the place of those of the round before, which no draft has read."""
    by_batch = {**CHAIN, "num_speculative_tokens_per_batch_size": [[1, 2, 4], [3, 4, 0]]}
    served = compare(eagle(target, tmp_path / "draft"), "eagle", by_batch, sampling())
    decoding = [(plan, counts.graphs) for plan, counts in served.rounds if plan.decodes]
    plain = [graphs for plan, graphs in decoding if len(plan.rows) == 3]
    assert plain == [2, 1, 1, 1], "each launches the next one, the last in vain"
    assert 2 in {graphs for plan, graphs in decoding if len(plan.rows) < 3}


def test_features_of_rounds_with_prompts_reach_the_graphs(target: Path, tmp_path: Path) -> None:
    served = compare(eagle(target, tmp_path / "draft"), "eagle", CHAIN, sampling(), max_num_batched_tokens=8)
    assert any(not plan.decodes for plan, _ in served.rounds[1:])
