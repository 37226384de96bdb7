"""Target ranks that die together, of which one death becomes known first; with scripted workers."""

import pytest

from protos.errors import EngineDeadError, TargetLostError
from protos.messages import WorkerInfo
from protos.worker_messages import Died, GroupLost, Loaded, Placed, Rejoin, WorkerId
from runtime.supervision.distributed_executor import DistributedExecutor
from tests.support.distributed.scripted_group import STORE, Clock, ScriptedGroup, make_executor, make_plan

LOSSES = 3  # as many as there may be in a row


def targets(*incarnations: int) -> tuple[WorkerId, ...]:
    return tuple(WorkerId("target", rank, incarnation) for rank, incarnation in enumerate(incarnations))


def begin() -> tuple[ScriptedGroup, DistributedExecutor]:
    """Start a group of three ranks."""
    clock = Clock()
    group = ScriptedGroup(clock)
    executor = make_executor(group, clock, world=3, draft=False)
    executor.start()
    return group, executor


def lose(group: ScriptedGroup, executor: DistributedExecutor, rank: WorkerId) -> None:
    """Let *rank* die, and begin to rebuild the group."""
    group.sent.clear()
    group.killed.clear()
    group.post(rank, Died("signal SIGKILL"))
    with pytest.raises(TargetLostError):
        executor.poll()
    assert not executor.rebuild(0.0)


def finish(group: ScriptedGroup, executor: DistributedExecutor) -> None:
    while not executor.rebuild(0.1):
        pass
    assert [verdict.token_ids for verdict in executor.run(make_plan(1))] == [[1]]


def test_a_rank_that_died_with_the_lost_one_is_replaced_in_the_same_attempt() -> None:
    group, executor = begin()
    for loss in range(LOSSES):
        rank_0, rank_1, rank_2 = targets(loss, loss, 0)
        new_0, new_1, _ = targets(loss + 1, loss + 1, 0)
        group.homeless = {new_1}
        lose(group, executor, rank_1)
        group.post(rank_0, Died("signal SIGKILL"))
        assert not executor.rebuild(0.1)
        assert group.killed == [rank_1, rank_0]
        assert group.started[-2:] == [new_1, new_0]
        assert not group.sent
        group.homeless.clear()
        group.post(new_1, Placed("h", "node", 1, (), STORE))
        finish(group, executor)
        assert group.killed == [rank_1, rank_0], "the third rank and the first replacement keep their processes"
        assert [worker for worker, message in group.sent if isinstance(message, Rejoin)] == [rank_2]


def test_a_rank_found_dead_once_it_was_told_to_form_the_next_group_costs_no_attempt() -> None:
    group, executor = begin()
    for loss in range(LOSSES):
        rank_0, rank_1, rank_2 = targets(loss, 2 * loss, loss)
        group.mute = {rank_0}
        lose(group, executor, rank_1)
        group.post(rank_0, Died("signal SIGKILL"))
        finish(group, executor)
        assert group.started[-3:] == list(targets(loss + 1, 2 * loss + 2, loss + 1))
        assert {rank_0, rank_1, rank_2} < set(group.killed), "those that wait for it cannot leave that group"


def test_a_rank_that_dies_in_the_next_group_costs_an_attempt() -> None:
    group, executor = begin()
    with pytest.raises(EngineDeadError, match=r"could not be rebuilt in 3 attempts: target rank 0 .*SIGSEGV"):
        for loss in range(LOSSES):
            rank_0, rank_1, rank_2 = targets(loss, 2 * loss, loss)
            group.mute = {rank_0, rank_2}
            lose(group, executor, rank_1)
            group.post(rank_0, Loaded(WorkerInfo(64, 4, 1000, 97), 1))
            group.post(rank_0, Died("signal SIGSEGV"))
            finish(group, executor)


def test_a_loss_names_the_rank_that_is_gone_and_not_one_that_noticed_it() -> None:
    group, executor = begin()
    rank_0, rank_1, _ = targets(0, 0, 0)
    group.post(rank_1, GroupLost("connection closed by peer"))
    group.post(rank_0, Died("signal SIGKILL"))
    with pytest.raises(TargetLostError, match=r"^target rank 0 died: signal SIGKILL"):
        executor.run(make_plan())


def test_a_group_that_is_started_over_fewer_ranks_is_not_made_smaller_while_it_starts() -> None:
    """Its processes start one after the other."""
    clock = Clock()
    group = ScriptedGroup(clock)
    group.splits = (1, 2, 4)
    executor = make_executor(group, clock, world=4, draft=False, min_tensor_parallel_size=1)
    executor.start()
    fewer = targets(1, 1)
    group.homeless = {WorkerId("target", 3, 1), *fewer}
    group.post(WorkerId("target", 3), Died("its node has died"))
    with pytest.raises(TargetLostError):
        executor.poll()
    while group.started[-2:] != [*fewer]:
        assert not executor.rebuild(0.1)
        assert clock.now < 130
    group.homeless.remove(fewer[0])
    group.post(fewer[0], Placed("h", "node", 1, (), STORE))
    assert not any(executor.rebuild(0.1) for _ in range(5))
    group.homeless.remove(fewer[1])
    group.post(fewer[1], Placed("h", "node", 1, (), STORE))
    assert any(executor.rebuild(0.1) for _ in range(5))
    assert group.started[-2:] == [*fewer]
    assert executor.run(make_plan(1))
