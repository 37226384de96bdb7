"""What a step asks of a GPU, counted on a pretended one: launches, copies and waits, and the same tokens as without."""

from pathlib import Path
from typing import Any

import pytest

from slipstream import SamplingParams
from tests.support.gpu.engine import lasting_tensors, llamas, only, serve
from tests.support.gpu.machine import pretended_gpu
from tests.support.identity import generate
from workers.gpu.sizes import SamplerKind

LIMITS: dict[SamplerKind, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0},
    "limited": {"temperature": 0.9, "top_p": 0.9, "top_k": 40},
}
STEP = {"kernels": 0, "graphs": 1, "to_device": 1, "blocking": 0, "to_host": 1, "syncs": 1}
FIRST, LAST = ({**STEP, "graphs": n, "to_device": n, "to_host": n} for n in (2, 0))
"""Plain steps are launched one ahead: the first launches the second, too, and the last is running already."""
ROUND = {**STEP, "graphs": 2}
"""The draft's whole loop is one graph, the target's forward, sampling and acceptance the other."""
MOVING = {**ROUND, "graphs": 3}
"""After a tree of which nodes were accepted, one more graph moves their K and V."""
CHAIN = {"num_speculative_tokens": 4}
TREE = {"num_speculative_tokens": 8, "eagle_topk": 4, "num_steps": 4}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return llamas(tmp_path_factory.mktemp("pair"), 2, 1)


@pytest.fixture(scope="module")
def deep_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return llamas(tmp_path_factory.mktemp("deep"), 32, 16)


def check(pair: tuple[Path, Path], kind: SamplerKind, batch: int, shape: dict[str, int] | None) -> None:
    """Compare an engine with graphs, with drafts of *shape*, with an ordinary one on a CPU, without."""
    target, draft = pair
    params = SamplingParams(max_tokens=8, ignore_eos=True, seed=3, **LIMITS[kind])
    prompts = [[3 + i, 5, 9, 11 + i, 8][: 3 + i % 3] for i in range(batch)]
    speculative = None if shape is None else {"method": "draft_model", "model": str(draft), **shape}
    k = 0 if shape is None else shape["num_speculative_tokens"]
    with pretended_gpu() as machine, only(batch, kind):
        served = serve(machine, target, prompts, params, max_num_seqs=batch, speculative_config=speculative)
    rounds = served.decoding(batch, k)
    assert rounds
    if shape is None:
        assert [each.budget() for each in rounds] == [FIRST, *[STEP] * (len(rounds) - 2), LAST]
    else:
        assert all(each.budget() in ([ROUND, MOVING] if shape is TREE else [ROUND]) for each in rounds)
    assert not any(each.pageable for each in rounds)
    static = lasting_tensors(served.rank)
    for graph in machine.capture.graphs:
        graph.reads_only(static)
    assert served.outputs == generate(target, prompts, params, max_model_len=64).outputs


@pytest.mark.parametrize("kind", LIMITS)
def test_a_decode_step_is_one_graph_and_one_copy_each_way(pair: tuple[Path, Path], kind: SamplerKind) -> None:
    check(pair, kind, 3, None)


@pytest.mark.parametrize("kind", LIMITS)
def test_a_round_of_four_draft_tokens_is_two_graphs_and_waits_once(pair: tuple[Path, Path], kind: SamplerKind) -> None:
    check(pair, kind, 3, CHAIN)


@pytest.mark.parametrize("kind", LIMITS)
def test_a_round_of_trees_is_at_most_three_graphs_and_waits_once(pair: tuple[Path, Path], kind: SamplerKind) -> None:
    check(pair, kind, 3, TREE)


@pytest.mark.full
@pytest.mark.parametrize("shape", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("kind", LIMITS)
def test_budgets_of_32_layers(
    deep_pair: tuple[Path, Path], kind: SamplerKind, batch: int, shape: dict[str, int] | None
) -> None:
    check(deep_pair, kind, batch, shape)


def test_without_graphs_a_layer_launches_many_kernels(pair: tuple[Path, Path]) -> None:
    """So the counter sees what graphs save."""
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
    with pretended_gpu() as machine:
        served = serve(machine, pair[0], [[3, 5, 9]], params, max_num_seqs=1, enforce_eager=True)
    counts = served.decoding(1)[-1]
    assert counts.graphs == 0
    assert counts.kernels.total() > 2 * 12
    assert counts.syncs.total() == 1
    assert counts.pageable.total() == counts.to_device.total() > 1
