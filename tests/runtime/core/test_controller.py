"""The controller's step loop."""

import pytest

from proposers.ngram import NgramProposer
from protos.config.engine import SpeculativeConfig
from protos.errors import EngineDeadError
from protos.interfaces import DraftService, Proposer
from protos.messages import Abort, RoundPlan, StepCosts, Verdict
from runtime.core.controller import Controller, LocalInbox
from runtime.policy.base import FinishedStep
from runtime.policy.batch_size import BatchSizePolicy
from tests.support.distributed.fake_worker import FakeWorker, make_request
from tests.support.in_one_process import InOneProcess
from tests.support.scheduling import INFO, OFF, fixed_k, make_scheduler


class Watched(BatchSizePolicy):
    """Notes of the steps that it is told of whether the draft worker was up."""

    def __init__(self, config: SpeculativeConfig) -> None:
        super().__init__(config)
        self.told: list[bool] = []

    def end_step(self, step: FinishedStep) -> None:
        self.told.append(step.worker_is_up)


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


@pytest.mark.parametrize(
    ("is_up", "proposers", "told"),
    [(True, [], [True] * 4), (False, [], []), (False, [NgramProposer(1, 2)], [False] * 4)],
)
def test_policies_learn_nothing_from_steps_in_which_nothing_could_be_drafted(
    is_up: bool, proposers: list[Proposer], told: list[bool]
) -> None:
    inbox, worker = LocalInbox(), FakeWorker(INFO, 8)
    worker.drafting = DraftService(is_up=is_up)
    policy = Watched(SpeculativeConfig(method="any", num_speculative_tokens=2))
    controller = Controller(make_scheduler(proposers=proposers), policy, worker, inbox)
    inbox.put([make_request("a", [1, 2], max_tokens=4, speculate=False)])
    while not any(output.finish_reason for output in controller.step()):
        pass
    assert policy.told == told


class Swapping(FakeWorker):
    """Reports new costs of steps once `costs` is set, as an engine does whose forwards were compiled meanwhile."""

    costs: StepCosts | None = None

    def poll(self) -> StepCosts | None:
        costs, self.costs = self.costs, None
        return costs


def test_new_costs_leave_the_counters_of_the_policy() -> None:
    inbox, worker = LocalInbox(), Swapping(INFO, 8)
    controller = Controller(make_scheduler(), fixed_k(3, disable_by_batch_size=1), worker, inbox)
    inbox.put([make_request("a", [1, 2]), make_request("b", [1, 2])])
    for _ in range(3):
        controller.step()
    before = controller.stats().speculation_changes
    assert before == {"batch_size_rose": 1}
    worker.costs = StepCosts({1: 1.0}, {1: 0.1})
    controller.step()
    assert controller.stats().speculation_changes == before
    assert controller._clock._target_s == {1: 1.0}
