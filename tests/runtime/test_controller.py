"""The controller's step loop."""

import pytest

from protos.errors import EngineDeadError
from protos.messages import Abort, RoundPlan, Verdict
from runtime.core.controller import Controller, LocalInbox
from tests.support.distributed.fake_worker import FakeWorker, make_request
from tests.support.in_one_process import InOneProcess
from tests.support.scheduling import INFO, OFF, fixed_k, make_scheduler


class Broken(InOneProcess):
    def run(self, plan: RoundPlan) -> list[Verdict]:
        raise OSError("device lost")


def test_controller_runs_requests_to_their_end() -> None:
    inbox = LocalInbox()
    controller = Controller(make_scheduler(), fixed_k(3), FakeWorker(INFO, 8), inbox)
    assert controller.step() == []
    inbox.put([make_request("a", [1, 2]), make_request("b", [1, 2], max_tokens=3)])
    ended = {}
    while len(ended) < 2:
        ended |= {o.request_id: o.finish_reason for o in controller.step() if o.finish_reason}
    assert set(ended) == {"a", "b"}
    inbox.put([make_request("c", [1]), Abort(("c",))])
    assert [o.finish_reason for o in controller.step()] == ["abort"]
    assert controller.stats().num_running == 0


def test_a_dead_executor_ends_every_request_with_an_error() -> None:
    inbox = LocalInbox()
    controller = Controller(make_scheduler(max_num_seqs=1), OFF, Broken(), inbox)
    inbox.put([make_request("a", [1]), make_request("b", [1])])
    with pytest.raises(EngineDeadError, match="round 0: OSError: device lost"):
        controller.step()
    assert [(o.request_id, o.finish_reason) for o in controller.final_outputs] == [("a", "error"), ("b", "error")]
    assert controller.scheduler.num_unfinished == 0
