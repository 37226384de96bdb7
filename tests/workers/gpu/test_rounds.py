"""Which rounds run as graphs, and that the others give what they gave before."""

from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest

from protos.messages import Sampling
from slipstream import SamplingParams
from tests.support.gpu.engine import Served, only, serve
from tests.support.gpu.machine import pretended_gpu
from tests.support.identity import generate
from tests.support.models.tiny_models import build, perturb
from workers.gpu.graphs import CapturedGraph, GraphCaptureError, GraphCapturer, Program

PROMPTS = [[3, 5, 9, 11], [8, 4, 4], [7, 7, 60, 2, 9, 31]]
CHAIN = {"num_speculative_tokens": 3}
TREE = {"num_speculative_tokens": 6, "eagle_topk": 2, "num_steps": 3}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target = build("llama", folder / "target", num_hidden_layers=2, spread=0.2)
    return target, perturb(target, folder / "draft", noise=0.04)


def run(
    pair: tuple[Path, Path], params: list[SamplingParams], shape: dict[str, int], **options: Any
) -> tuple[Served, list[list[int]]]:
    """Return what an engine with graphs does, and the outputs of an ordinary one without speculation."""
    target, draft = pair
    speculative = {"method": "draft_model", "model": str(draft), **shape}
    with pretended_gpu() as machine, only(4, "greedy", "drawn"):
        served = serve(machine, target, PROMPTS, params, max_num_seqs=4, speculative_config=speculative, **options)
    return served, generate(target, PROMPTS, params, max_model_len=64).outputs


def sampling(**first: Any) -> list[SamplingParams]:
    """Return parameters of three requests; *first* are those of one that ends before the others."""
    return [
        SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0, **first),
        SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0),
        SamplingParams(max_tokens=14, ignore_eos=True, seed=9),
    ]


def test_rows_come_and_go_within_a_captured_size(pair: tuple[Path, Path]) -> None:
    served, expected = run(pair, sampling(), CHAIN)
    assert served.outputs == expected
    assert served.proposed > served.accepted > 0
    decoding = [(plan, counts) for plan, counts in served.rounds if plan.decodes]
    assert {len(plan.rows) for plan, _ in decoding} == {1, 2, 3}
    assert all(counts.graphs == (2 if any(row.k for row in plan.rows) else 1) for plan, counts in decoding)


def test_drafting_takes_as_long_as_the_device_drafts(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Launching a graph takes next to no time: policies would take drafts for free, and the target for slow."""
    monkeypatch.setattr("tests.support.gpu.machine.EVENTS_APART", 1e6)
    served, _ = run(pair, sampling(), CHAIN)
    drafting = sum(any(row.k for row in plan.rows) for plan, counts in served.rounds if plan.decodes)
    assert 1e3 * drafting < served.propose_s < 1e3 * (drafting + 1)


@pytest.mark.parametrize("wanted", [{"logprobs": 1}, {"presence_penalty": 1.5}], ids=["logprobs", "penalty"])
def test_rounds_with_what_the_host_does_take_the_ordinary_path(pair: tuple[Path, Path], wanted: dict[str, Any]) -> None:
    served, expected = run(pair, sampling(**wanted), CHAIN)
    assert served.outputs == expected
    graphs = [(len(plan.rows), counts.graphs) for plan, counts in served.rounds if plan.decodes]
    assert {count for rows, count in graphs if rows == 3} == {0}
    assert {count for rows, count in graphs if rows < 3} <= {1, 2}


def test_trees_are_drafted_and_scored_by_graphs(pair: tuple[Path, Path]) -> None:
    """A third graph moves the K and V of nodes that were accepted in the round before."""
    served, expected = run(pair, sampling(), TREE)
    target, draft = pair
    ordinary = generate(
        target,
        PROMPTS,
        sampling(),
        max_model_len=64,
        speculative_config={"method": "draft_model", "model": str(draft), **TREE},
    )
    assert served.outputs == expected
    assert (served.proposed, served.accepted) == (ordinary.proposed, ordinary.accepted)
    assert served.proposed > served.accepted > 0
    decoding = [(plan, counts.budget()) for plan, counts in served.rounds if plan.decodes]
    assert {bool(plan.moves) for plan, _ in decoding} == {True, False}
    for plan, budget in decoding:
        graphs = 1 + any(row.k for row in plan.rows) + bool(plan.moves)
        assert budget == {"kernels": 0, "graphs": graphs, "to_device": 1, "blocking": 0, "to_host": 1, "syncs": 1}


def test_trees_that_are_drafted_elsewhere_are_scored_by_one_graph(pair: tuple[Path, Path]) -> None:
    """The draft's graphs are refused here, so its levels are read on the host; the target's round is not."""
    with mock.patch("workers.gpu.build.drafter_of", lambda *_: None):
        served, expected = run(pair, sampling(), TREE)
    assert served.outputs == expected
    assert served.proposed > served.accepted > 0
    for plan, counts in served.rounds:
        if plan.decodes:
            assert counts.graphs == 1 + bool(plan.moves)
            waits = [place for place in counts.syncs if "draft" not in place and "proposers" not in place]
            assert len(waits) == 1
            assert waits[0].startswith("workers/gpu/staging.py")


def test_prompts_in_chunks_run_eager_beside_graphs(pair: tuple[Path, Path]) -> None:
    served, expected = run(pair, sampling(), CHAIN, max_num_batched_tokens=8)
    assert served.outputs == expected
    assert any(counts.graphs == 0 for plan, counts in served.rounds if not plan.decodes)
    assert any(counts.graphs == 2 for plan, counts in served.rounds if plan.decodes)


def test_an_engine_whose_step_cannot_be_captured_serves_without_graphs(
    pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_self: GraphCapturer, _program: object) -> NoReturn:
        raise GraphCaptureError("RuntimeError: operation not permitted when stream is capturing")

    with mock.patch.object(GraphCapturer, "capture", refuse):
        served, expected = run(pair, sampling(), CHAIN)
    assert served.outputs == expected
    assert not any(counts.graphs for _, counts in served.rounds)
    assert [record.name for record in caplog.records if "not permitted" in record.getMessage()] == [
        "workers.gpu.graphs"
    ]


def test_a_capture_that_fails_late_leaves_the_graphs_before_it(pair: tuple[Path, Path]) -> None:
    """Rounds of greedy rows alone have graphs, those with noise have none."""
    capture, made = GraphCapturer.capture, list[object]()

    def refuse_third(self: GraphCapturer, program: Program) -> CapturedGraph:
        made.append(program)
        if len(made) == 3:
            raise GraphCaptureError("no")
        return capture(self, program)

    with mock.patch.object(GraphCapturer, "capture", refuse_third):
        served, expected = run(pair, sampling(), CHAIN)
    assert served.outputs == expected
    drawn = served.rank.worker.slots.sampling.index(Sampling(seed=9, temperature=1.0))
    for plan, counts in served.rounds:
        if plan.decodes:
            assert (counts.graphs > 0) == all(row.slot != drawn for row in plan.rows)
