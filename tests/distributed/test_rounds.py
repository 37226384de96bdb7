"""The round protocol over threads: the same tokens whatever happens to the draft or to the targets."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from protos.draft import Draft
from protos.errors import EngineDeadError, PlacementError
from protos.messages import Abort, Request, Row
from protos.worker_messages import Port
from tests.support.distributed.engine import (
    PATIENT_S,
    Engine,
    K,
    Models,
    assert_same,
    configure,
    late_comer,
    quick_turns,
    requests,
    said_plainly,
    threaded,
    tiny_pair,
    uni,
)
from tests.support.distributed.thread_workers import ThreadPort
from workers.draft import wire as draft_table
from workers.process import draft_rank
from workers.process import main as rank
from workers.slots import SlotTable
from workers.verification.draft_probs import DraftProbsBySlot


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return tiny_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def _quick_turns() -> Iterator[None]:
    with quick_turns():
        yield


@pytest.fixture(scope="module")
def plain(models: Models) -> dict[str, list[int]]:
    """What every run must say."""
    return said_plainly(models)


StartGang = Callable[..., Engine]


@pytest.fixture
def gang(models: Models) -> Iterator[StartGang]:
    started: list[Engine] = []

    def start(
        *,
        floor_s: float = PATIENT_S,
        on_start: Callable[[ThreadPort], None] = lambda port: None,
        body: Callable[[Port], None] | None = None,
        **arguments: Any,
    ) -> Engine:
        started.append(threaded(configure(models, **arguments), floor_s=floor_s, body=body, on_start=on_start))
        return started[-1]

    yield start
    for engine in started:
        engine.built.shutdown()


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
def test_a_gang_says_what_one_process_says(
    gang: StartGang, plain: dict[str, list[int]], world: int, draft: bool
) -> None:
    engine = gang(tensor_parallel_size=world, draft=draft)
    engine.put(*(requests() if world == 1 else requests(4, 20)))
    assert_same(engine.finish(), plain)
    if draft:
        assert engine.proposed() > engine.accepted > 0
        assert engine.missed == 0
    else:
        assert engine.proposed() == 0
        assert not engine.drafted
    assert_timed(engine, draft=draft)


@pytest.mark.parametrize("world", [1, 2])
def test_a_draft_that_dies_is_replaced_and_nobody_notices(
    gang: StartGang, plain: dict[str, list[int]], world: int
) -> None:
    may_come = threading.Event()
    engine = gang(tensor_parallel_size=world, body=late_comer(may_come))
    assert engine.gang is not None
    engine.put(*requests(4, 20))
    engine.until(lambda: engine.num_out >= 20)
    assert engine.proposed() > 0
    engine.gang.newest("draft").crash()
    engine.until(lambda: not engine.built.executor.drafting.is_up)
    lost = len(engine.rounds)
    engine.until(lambda: len(engine.rounds) > lost + 2)
    assert engine.proposed(lost) == 0
    assert all(row.k == 0 and not plan.epoch for plan, _ in engine.rounds[lost:] for row in plan.rows)
    revived = len(engine.rounds)
    may_come.set()
    engine.until_drafting(epoch=2)
    assert_same(engine.finish(), plain)
    assert engine.proposed(revived) > 0
    assert engine.changes == {"started": 1, "lost": 1, "revived": 1}
    assert engine.missed <= 1


def test_a_silent_draft_costs_one_deadline(gang: StartGang, plain: dict[str, list[int]]) -> None:
    engine = gang(floor_s=1.0)
    assert engine.gang is not None
    engine.put(*requests())
    engine.until(lambda: engine.num_out >= 30 and engine.proposed() > 0)
    missed, rounds = engine.missed, len(engine.rounds)
    engine.gang.newest("draft").is_deaf = True
    assert engine.finish() == plain
    assert len(engine.rounds) > rounds + 5
    assert engine.missed == missed + 1
    assert engine.proposed(rounds) == 0
    assert engine.changes == {"started": 1, "late": 1}


def test_a_draft_delayed_every_round_is_not_waited_for_until_it_keeps_up(
    gang: StartGang, plain: dict[str, list[int]]
) -> None:
    engine = gang(floor_s=0.5)
    assert engine.gang is not None
    engine.put(*requests())
    engine.until(lambda: engine.num_out >= 20 and engine.proposed() > 0)
    missed = engine.missed
    engine.gang.newest("draft").delay_s = 0.7
    delayed = len(engine.rounds)
    engine.until(lambda: engine.num_out >= 100)
    assert engine.missed == missed + 1
    assert engine.proposed(delayed) == 0
    engine.gang.newest("draft").delay_s = 0.0
    prompt = requests()[5]
    for first in range(10, 1000, 10):  # the draft has work to catch up with, for as long as that takes here
        again = [
            Request(str(i), prompt.prompt_token_ids, prompt.params, prompt.sampling, 60)
            for i in range(first, first + 10)
        ]
        engine.put(*again)
        engine.finish()
        if engine.proposed(delayed):
            break
    outputs = engine.finish()
    assert {name: outputs[name] for name in plain} == plain
    assert engine.changes["in_time"] >= 1


def test_rows_with_stale_stamps_go_without_and_others_do_not(
    gang: StartGang, plain: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, spoiled = draft_table.encode, []

    def spoil(
        slots: SlotTable, rows: Sequence[Row], drafts: Sequence[Draft], laws: DraftProbsBySlot
    ) -> draft_table.Ids:
        table = encode(slots, rows, drafts, laws)
        table[0, len(spoiled) % 2] -= 1  # the base length, or the generation
        spoiled.append(rows[0].slot)
        return table

    monkeypatch.setattr(draft_rank, "encode", spoil)
    engine = gang(tensor_parallel_size=2)
    engine.put(*requests(4, 16))
    assert_same(engine.finish(), plain)
    assert len(spoiled) > 10
    for plan, verdicts in engine.rounds:
        wanting = [row.slot for row in plan.rows if row.k]
        assert not [verdict for verdict in verdicts if verdict.slot in wanting[:1] and verdict.proposed]
    assert engine.proposed() > engine.accepted > 0


@pytest.mark.parametrize(("world", "lost"), [(1, 0), (2, 0), (2, 1)])
def test_a_target_rank_that_dies_is_rebuilt_and_every_request_goes_on(
    gang: StartGang, plain: dict[str, list[int]], world: int, lost: int
) -> None:
    engine = gang(tensor_parallel_size=world)
    assert engine.gang is not None
    engine.put(*requests(4, 20))
    engine.until(lambda: engine.num_out >= 30)
    before = len(engine.rounds)
    assert engine.proposed() > 0
    engine.gang.newest("target", lost).crash()
    engine.until(lambda: len(engine.rounds) > before)
    engine.until_drafting(epoch=2)
    assert_same(engine.finish(), plain)
    assert engine.proposed(before) > 0
    assert engine.built.controller.stats().target_losses == 1
    # Target 0's end of the pair goes with it, which may be noticed first.
    causes = engine.changes.keys() - {"started", "revived"}
    assert causes == {"targets_lost"} or (lost == 0 and causes == {"pair_lost"})
    assert set(engine.changes.values()) == {1}
    assert engine.gang.newest("draft").worker.incarnation == 0, "the draft had nothing to do with it"


def test_both_lost_at_once_come_back(gang: StartGang, plain: dict[str, list[int]]) -> None:
    engine = gang()
    assert engine.gang is not None
    engine.put(*requests())
    engine.until(lambda: engine.num_out >= 60)
    before = len(engine.rounds)
    engine.gang.newest("target").crash()
    engine.gang.newest("draft").crash()
    engine.until(lambda: len(engine.rounds) > before)
    engine.until_drafting(epoch=2)
    assert engine.finish() == plain
    assert engine.proposed(before) > 0


def test_three_failed_rebuilds_end_every_request_with_an_error(gang: StartGang) -> None:
    def fail_again(port: ThreadPort) -> None:
        if port.worker.role == "target" and port.worker.incarnation:
            port.crash()

    engine = gang(on_start=fail_again)
    assert engine.gang is not None
    engine.put(*requests())
    engine.until(lambda: engine.num_out >= 30)
    open_now = engine.built.controller.scheduler.num_unfinished
    engine.gang.newest("target").crash()
    with pytest.raises(EngineDeadError, match="could not be rebuilt in 3 attempts"):
        engine.until(lambda: False)
    words = engine.built.controller.final_outputs
    assert len(words) == open_now > 0
    assert all(word.finish_reason == "error" and "3 attempts" in (word.error or "") for word in words)
    assert engine.gang.newest("target").worker.incarnation == 3


def homeless(port: Port, floor_s: float = PATIENT_S) -> None:
    """A worker for whose successors there is no place."""
    if isinstance(port, ThreadPort) and port.worker.role == "target" and port.worker.incarnation:
        port.receive(None)
        return
    rank.serve(port, floor_s=floor_s)


def test_targets_without_a_place_are_an_error_in_time_and_aborts_are_heard_meanwhile(gang: StartGang) -> None:
    engine = gang(body=homeless, rebuild_timeout_s=2.0)
    assert engine.gang is not None
    engine.put(*requests())
    engine.until(lambda: engine.num_out >= 10)
    engine.gang.newest("target").crash()
    engine.until(lambda: engine.built.controller.stats().target_losses == 1)
    engine.put(Abort(("0",)))
    engine.until(lambda: engine.reasons.get("0") == "abort")
    with pytest.raises(PlacementError, match=r"no place was found for target rank 0 .*within 2 s"):
        engine.until(lambda: False)
    assert len(engine.built.controller.final_outputs) == len(requests()) - 1


def test_above_the_threshold_the_draft_gets_no_work(
    gang: StartGang, models: Models, plain: dict[str, list[int]]
) -> None:
    engine = gang(
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


@pytest.mark.parametrize("world", [1, 2])
def test_a_draft_that_is_the_target_is_never_wrong_whoever_died(
    gang: StartGang, models: Models, plain: dict[str, list[int]], world: int
) -> None:
    # Stale, missing or foreign KV in the draft's cache would show as a rejection: after it was recreated, after prefix
    # hits on blocks made while it was away, after preemption, and after the targets' blocks were all given up.
    same = {"method": "draft_model", "model": str(models[0]), "num_speculative_tokens": K, "placement": "dedicated"}
    may_come = threading.Event()
    engine = gang(
        tensor_parallel_size=world, speculative_config=same, num_gpu_blocks_override=40, body=late_comer(may_come)
    )
    assert engine.gang is not None
    engine.put(*requests(max_tokens=30 if world == 1 else 16))
    engine.until(lambda: engine.num_out >= 25)
    engine.gang.newest("draft").crash()
    engine.until(lambda: not engine.built.executor.drafting.is_up)
    lost = len(engine.rounds)
    engine.until(lambda: len(engine.rounds) > lost + 5)
    may_come.set()
    engine.until_drafting(epoch=2)
    engine.until(lambda: engine.num_out >= 60)
    engine.gang.newest("target").crash()
    engine.until(lambda: engine.built.controller.stats().target_losses == 1)
    before = len(engine.rounds)
    engine.until(lambda: len(engine.rounds) > before)
    engine.until_drafting(epoch=3)
    assert_same(engine.finish(), plain)
    assert engine.accepted == engine.proposed() > 25


def test_a_draft_in_target_0s_process_needs_no_pair(
    gang: StartGang, models: Models, plain: dict[str, list[int]]
) -> None:
    inside = {"method": "draft_model", "model": str(models[1]), "num_speculative_tokens": K, "placement": "colocated"}
    engine = gang(tensor_parallel_size=2, speculative_config=inside)
    assert engine.gang is not None
    engine.put(*requests(4, 16))
    assert_same(engine.finish(), plain)
    assert engine.proposed() > engine.accepted > 0
    assert {worker.role for worker in engine.gang.ports} == {"target"}


def test_ngram_guesses_ride_in_the_plan_to_every_rank(gang: StartGang, plain: dict[str, list[int]]) -> None:
    looked_up = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    engine = gang(tensor_parallel_size=2, speculative_config=looked_up)
    engine.put(*requests(4, 24))
    assert_same(engine.finish(), plain)
    assert engine.proposed() > engine.accepted > 0


def test_a_model_that_is_not_there_is_the_users_error(gang: StartGang, tmp_path: Path) -> None:
    from protos.errors import ModelError

    with pytest.raises(ModelError, match="there is no such folder"):
        gang(model=str(tmp_path / "nowhere"))
