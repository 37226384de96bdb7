"""Which steps continue, so that the workers may begin the next one before its plan comes."""

from typing import Any

import pytest
from msgspec.structs import replace

from proposers.ngram import NgramProposer
from protos.interfaces import DraftService, Proposer
from protos.messages import Grammar, RoundPlan, Sampling, Verdict
from runtime.core.scheduler import Scheduler
from runtime.policy.base import NoSpeculation
from tests.support.distributed.fake_worker import make_request
from tests.support.scheduling import INFO, fixed_k, make_verdicts, started

AHEAD = replace(INFO, rows_ahead=8)
OFF = NoSpeculation()


def step(scheduler: Scheduler, *tokens: int, verdicts: list[Verdict] | None = None) -> RoundPlan:
    plan = scheduler.schedule(OFF)
    scheduler.commit(plan, verdicts or make_verdicts(plan, *([token] for token in tokens)))
    return plan


def test_decoding_continues_until_every_row_ends() -> None:
    scheduler = started(make_request("a", [1, 2, 3], 3), make_request("b", [1, 2], 4), info=AHEAD)
    steps = [step(scheduler, *tokens) for tokens in ([1, 1], [1, 1], [1])]
    assert [(len(plan.rows), plan.continues) for plan in steps] == [(2, True), (2, True), (1, False)]


def test_prompts_do_not_continue() -> None:
    scheduler = started(make_request("a", [1, 2, 3], 9), info=AHEAD)
    scheduler.admit([make_request("b", [4] * 5, 9)])
    assert not step(scheduler, 1, 1).continues
    assert step(scheduler, 1, 1).continues


def test_a_request_that_comes_starts_after_the_step_that_was_begun() -> None:
    scheduler = started(make_request("a", [1, 2, 3], 9), info=AHEAD)
    assert step(scheduler, 1).continues
    scheduler.admit([make_request("b", [4, 5], 9)])
    begun = step(scheduler, 1)
    assert (len(begun.rows), begun.new, begun.continues) == (1, [], False)
    assert [new.token_ids for new in step(scheduler, 1, 1).new] == [(4, 5)]


@pytest.mark.parametrize(("slots", "continues"), [(1, True), (2, False)])
def test_a_request_that_waits_is_not_held_back_where_there_is_a_slot(slots: int, continues: bool) -> None:
    scheduler = started(make_request("a", [1, 2, 3], 9), info=AHEAD, max_num_seqs=slots)
    scheduler.admit([make_request("b", [4] * 60, 4), make_request("c", [4], 4)])
    plan = scheduler.schedule(OFF)
    assert plan.continues is continues
    assert len(plan.rows) == slots


def test_a_request_that_waits_takes_the_slot_of_a_row_that_ends_for_certain() -> None:
    scheduler = started(make_request("a", [1, 2, 3], 3), make_request("b", [1], 9), info=AHEAD, max_num_seqs=2)
    scheduler.admit([make_request("c", [4], 4)])
    assert [step(scheduler, 1, 1).continues, step(scheduler, 1, 1).continues] == [True, False]
    assert [new.token_ids for new in step(scheduler, 1, 1).new] == [(4,)]


def test_a_request_starts_at_once_where_all_that_were_begun_ended() -> None:
    scheduler = started(make_request("a", [1, 2, 3], 9, eos_ids=(7,)), info=AHEAD)
    assert step(scheduler, 7).continues
    scheduler.admit([make_request("b", [4, 5], 9)])
    assert len(scheduler.schedule(OFF).new) == 1


def test_rows_continue_beside_a_request_for_which_there_are_too_few_blocks() -> None:
    """It wants 15 of 16 that are free, and one is left for each running sequence. So it starts after one ends."""
    info = replace(AHEAD, num_blocks=18)
    waiting = make_request("c", [4] * 60, 4)
    scheduler = started(make_request("a", [1], 30), make_request("b", [1, 2], 30, eos_ids=(7,)), info=info)
    scheduler.admit([waiting])
    assert step(scheduler, 1, 1).continues
    assert step(scheduler, 1, 7).continues
    assert not step(scheduler, 1).continues
    assert [new.token_ids for new in scheduler.schedule(OFF).new] == [tuple([4] * 60)]


def test_rows_get_a_block_for_the_next_token() -> None:
    scheduler = started(make_request("a", [1, 2], 9), info=AHEAD)
    plan = scheduler.schedule(OFF)
    assert (plan.rows[0].known_len, plan.continues, len(plan.rows[0].new_block_ids)) == (3, True, 0)
    scheduler.commit(plan, make_verdicts(plan, [1]))
    plan = scheduler.schedule(OFF)
    assert (plan.rows[0].known_len, plan.continues, len(plan.rows[0].new_block_ids)) == (4, True, 1)


def test_rows_do_not_continue_without_a_free_block() -> None:
    """Of three blocks two are full, and two are wanted."""
    info = replace(AHEAD, num_blocks=3, max_model_len=8)
    scheduler = started(make_request("a", [1, 2, 3], 4), make_request("b", [2, 2, 3], 4), info=info)
    plan = scheduler.schedule(OFF)
    assert [row.known_len for row in plan.rows] == [4, 4]
    assert not plan.continues


def test_workers_that_do_not_run_ahead_are_not_told_to() -> None:
    scheduler = started(make_request("a", [1, 2, 3], 9))
    assert not scheduler.schedule(OFF).continues


@pytest.mark.parametrize(("rows_ahead", "continues"), [(1, False), (2, True)])
def test_more_rows_than_workers_run_ahead_do_not_continue(rows_ahead: int, continues: bool) -> None:
    info = replace(INFO, rows_ahead=rows_ahead)
    scheduler = started(make_request("a", [1, 2, 3], 9), make_request("b", [1, 2], 9), info=info)
    assert scheduler.schedule(OFF).continues is continues


@pytest.mark.parametrize(
    "sampling",
    [{"logprobs": 1}, {"grammar": Grammar("regex", "a")}, {"logit_bias": {1: 2.0}}, {"bad_words": ((1,),)}],
    ids=lambda fields: next(iter(fields)),
)
def test_rows_that_the_host_samples_do_not_continue(sampling: dict[str, Any]) -> None:
    request = make_request("a", [1, 2, 3], 9)
    scheduler = started(replace(request, sampling=Sampling(seed=0, **sampling)), info=AHEAD)
    assert not scheduler.schedule(OFF).continues


def test_rows_with_drafts_do_not_continue() -> None:
    scheduler = started(make_request("a", [1, 2, 3], 9), info=AHEAD)
    assert not scheduler.schedule(fixed_k(2)).continues


@pytest.mark.parametrize(("proposers", "ahead"), [([], True), ([NgramProposer(1, 2)], False)])
def test_rounds_without_the_only_source_of_drafts_continue(proposers: list[Proposer], ahead: bool) -> None:
    scheduler = started(make_request("a", [1, 2, 3], 9), policy=OFF, info=AHEAD, proposers=proposers)
    plan = scheduler.schedule(fixed_k(3), DraftService(is_up=False))
    assert plan.continues == ahead
    assert plan.speculates != ahead, "else the round that was begun ahead is of no use"
