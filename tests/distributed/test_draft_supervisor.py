"""Losing, pairing and replacing the draft, with scripted workers."""

from collections.abc import Sequence

import pytest

from protos.draft import Draft
from protos.messages import NewSequence, RoundPlan, Row, Sampling, Verdict
from protos.worker_messages import (
    Died,
    DraftChannelFailed,
    Heartbeat,
    Plan,
    RoundDone,
    WorkerId,
)
from runtime.supervision.distributed_executor import DistributedExecutor
from runtime.supervision.draft_supervisor import MAX_HELD_PLANS, MAX_RETRY_S
from tests.support.distributed.scripted_group import DRAFT, ONE, Clock, ScriptedGroup, make_executor, make_plan


def test_a_draft_that_says_nothing_any_more_is_replaced_beside_the_rounds() -> None:
    clock = Clock()
    group = ScriptedGroup(clock)
    executor = make_executor(group, clock)
    executor.start()
    assert executor.drafting.is_up
    group.mute = {DRAFT}
    number = 0
    while executor.drafting.epoch == 1:
        clock.now += 0.5
        group.post(ONE, Heartbeat("serving"))
        executor.poll()
        executor.run(make_plan(number, executor.drafting.epoch))
        number += 1
        assert number < 12
    assert group.killed == [DRAFT]
    while not executor.drafting.is_up:
        clock.now += 0.1
        executor.poll()
    assert executor.drafting.epoch == 2
    assert dict(executor.drafting.changes) == {"started": 1, "lost": 1, "revived": 1}
    assert group.started[-1] == WorkerId("draft", 0, 1)


def test_a_draft_that_beats_but_gets_nothing_done_is_replaced() -> None:
    clock = Clock()
    group = ScriptedGroup(clock)
    executor = make_executor(group, clock)
    executor.start()
    for number in range(100):
        group.post(DRAFT, Heartbeat("serving", min(number - 1, 49)))  # always one round late, then stuck
        group.post(ONE, Heartbeat("serving", number - 1))
        clock.now += 0.5
        executor.run(make_plan(number, executor.drafting.epoch))
        if group.killed:
            break
    assert 60 < number < 99, number
    assert group.killed == [DRAFT]


def pass_seconds(executor: DistributedExecutor, group: ScriptedGroup, clock: Clock, seconds: int) -> None:
    """Let time pass in which no worker dies."""
    for _ in range(seconds * 4):
        clock.now += 0.25
        for worker in group.started:
            group.post(worker, Heartbeat("serving"))
        executor.poll()


def test_a_pair_that_breaks_is_formed_again_and_a_draft_that_cannot_be_paired_is_replaced() -> None:
    clock = Clock()
    group = ScriptedGroup(clock)
    executor = make_executor(group, clock)
    executor.start()
    group.post(ONE, DraftChannelFailed(1, "connection reset"))
    executor.poll()
    assert not executor.drafting.is_up
    pass_seconds(executor, group, clock, 2)
    assert executor.drafting.epoch == 2
    for epoch in (2, 3, 4):
        group.post(DRAFT, DraftChannelFailed(epoch, "connection reset"))
        pass_seconds(executor, group, clock, 2)
    assert executor.drafting.epoch == 5
    assert not group.killed, "each of these pairs was formed before it broke"
    group.mute = {DRAFT}
    group.post(ONE, DraftChannelFailed(5, "gone"))
    pass_seconds(executor, group, clock, 300)
    assert group.killed == [DRAFT]


def test_a_draft_that_dies_as_soon_as_it_serves_is_replaced_ever_more_slowly() -> None:
    clock = Clock()
    group = ScriptedGroup(clock)
    executor = make_executor(group, clock)
    executor.start()
    pass_seconds(executor, group, clock, 20)
    for _ in range(100):
        if executor.drafting.is_up:
            group.post(group.started[-1], Died("signal SIGSEGV"))
        pass_seconds(executor, group, clock, 1)
    assert 5 <= len(group.started) - 2 <= 10
    pass_seconds(executor, group, clock, 70)
    assert executor.drafting.is_up


def test_a_draft_that_served_long_is_replaced_at_once_even_if_its_pair_broke_first() -> None:
    clock = Clock()
    group = ScriptedGroup(clock)
    executor = make_executor(group, clock)
    executor.start()
    for number in range(1, 9):
        pass_seconds(executor, group, clock, 20)
        assert executor.drafting.is_up
        group.post(ONE, DraftChannelFailed(executor.drafting.epoch, "connection reset"))
        executor.poll()
        group.post(group.started[-1], Died("signal SIGKILL"))
        executor.poll()
        pass_seconds(executor, group, clock, 2)
        assert executor.drafting.is_up
        assert len(group.started) == 2 + number


def test_a_draft_that_never_serves_is_tried_for_ever() -> None:
    clock = Clock()
    group = ScriptedGroup(clock)
    executor = make_executor(group, clock)
    executor.start()
    draft = executor._draft
    assert draft is not None
    for _ in range(1100):  # 2.0**1024 is no number
        draft.lose("died: signal SIGSEGV")
    assert draft._retry_at is not None
    assert draft._retry_at - draft._watchdog.now == pytest.approx(MAX_RETRY_S)


def test_being_late_is_said_and_counted_once_an_outage() -> None:
    clock = Clock()
    group = ScriptedGroup(clock)
    executor = make_executor(group, clock)
    executor.start()
    group.mute = {ONE}
    results = [
        RoundDone(0, [], draft_missed=True),
        RoundDone(1, []),
        RoundDone(2, [Verdict(0, [1], proposed=2)]),
        RoundDone(3, [], draft_missed=True),
    ]
    for done in results:
        group.post(ONE, done)
        executor.run(make_plan(done.round, 1))
    assert dict(executor.drafting.changes) == {"started": 1, "late": 2, "in_time": 1}


def plans_of_draft(group: ScriptedGroup) -> list[int]:
    return [
        message.plan.round for worker, message in group.sent if worker.role == "draft" and isinstance(message, Plan)
    ]


def decoding(number: int, *, k: int = 0, draft: Draft | None = None, new: Sequence[NewSequence] = ()) -> RoundPlan:
    row = Row(0, 0, 1, 4, k=k, draft=draft)
    return RoundPlan(number, [row], new, epoch=1, speculates=k > 0)


def test_plans_without_draft_tokens_reach_the_draft_together_and_before_it_has_to_draft() -> None:
    clock = Clock()
    group = ScriptedGroup(clock)
    executor = make_executor(group, clock)
    executor.start()
    for number in range(MAX_HELD_PLANS - 1):
        executor.run(decoding(number))
    assert plans_of_draft(group) == []
    executor.run(decoding(MAX_HELD_PLANS - 1))
    assert plans_of_draft(group) == list(range(MAX_HELD_PLANS))
    executor.run(decoding(10))
    executor.run(decoding(11, k=2, draft=Draft([1, 2])))  # found without the worker
    executor.run(decoding(12, k=2))
    executor.run(decoding(13, new=[NewSequence(1, [5, 6], 2, Sampling(seed=0))]))
    executor.run(make_plan(14))  # a prompt
    assert plans_of_draft(group)[MAX_HELD_PLANS:] == [10, 11, 12, 13, 14]


def test_held_plans_are_not_sent_to_a_draft_that_is_connected_again() -> None:
    clock = Clock()
    group = ScriptedGroup(clock)
    executor = make_executor(group, clock)
    executor.start()
    executor.run(decoding(0))
    group.post(ONE, DraftChannelFailed(1, "connection reset"))
    executor.poll()
    pass_seconds(executor, group, clock, 2)
    assert executor.drafting.epoch == 2
    executor.run(decoding(1, k=2))
    assert plans_of_draft(group) == [1]
