"""Targets that are split over ranks run their rounds as graphs on all ranks, or on none, and give the same tokens."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from protos.messages import Request
from protos.worker_messages import WorkerFailed
from tests.support.distributed.engine import (
    Engine,
    Models,
    assert_same,
    configure,
    outputs_without_drafts,
    quick_turns,
    requests,
    threaded,
    tiny_pair,
)
from tests.support.distributed.fake_nccl import Operation
from tests.support.distributed.ranks import on_ranks
from tests.support.gpu.counts import Counts
from tests.support.gpu.engine import lasting_tensors, only
from tests.support.gpu.graphs import PretendCapture, PretendGraph
from tests.support.gpu.machine import Machine, interpreted_kernels, pretended_cuda
from tests.support.gpu.pretend import CUDA
from tests.support.gpu.worker_group import PretendedWorkers, pretended_workers
from workers.distributed.groups import Group, GroupError
from workers.gpu.graphs import GraphCaptureError, GraphCapturer

STEP = {"kernels": 0, "graphs": 1, "to_device": 1, "blocking": 0, "to_host": 1, "syncs": 1}
"""Of rank 0, whether there are drafts or not."""
OTHER_STEP = {**STEP, "to_host": 0, "syncs": 0}
"""Of the other ranks, whose results nobody reads."""
LAUNCHES = ("graphs", "to_device", "to_host")
"""What a plain round asks of the device for the next one, which is launched one ahead."""
CHAIN = {"num_speculative_tokens": 3}
TREE = {"num_speculative_tokens": 6, "eagle_topk": 2, "num_steps": 3}
LIMIT_S = 3.0
"""Shorter than the controller's limit for a round, which on a machine ends it first."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return tiny_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def plain(models: Models) -> dict[str, list[int]]:
    """What one rank gives on a CPU, without graphs and drafts."""
    return outputs_without_drafts(models)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedWorkers]:
    with pretended_workers(monkeypatch) as workers, only(4, "greedy", "drawn"), quick_turns():
        yield workers


@contextlib.contextmanager
def started(
    workers: PretendedWorkers, models: Models, ranks: int, shape: dict[str, int] | None, placement: str = "dedicated"
) -> Iterator[Engine]:
    """Yield an engine of *ranks* target ranks, and a draft with drafts of *shape*."""
    draft = {"method": "draft_model", "model": str(models[1]), "placement": placement}
    speculative = None if shape is None else {**draft, **shape}
    options: dict[str, Any] = {"device": "cuda", "enforce_eager": False, "skip_self_check": True}
    config = configure(models, tensor_parallel_size=ranks, speculative_config=speculative, **options)
    engine = threaded(config, body=workers.serve)
    try:
        yield engine
    finally:
        engine.built.shutdown()


def some_requests(tokens: int = 12) -> tuple[Request, ...]:
    return tuple(requests(4, tokens))


def budgets(workers: PretendedWorkers, rank: int) -> list[tuple[int, dict[str, int], Counts]]:
    """Return the number of draft tokens, the budget without moves of K and V, and the counts of decoding rounds."""
    return [
        (max(row.k for row in plan.rows), {**counts.budget(), "graphs": counts.graphs - bool(plan.moves)}, counts)
        for plan, counts in workers.decoding(rank)
    ]


@pytest.mark.parametrize(
    ("ranks", "shape"),
    [(2, None), (2, CHAIN), (2, TREE), (4, CHAIN), pytest.param(4, TREE, marks=pytest.mark.full)],
    ids=["two, plain", "two, chains", "two, trees", "four, chains", "four, trees"],
)
def test_a_round_is_one_graph_and_one_copy_on_every_rank(
    workers: PretendedWorkers, models: Models, plain: dict[str, list[int]], ranks: int, shape: dict[str, int] | None
) -> None:
    with started(workers, models, ranks, shape) as engine:
        engine.put(*some_requests())
        assert_same(workers.finish(engine), plain)
    assert (engine.accepted > 0) == (shape is not None)
    assert any(plan.moves for plan, _ in workers.rounds["target rank 0"]) == (shape is TREE)
    for rank in range(ranks):
        decoding = budgets(workers, rank)
        assert max(k for k, _, _ in decoding) == (0 if shape is None else shape["num_speculative_tokens"])
        expected = OTHER_STEP if rank else STEP
        for name, each in expected.items():  # plain rounds are launched one ahead
            assert sum(budget[name] for _, budget, _ in decoding) == each * len(decoding)
        for _, budget, counts in decoding:
            launches = {name: expected[name] for name in LAUNCHES} if shape is None else {}
            assert {**budget, **launches} == expected
            assert not counts.pageable
        assert any(plan.continues for plan, _ in workers.decoding(rank)) == (shape is None)
        static = lasting_tensors(workers.ranks[f"target rank {rank}"])
        for graph in workers.machines[f"target rank {rank}"].capture.graphs:
            graph.reads_only(static)


def test_ranks_leave_the_same_rounds_that_were_launched_ahead(
    workers: PretendedWorkers, models: Models, plain: dict[str, list[int]]
) -> None:
    """Drafts come back with the last two rows, by the table; the plain round that runs by then is of no use."""
    by_batch = {**CHAIN, "num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 4, 0]]}
    with started(workers, models, 2, by_batch) as engine:
        engine.put(*some_requests())
        assert_same(workers.finish(engine), plain)
    mine, other = ([counts.graphs for _, counts in workers.decoding(rank)] for rank in range(2))
    assert mine == other
    assert sum(mine) == len(mine) + 1
    assert any(plan.speculates for plan, _ in workers.decoding(0))


def test_a_draft_beside_rank_0_has_graphs_of_its_own(
    workers: PretendedWorkers, models: Models, plain: dict[str, list[int]]
) -> None:
    with started(workers, models, 2, CHAIN, "colocated") as engine:
        engine.put(*some_requests())
        assert_same(workers.finish(engine), plain)
    assert engine.accepted > 0
    graphs = [{budget["graphs"] for k, budget, _ in budgets(workers, rank) if k} for rank in range(2)]
    assert max(graphs[0]) == 2
    assert graphs[1] == {1}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_prompts_are_one_graph_on_every_rank(
    workers: PretendedWorkers, models: Models, plain: dict[str, list[int]], ranks: int
) -> None:
    few = only(4, "greedy", "drawn", forwards=(32,))
    with interpreted_kernels(), few, started(workers, models, ranks, None) as engine:
        engine.put(*some_requests(3))
        assert_same(workers.finish(engine), plain)
    for rank in range(ranks):
        rounds = workers.of(rank)
        prompts = [counts for plan, counts in rounds if not plan.decodes]
        assert prompts
        for counts in prompts:
            assert counts.graphs == 1
            assert not {"attention_kernel", "write_kernel", "mm"} & set(counts.kernels)
        static = lasting_tensors(workers.ranks[f"target rank {rank}"])
        for graph in workers.machines[f"target rank {rank}"].capture.graphs:
            graph.reads_only(static)


def refusing(after: int, thread: str) -> Callable[..., contextlib.AbstractContextManager[None]]:
    """Return captures of which those of *thread* fail after *after* of them."""
    capture, made = PretendCapture.__call__, list[PretendGraph]()

    @contextlib.contextmanager
    def refuse(self: PretendCapture, graph: PretendGraph, **options: Any) -> Iterator[None]:
        is_here = threading.current_thread().name == thread
        made.extend([graph] * is_here)
        with capture(self, graph, **options):
            if is_here and len(made) > after:
                raise RuntimeError("operation not permitted when stream is capturing")
            yield

    return refuse


@pytest.mark.parametrize("after", [0, 3])
def test_a_capture_that_fails_on_one_rank_leaves_the_same_graphs_on_all(
    workers: PretendedWorkers,
    models: Models,
    plain: dict[str, list[int]],
    after: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first three are greedy steps of both sizes, and drawn ones with drafts."""
    with (
        mock.patch.object(PretendCapture, "__call__", refusing(after, "target rank 1")),
        started(workers, models, 2, CHAIN) as engine,
    ):
        engine.put(*some_requests())
        assert_same(workers.finish(engine), plain)
    mine, other = ([counts.graphs for _, counts in workers.of(rank)] for rank in range(2))
    assert mine == other
    assert set(mine) == ({0} if not after else {0, 1})
    told = [line for line in (record.getMessage() for record in caplog.records) if line.startswith("target: only")]
    assert sorted(line.rpartition(": ")[2] for line in told) == [
        "it fails on another rank",
        "operation not permitted when stream is capturing",
    ]


def attempt(group: Group, fails: Callable[[int, bool], bool]) -> str:
    """Capture a program that fails, or does not, by rank and by whether it is captured; return the error."""
    with Machine() as machine:
        counter = torch.zeros(4, device=CUDA)

        def program() -> None:
            counter.add_(1)
            if fails(group.rank, machine.recorder is not None):
                raise RuntimeError("no")

        try:
            GraphCapturer(CUDA, group).capture(program)
        except (GraphCaptureError, GroupError) as error:
            return f"{type(error).__name__}: {error}"
        return ""


@pytest.mark.parametrize(
    ("fails", "errors"),
    [
        (lambda _rank, _is_captured: False, ["", ""]),
        (lambda _rank, _is_captured: True, ["GraphCaptureError: RuntimeError: no"] * 2),
        (
            lambda rank, is_captured: rank == 1 and is_captured,
            ["GraphCaptureError: it fails on another rank", "GraphCaptureError: RuntimeError: no"],
        ),
        (
            lambda rank, _is_captured: rank == 0,
            [
                "GroupError: a step fails on 1 of 2 ranks, for which the others wait: RuntimeError: no",
                "GroupError: a step fails on 1 of 2 ranks, for which the others wait: it fails on another rank",
            ],
        ),
    ],
    ids=["on none", "on all", "captured on one", "run on one"],
)
def test_ranks_agree_on_every_graph(fails: Callable[[int, bool], bool], errors: list[str]) -> None:
    """Where some have begun operations that others did not, the group is of no more use."""
    with pretended_cuda():
        assert on_ranks(2, lambda group: attempt(group, fails)) == errors


@pytest.mark.parametrize("kind", ["fails", "hangs"])
def test_an_operation_that_fails_in_a_graph_is_noticed(
    workers: PretendedWorkers,
    models: Models,
    plain: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """By the event after the graph, which never comes: no verdict of garbage reaches the controller."""
    monkeypatch.setattr("workers.process.loading.TP_TIMEOUT_S", LIMIT_S)
    names = ("target rank 0", "target rank 1")  # not the next incarnations

    def is_named(operation: Operation) -> bool:
        return operation.what == "allreduce" and operation.thread in names

    with started(workers, models, 2, None) as engine:
        engine.put(*some_requests(16))
        engine.until(lambda: engine.num_out >= 8 and engine.rounds[-1][0].decodes)
        setattr(workers.nccl, kind, is_named)
        engine.until(lambda: engine.built.controller.stats().target_losses > 0, limit_s=30)
        assert_same(engine.finish(), plain)
    assert engine.workers is not None
    failed = [m.reason for port in engine.workers.ports.values() for m in port.sent if isinstance(m, WorkerFailed)]
    assert f"group tp/0: a CUDA graph on rank 0 takes over {LIMIT_S} s" in failed
