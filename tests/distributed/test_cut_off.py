"""Target ranks on a machine from which nothing comes: waited for, and replaced only after a while; scripted workers."""

import contextlib

import pytest

from protos.errors import NoRoomError, TargetLostError
from protos.worker_messages import Died, Rejoin, WorkerId
from runtime.supervision.distributed_executor import DistributedExecutor
from runtime.supervision.target_supervisor import AWAY_S
from tests.support.distributed.scripted_group import ONE, STORE, Clock, ScriptedGroup, make_executor, make_plan

RANK_1 = WorkerId("target", 1)


def cut_off(machine: str = "controller", **parallel: float) -> tuple[ScriptedGroup, DistributedExecutor, Clock]:
    """Return an engine whose rank 1, alone on the machine "far", has just been missed."""
    clock = Clock()
    group = ScriptedGroup(clock)
    group.nodes = {0: "near", 1: "far"}
    executor = make_executor(group, clock, world=2, draft=False, machine=machine, **parallel)
    executor.start()
    group.mute = {RANK_1}
    group.sent.clear()
    with pytest.raises(TargetLostError, match="target rank 1 hangs: no heartbeat for 3"):
        while True:
            clock.now += 0.25
            group.messages += [(ONE, beat) for _, beat in group.receive(0.01)[:1]]
            executor.poll()
    return group, executor, clock


def test_ranks_that_were_cut_off_for_a_while_form_the_next_group_with_the_others() -> None:
    group, executor, clock = cut_off()
    while clock.now < 110.0:
        assert not executor.rebuild(0.1)
    assert executor.lacks == "target rank 1"
    assert not group.killed
    group.mute.clear()
    while not executor.rebuild(0.1):
        pass
    assert not group.killed
    assert group.started == [ONE, RANK_1]
    assert {worker for worker, message in group.sent if message == Rejoin(STORE, 1)} == {ONE, RANK_1}
    assert executor.lacks == ""
    assert [verdict.token_ids for verdict in executor.run(make_plan(1))] == [[1]]


def test_ranks_that_do_not_come_back_are_replaced() -> None:
    group, executor, clock = cut_off()
    lost_at = clock.now
    while not executor.rebuild(0.1):
        pass
    assert AWAY_S < clock.now - lost_at < AWAY_S + 2
    assert group.killed == [RANK_1]
    assert group.started[2:] == [WorkerId("target", 1, 1)]


def test_the_death_of_a_rank_that_was_cut_off_ends_the_waiting() -> None:
    group, executor, clock = cut_off()
    lost_at = clock.now
    group.post(RANK_1, Died("its node has died"))
    while not executor.rebuild(0.1):
        pass
    assert clock.now - lost_at < 2
    assert group.started[2:] == [WorkerId("target", 1, 1)]


def test_a_silent_rank_on_the_controllers_own_machine_is_replaced_at_once() -> None:
    group, executor, clock = cut_off(machine="far")
    lost_at = clock.now
    while not executor.rebuild(0.1):
        pass
    assert clock.now - lost_at < 2
    assert group.killed == [RANK_1]


def test_the_wait_for_room_begins_when_the_machine_was_missed() -> None:
    group, executor, clock = cut_off()
    lost_at = clock.now
    group.homeless = {WorkerId("target", 1, 1)}
    with pytest.raises(NoRoomError):
        while True:
            executor.rebuild(0.1)
    assert 299 < clock.now - lost_at < 302, "rebuild_timeout_s, whose default is 300 s"
    group.homeless.clear()
    group.start([WorkerId("target", 1, 1)])
    while not executor.rebuild(0.1):
        pass
    assert executor.lacks == ""


def test_a_machine_that_comes_back_after_the_limit_is_heard() -> None:
    """While requests are refused, messages are read as before, without a busy loop."""
    group, executor, clock = cut_off(rebuild_timeout_s=5.0)
    refused_at = 0.0
    while clock.now < 112.0:
        began = clock.now
        try:
            assert not executor.rebuild(0.1)
        except NoRoomError:
            refused_at = refused_at or clock.now
        assert clock.now > began
    assert 105 < refused_at < 109
    group.mute.clear()
    for _ in range(20):
        with contextlib.suppress(NoRoomError):
            if executor.rebuild(0.1):
                break
    assert not group.killed
    assert [verdict.token_ids for verdict in executor.run(make_plan(1))] == [[1]]
