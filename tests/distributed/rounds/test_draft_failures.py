"""The round protocol over threads: a draft that dies, falls silent or is late changes no token."""

import threading
from collections.abc import Sequence

import pytest

from protos.draft import Draft
from protos.messages import Request, Row
from tests.support.distributed.engine import (
    K,
    Models,
    StartEngine,
    assert_same,
    late_comer,
    requests,
)
from workers.draft import wire as draft_table
from workers.process import draft_rank
from workers.slots import SlotTable
from workers.verification.draft_probs import DraftProbsBySlot


@pytest.mark.parametrize("world", [1, 2])
def test_a_draft_that_dies_is_replaced_and_changes_no_token(
    start_engine: StartEngine, plain: dict[str, list[int]], world: int
) -> None:
    may_come = threading.Event()
    engine = start_engine(tensor_parallel_size=world, body=late_comer(may_come))
    assert engine.workers is not None
    engine.put(*requests(4, 20))
    engine.until(lambda: engine.num_out >= 20)
    assert engine.proposed() > 0
    engine.workers.newest("draft").crash()
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


def test_a_silent_draft_costs_one_deadline(start_engine: StartEngine, plain: dict[str, list[int]]) -> None:
    engine = start_engine(floor_s=1.0)
    assert engine.workers is not None
    engine.put(*requests())
    engine.until(lambda: engine.num_out >= 30 and engine.proposed() > 0)
    missed, rounds = engine.missed, len(engine.rounds)
    engine.workers.newest("draft").is_deaf = True
    assert engine.finish() == plain
    assert len(engine.rounds) > rounds + 5
    assert engine.missed == missed + 1
    assert engine.proposed(rounds) == 0
    assert engine.changes == {"started": 1, "late": 1}


def test_a_draft_delayed_every_round_is_not_waited_for_until_it_keeps_up(
    start_engine: StartEngine, plain: dict[str, list[int]]
) -> None:
    engine = start_engine(floor_s=0.5)
    assert engine.workers is not None
    engine.put(*requests())
    engine.until(lambda: engine.num_out >= 20 and engine.proposed() > 0)
    missed = engine.missed
    engine.workers.newest("draft").delay_s = 0.7
    delayed = len(engine.rounds)
    engine.until(lambda: engine.num_out >= 100)
    assert engine.missed == missed + 1
    assert engine.proposed(delayed) == 0
    engine.workers.newest("draft").delay_s = 0.0
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
    start_engine: StartEngine, plain: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
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
    engine = start_engine(tensor_parallel_size=2)
    engine.put(*requests(4, 16))
    assert_same(engine.finish(), plain)
    assert len(spoiled) > 10
    for plan, verdicts in engine.rounds:
        wanting = [row.slot for row in plan.rows if row.k]
        assert not [verdict for verdict in verdicts if verdict.slot in wanting[:1] and verdict.proposed]
    assert engine.proposed() > engine.accepted > 0


@pytest.mark.parametrize("world", [1, 2])
def test_a_draft_that_is_the_target_is_never_wrong_whoever_died(
    start_engine: StartEngine, models: Models, plain: dict[str, list[int]], world: int
) -> None:
    # Stale, missing or foreign KV in the draft's cache would show as a rejection: after it was recreated, after prefix
    # hits on blocks made while it was away, after preemption, and after the targets' blocks were all given up.
    same = {"method": "draft_model", "model": str(models[0]), "num_speculative_tokens": K, "placement": "dedicated"}
    may_come = threading.Event()
    engine = start_engine(
        tensor_parallel_size=world, speculative_config=same, num_gpu_blocks_override=40, body=late_comer(may_come)
    )
    assert engine.workers is not None
    engine.put(*requests(max_tokens=30 if world == 1 else 16))
    engine.until(lambda: engine.num_out >= 25)
    engine.workers.newest("draft").crash()
    engine.until(lambda: not engine.built.executor.drafting.is_up)
    lost = len(engine.rounds)
    engine.until(lambda: len(engine.rounds) > lost + 5)
    may_come.set()
    engine.until_drafting(epoch=2)
    engine.until(lambda: engine.num_out >= 60)
    engine.workers.newest("target").crash()
    engine.until(lambda: engine.built.controller.stats().target_losses == 1)
    before = len(engine.rounds)
    engine.until(lambda: len(engine.rounds) > before)
    engine.until_drafting(epoch=3)
    assert_same(engine.finish(), plain)
    assert engine.accepted == engine.proposed() > 25
