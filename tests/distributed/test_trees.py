"""Draft trees in a worker group of threads: equal on all ranks, from the draft and the controller, and after losses."""

from collections.abc import Iterator
from typing import Any

import pytest

from protos.messages import Request, Sampling
from protos.sampling import SamplingParams
from tests.proposers.test_trees import NGRAM, planted
from tests.support.distributed.engine import (
    Engine,
    Models,
    assert_same,
    configure,
    quick_turns,
    threaded,
    tiny_pair,
    uni,
)
from tests.support.tree_proposer import TreeProposer, WorkerTreeProposer

VOCAB, K = 97, 6
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.2, "frequency_penalty": 0.3}


def requests(tokens: int = 18) -> list[Request]:
    shared = [11, 12, 13, 14, 15, 16, 17, 18, 19]
    samplings = [Sampling(0, 0.0), Sampling(1, 1.0), Sampling(2, 0.0, **PENALTIES), Sampling(3, 0.9, **PENALTIES)]
    return [
        Request(
            request_id=str(i),
            prompt_token_ids=(*shared * (i % 2), *[5, 6, 7, 8 + i] * (2 + 3 * i)),
            params=SamplingParams(),
            max_tokens=tokens + i,
            sampling=sampling,
        )
        for i, sampling in enumerate(samplings)
    ]


@pytest.fixture(autouse=True)
def _quick_turns() -> Iterator[None]:
    with quick_turns():
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return tiny_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def plain(models: Models) -> dict[str, list[int]]:
    engine = uni(models, draft=False)
    engine.put(*requests())
    return engine.finish()


def texts(plain: dict[str, list[int]]) -> list[list[int]]:
    return [[*request.prompt_token_ids, *plain[request.request_id]] for request in requests()]


def drafted(models: Models, placement: str) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(models[1]), "num_speculative_tokens": K, "placement": placement}


def assert_walked(engine: Engine) -> None:
    paths = [list(verdict.path) for _, verdicts in engine.rounds for verdict in verdicts]
    assert any(path != list(range(len(path))) for path in paths)
    assert any(plan.moves for plan, _ in engine.rounds)
    assert any(verdict.probed for _, verdicts in engine.rounds for verdict in verdicts)
    assert engine.proposed() > engine.accepted > 0


@pytest.mark.parametrize("where", ["controller", "dedicated", "colocated"])
def test_every_rank_scores_the_same_trees(models: Models, plain: dict[str, list[int]], where: str) -> None:
    proposer = (TreeProposer if where == "controller" else WorkerTreeProposer)(texts(plain), VOCAB)
    speculative = {**NGRAM, "num_speculative_tokens": K} if where == "controller" else drafted(models, where)
    with planted(proposer):
        engine = threaded(configure(models, tensor_parallel_size=2, speculative_config=speculative))
    try:
        engine.put(*requests())
        assert_same(engine.finish(), plain)
        assert_walked(engine)
    finally:
        engine.built.shutdown()


def test_moves_of_a_lost_cache_are_forgotten(models: Models, plain: dict[str, list[int]]) -> None:
    with planted(TreeProposer(texts(plain), VOCAB)):
        engine = threaded(configure(models, speculative_config={**NGRAM, "num_speculative_tokens": K}))
    assert engine.workers is not None
    try:
        engine.put(*requests())
        engine.until(lambda: engine.num_out >= 20)
        engine.workers.newest("target").crash()
        engine.until(lambda: engine.built.controller.stats().target_losses == 1)
        before = len(engine.rounds)
        assert_same(engine.finish(), plain)
        assert not engine.rounds[before][0].moves
        assert_walked(engine)
    finally:
        engine.built.shutdown()
