"""Recurrent states of the prefix cache: where they are kept, how many, and which rows begin with them."""

from collections.abc import Sequence

import msgspec
import pytest

from protos.messages import Row, Verdict
from runtime.core.prefix_states import PrefixStates
from runtime.core.scheduler import Scheduler
from runtime.policy.base import Policy
from tests.support.distributed.fake_worker import make_request
from tests.support.scheduling import INFO, OFF, fixed_k, make_scheduler, make_verdicts

PROMPT = list(range(10)) * 2  # five blocks


def scheduler_with(num_states: int | None, **options: object) -> Scheduler:
    return make_scheduler(msgspec.structs.replace(INFO, prefix_states=num_states, **options))


def step(scheduler: Scheduler, *tokens: Sequence[int], policy: Policy = OFF, proposed: int = 0) -> list[Row]:
    plan = scheduler.schedule(policy)
    scheduler.commit(plan, make_verdicts(plan, *tokens, proposed=proposed))
    scheduler.check_integrity()
    return list(plan.rows)


def run(scheduler: Scheduler, name: str, prompt: Sequence[int], max_tokens: int = 1) -> list[Row]:
    """Run a request to its end, which generates zeros; return its rows."""
    scheduler.admit([make_request(name, prompt, max_tokens)])
    rows = []
    while scheduler.num_unfinished:
        plan = scheduler.schedule(OFF)
        scheduler.commit(plan, make_verdicts(plan, *[[0] for row in plan.rows if row.samples]))
        scheduler.check_integrity()
        rows += plan.rows
    return rows


def test_a_prompt_keeps_its_last_boundary_and_the_same_prompt_begins_there() -> None:
    scheduler = scheduler_with(4)
    (first,) = run(scheduler, "a", [*PROMPT, 1])
    ends = dict(zip(first.states_to[::2], first.states_to[1::2], strict=True))
    assert (list(ends), first.state_from) == ([20], -1)
    (second,) = run(scheduler, "b", [*PROMPT, 2, 3])
    assert (second.start, second.length, second.state_from) == (20, 2, ends[20])


def test_the_boundary_where_prompts_part_is_kept_for_the_third() -> None:
    scheduler = scheduler_with(4)
    run(scheduler, "a", PROMPT)
    (second,) = run(scheduler, "b", [*PROMPT[:9], 5, 5, 5, 5, 5])
    assert (second.start, list(second.states_to[::2])) == (0, [8, 12])
    (third,) = run(scheduler, "c", [*PROMPT[:8], 7, 7, 7])
    assert (third.start, third.state_from) == (8, second.states_to[1])
    assert list(third.states_to[::2]) == [], "no full block follows"


def test_one_state_moves_with_a_sequence_and_later_requests_continue_its_output() -> None:
    scheduler = scheduler_with(3)
    rows = run(scheduler, "a", PROMPT[:6], max_tokens=12)
    assert [end for row in rows for end in row.states_to[::2]] == [4, 8, 12, 16]
    states = scheduler._queue.blocks.states
    assert states is not None
    assert states.num_kept == 2, "at the end of the prompt, and the last of those that moved"
    (after,) = run(scheduler, "b", [*PROMPT[:6], *[0] * 12])
    assert after.start == 16


def test_chunks_of_a_prompt_keep_a_state_that_moves() -> None:
    scheduler = make_scheduler(msgspec.structs.replace(INFO, prefix_states=3), max_num_batched_tokens=7)
    rows = run(scheduler, "a", [*PROMPT, 1, 2])
    assert [(row.start, list(row.states_to[::2])) for row in rows] == [(0, [4]), (7, [12]), (14, [20]), (21, [])]
    states = scheduler._queue.blocks.states
    assert states is not None
    assert states.num_kept == 1


def test_a_state_after_rejected_tokens_is_not_kept() -> None:
    scheduler = scheduler_with(2)
    scheduler.admit([make_request("a", [1, 2], max_tokens=20)])
    step(scheduler, [3])
    (row,) = step(scheduler, [5], policy=fixed_k(3), proposed=3)
    states = scheduler._queue.blocks.states
    assert states is not None
    assert (list(row.states_to[::2]), states.num_kept) == ([4], 0)
    (row,) = step(scheduler, [6, 7], policy=fixed_k(3), proposed=3)
    assert (list(row.states_to[::2]), states.num_kept) == ([4], 1)


def test_a_draft_that_needs_the_token_after_has_its_state_one_block_earlier() -> None:
    scheduler = scheduler_with(4, draft_needs="all")
    policy = fixed_k(2)
    scheduler.admit([make_request("a", [*PROMPT, 1], 1)])
    (first,) = step(scheduler, [0], policy=policy)
    assert 16 in first.states_to[::2]
    scheduler.admit([make_request("b", [*PROMPT, 1], 1)])
    (second,) = step(scheduler, [0], policy=policy)
    assert second.start == 16


def test_evicted_blocks_lose_their_states() -> None:
    scheduler = scheduler_with(8, num_blocks=16)
    run(scheduler, "a", PROMPT)
    states = scheduler._queue.blocks.states
    assert states is not None
    assert states.num_kept == 2
    run(scheduler, "b", [9] * 63)
    assert states.num_kept == 1, "that of the second"
    (again,) = run(scheduler, "c", PROMPT)
    assert again.start == 0


def test_a_failed_row_keeps_nothing() -> None:
    scheduler = scheduler_with(2)
    scheduler.admit([make_request("a", PROMPT)])
    plan = scheduler.schedule(OFF)
    scheduler.commit(plan, [Verdict(plan.rows[0].slot, failed="not a number")])
    scheduler.check_integrity()
    (again,) = run(scheduler, "b", PROMPT)
    assert (again.start, again.state_from) == (0, -1)


def test_without_states_nothing_is_reused() -> None:
    scheduler = scheduler_with(0)
    run(scheduler, "a", PROMPT)
    (again,) = run(scheduler, "b", PROMPT)
    assert (again.start, list(again.states_to)) == (0, [])


def test_new_workers_have_no_states() -> None:
    scheduler = scheduler_with(4)
    run(scheduler, "a", PROMPT)
    scheduler.admit([make_request("b", PROMPT)])
    scheduler.schedule(OFF)
    scheduler.requeue_all()
    scheduler.resize(INFO.num_blocks, 2)
    scheduler.check_integrity()
    (row,) = step(scheduler, [0])
    assert (row.start, row.state_from) == (0, -1)
    assert set(row.states_to[1::2]) <= {0, 1}


def test_the_least_recently_used_state_gives_way() -> None:
    states = PrefixStates(2)
    for node in (10, 11):
        state = states.reserve()
        assert state is not None
        states.keep(node, state)
    first = states.resume(10)
    third = states.reserve()
    assert (10 in states, 11 in states) == (True, False)
    assert third not in {None, first}
    states.supersede(10)
    assert 10 in states, "another sequence began after it"
    assert states.reserve() == first
    assert states.reserve() is None, "all are reserved"
    states.settle([first])
    assert states.reserve() == first


def test_the_state_of_another_sequence_does_not_move() -> None:
    scheduler = scheduler_with(8)
    scheduler.admit([make_request("a", [1, 2, 3, 0, 0, 0, 5], 1)])
    step(scheduler, [0])
    states = scheduler._queue.blocks.states
    assert states is not None
    before = dict(states._kept)
    run(scheduler, "b", [1, 2, 3], 12)
    assert before.items() <= states._kept.items()


def test_a_lost_state_is_noticed() -> None:
    states = PrefixStates(2)
    states._free.pop()
    with pytest.raises(RuntimeError, match="are not each of 2 once"):
        states.check_integrity([])
    states = PrefixStates(1)
    states.keep(3, states.reserve() or 0)
    with pytest.raises(RuntimeError, match="not published"):
        states.check_integrity([])
