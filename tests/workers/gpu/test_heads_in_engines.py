"""Engines with heads without attention: rounds are few graphs and one wait, and tokens are those of other engines."""

from pathlib import Path
from typing import Any

import pytest

from slipstream import SamplingParams
from tests.support.gpu.engine import Served
from tests.support.models import tiny_models
from tests.workers.gpu.test_graphed_heads import ALL, BEAMS, CHAIN, MAKERS, QUICK, SHAPES, TREE
from tests.workers.gpu.test_head_drafts import STEP, VOCAB, compare, drafting, sampling
from workers.gpu.sizes import SamplerKind


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("models") / "target", vocab_size=VOCAB, spread=0.2)


def run(target: Path, folder: Path, maker: str, shape: dict[str, Any], *given: Any, **options: Any) -> Served:
    """Return what an engine with graphs does, which does what an ordinary one does."""
    made = MAKERS[maker](target)
    return compare((target, made.write(folder)), made.method, shape, *given, **options)


def check_budget(served: Served) -> None:
    """Check that rounds that draft are at most three graphs: the draft, the target, and moves of K and V."""
    rounds = drafting(served)
    assert len(rounds) >= 5
    for moves, counts in rounds:
        assert counts.budget() == {**STEP, "graphs": 3 if moves else 2}


@pytest.mark.parametrize(("maker", "shape"), QUICK[:1] + QUICK[2:])
def test_a_round_is_at_most_three_graphs_and_waits_once(target: Path, tmp_path: Path, maker: str, shape: str) -> None:
    check_budget(run(target, tmp_path / "draft", maker, SHAPES[shape], sampling()))


def test_top_p_is_captured_too(target: Path, tmp_path: Path) -> None:
    limited = SamplingParams(max_tokens=14, ignore_eos=True, temperature=0.9, top_p=0.9, seed=2)
    kinds: tuple[SamplerKind, ...] = ("greedy", "limited")
    check_budget(run(target, tmp_path / "draft", "hydra", TREE, [*sampling()[:2], limited], kinds))


@pytest.mark.full
@pytest.mark.parametrize(("maker", "shape"), ALL)
def test_budgets_of_every_method_and_shape(target: Path, tmp_path: Path, maker: str, shape: str) -> None:
    check_budget(run(target, tmp_path / "draft", maker, SHAPES[shape], sampling()))


def test_features_survive_rounds_on_the_ordinary_path(target: Path, tmp_path: Path) -> None:
    """The first request has a penalty, so that graphs run once it has ended."""
    served = run(target, tmp_path / "draft", "medusa", TREE, sampling(presence_penalty=1.5))
    decoding = [(len(plan.rows), counts.graphs) for plan, counts in served.rounds if plan.decodes]
    assert {graphs for rows, graphs in decoding if rows == 3} == {0}
    assert 2 in {graphs for rows, graphs in decoding if rows < 3}


def test_features_survive_rounds_without_drafts(target: Path, tmp_path: Path) -> None:
    """Each round's features take the place of those of the round before, which no draft has read."""
    by_batch = {**BEAMS, "num_speculative_tokens_per_batch_size": [[1, 2, 9], [3, 4, 0]]}
    served = run(target, tmp_path / "draft", "recurrent", by_batch, sampling())
    decoding = [(plan, counts.graphs) for plan, counts in served.rounds if plan.decodes]
    plain = [graphs for plan, graphs in decoding if len(plan.rows) == 3]
    assert plain == [2, 1, 1, 1], "each launches the next one, the last in vain"
    assert 2 in {graphs for plan, graphs in decoding if len(plan.rows) < 3}


def test_features_of_rounds_with_prompts_reach_the_graphs(target: Path, tmp_path: Path) -> None:
    served = run(target, tmp_path / "draft", "mlp_speculator", CHAIN, sampling(), max_num_batched_tokens=8)
    assert any(not plan.decodes for plan, _ in served.rounds[1:])
