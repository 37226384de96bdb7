"""Rebuilding a target group while Ray still starts workers on a machine that is gone; with scripted workers."""

from collections.abc import Sequence

import pytest

from protos.errors import EngineDeadError, TargetLostError
from protos.worker_messages import Died, Placed, WorkerId
from runtime.supervision.rebuilds import DECLARED_S
from tests.support.distributed.scripted_group import ONE, STORE, Clock, ScriptedGroup, make_executor


class Losing(ScriptedGroup):
    """Replacements die before they are placed, as on a machine that is gone, until `lasts_s` after the first one."""

    lasts_s = 0.0
    began: float | None = None

    def start(self, workers: Sequence[WorkerId]) -> None:
        super().start(workers)
        for worker in workers:
            if worker.incarnation:
                self.began = self.clock.now if self.began is None else self.began
                if self.clock.now - self.began < self.lasts_s:
                    self.messages.remove((worker, Placed("h", "node", 1, (), STORE)))
                    self.post(worker, Died("the actor is unavailable"))


@pytest.mark.parametrize(("machine", "lasts_s"), [("here", 45.0), ("here", 1000.0), ("", 1000.0)])
def test_starts_on_a_machine_that_is_gone_do_not_count_until_that_is_known(machine: str, lasts_s: float) -> None:
    clock = Clock()
    group = Losing(clock)
    group.lasts_s = lasts_s
    executor = make_executor(group, clock, draft=False, machine=machine)
    executor.start()
    group.post(ONE, Died("no heartbeat"))
    with pytest.raises(TargetLostError):
        executor.poll()
    began = clock.now
    if machine and lasts_s < DECLARED_S:
        while not executor.rebuild(0.1):
            pass
        assert lasts_s <= clock.now - began < lasts_s + 5
        return
    with pytest.raises(EngineDeadError, match="could not be rebuilt in 3 attempts"):
        while not executor.rebuild(0.1):
            pass
    assert (clock.now - began >= DECLARED_S) == bool(machine)
