"""The round protocol over threads: the tokens of a single process."""

from pathlib import Path

import pytest

from tests.support.distributed.engine import Engine, K, Models, StartEngine, assert_same, requests, uni


def assert_timed(engine: Engine, *, draft: bool) -> None:
    """Phases were measured, and fit into the steps they were phases of."""
    stats = engine.built.controller.stats()
    phases = stats.phases
    assert phases.score_s > 0
    assert phases.verify_s > 0
    assert phases.score_s + phases.verify_s + phases.transfer_s <= stats.steps_s
    assert (phases.propose_s > 0) == draft
    assert phases.propose_s <= stats.steps_s
    assert phases.late_drafts == 0
    assert (stats.speculation, stats.num_speculative_tokens) == (("on", K) if draft else ("off", 0))


def test_uni_with_a_draft_says_the_same(models: Models, plain: dict[str, list[int]]) -> None:
    engine = uni(models, draft=True)
    engine.put(*requests())
    assert engine.finish() == plain
    assert engine.proposed() > engine.accepted > 0
    assert_timed(engine, draft=True)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("draft", [True, False], ids=["draft", "off"])
def test_a_worker_group_returns_the_tokens_of_one_process(
    start_engine: StartEngine, plain: dict[str, list[int]], world: int, draft: bool
) -> None:
    engine = start_engine(tensor_parallel_size=world, draft=draft)
    engine.put(*(requests() if world == 1 else requests(4, 20)))
    assert_same(engine.finish(), plain)
    if draft:
        assert engine.proposed() > engine.accepted > 0
        assert engine.missed == 0
    else:
        assert engine.proposed() == 0
        assert not engine.drafted
    assert_timed(engine, draft=draft)


def test_above_the_threshold_the_draft_gets_no_work(
    start_engine: StartEngine, models: Models, plain: dict[str, list[int]]
) -> None:
    engine = start_engine(
        speculative_config={
            "method": "draft_model",
            "model": str(models[1]),
            "num_speculative_tokens": K,
            "placement": "dedicated",
            "num_speculative_tokens_per_batch_size": [[1, 2, K], [3, 99, 0]],
        }
    )
    engine.put(*requests())
    assert engine.finish() == plain
    off = [verdicts for plan, verdicts in engine.rounds if not plan.epoch]
    assert len(off) > 5
    assert not any(verdict.proposed for verdicts in off for verdict in verdicts)
    assert engine.drafted <= {plan.round for plan, _ in engine.rounds if any(row.k for row in plan.rows)}
    assert engine.proposed() > engine.accepted > 0


def test_a_draft_in_target_0s_process_needs_no_pair(
    start_engine: StartEngine, models: Models, plain: dict[str, list[int]]
) -> None:
    inside = {"method": "draft_model", "model": str(models[1]), "num_speculative_tokens": K, "placement": "colocated"}
    engine = start_engine(tensor_parallel_size=2, speculative_config=inside)
    assert engine.workers is not None
    engine.put(*requests(4, 16))
    assert_same(engine.finish(), plain)
    assert engine.proposed() > engine.accepted > 0
    assert {worker.role for worker in engine.workers.ports} == {"target"}


def test_ngram_drafts_travel_in_the_plan_to_every_rank(start_engine: StartEngine, plain: dict[str, list[int]]) -> None:
    looked_up = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    engine = start_engine(tensor_parallel_size=2, speculative_config=looked_up)
    engine.put(*requests(4, 24))
    assert_same(engine.finish(), plain)
    assert engine.proposed() > engine.accepted > 0


def test_a_model_that_is_not_there_is_the_users_error(start_engine: StartEngine, tmp_path: Path) -> None:
    from protos.errors import ModelError

    with pytest.raises(ModelError, match="no such folder"):
        start_engine(model=str(tmp_path / "nowhere"))
