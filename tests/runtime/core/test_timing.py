"""Phase times of rounds, and the estimated time of plain decoding."""

import pytest
from msgspec import structs

from protos.config.engine import SpeculativeConfig
from protos.messages import Request, RoundPlan, Row, Sampling, Step, StepCosts, TokenOutput, Verdict
from protos.sampling import SamplingParams
from protos.stats import PhaseTimes
from protos.worker_messages import RoundDone
from runtime.core.controller import LocalInbox
from runtime.core.stats import StepClock
from runtime.supervision.round_times import PhaseTotals
from tests.support.serving import fake_engine

COSTS = StepCosts({1: 1.0, 2: 1.5, 8: 3.0})
SIX_TOKENS = [Verdict(slot, (1,), proposed=3) for slot in range(2)]
"""Of two rows that had three draft tokens each."""


def test_waiting_beyond_the_drafts_own_time_is_transfer() -> None:
    added = PhaseTotals()
    added.add(RoundDone(0, [], wait_s=0.5, score_s=1.0, verify_s=0.25), propose_s=0.375)
    added.add(RoundDone(1, [], wait_s=0.125, score_s=1.0, verify_s=0.25, draft_missed=True), propose_s=0.5)
    assert added.times == PhaseTimes(0.875, 0.125, 2.0, 0.5, late_drafts=1)


def test_a_draft_in_the_targets_process_is_what_that_waits_for() -> None:
    added = PhaseTotals()
    added.add(RoundDone(0, [], wait_s=0.5, score_s=1.0, verify_s=0.25), propose_s=None)
    assert added.times == PhaseTimes(0.5, 0.0, 1.0, 0.25)


def plan(rows: int, length: int = 1, *, speculates: bool = True) -> RoundPlan:
    k = 3 if speculates else 0
    return RoundPlan(0, [Row(slot, 5, length, 6, k=k) for slot in range(rows)], speculates=speculates)


def test_a_step_is_set_against_plain_steps_for_its_tokens() -> None:
    clock = StepClock(COSTS, is_awaited=True)
    outputs = [TokenOutput("a", [1, 2, 3]), TokenOutput("b", [1])]
    clock.add(plan(2), SIX_TOKENS, outputs, PhaseTimes(propose_s=0.5, score_s=3.0, verify_s=0.25), seconds=4.0)
    assert clock.steps_s == clock.speculative_s == 4.0
    # Two plain steps of 1.5 s, each with the half second that this step spent on neither drafting nor scoring.
    assert clock.plain_s == 2 * (1.5 + 0.5)


@pytest.mark.parametrize(("seconds", "plain_s"), [(4.0, 2 * 1.5), (6.0, 2 * 2.5)])
def test_a_plain_step_that_is_begun_ahead_would_have_hidden_the_rest(seconds: float, plain_s: float) -> None:
    """Unless that takes longer than the forward."""
    clock = StepClock(COSTS, is_awaited=False, runs_ahead=True)
    outputs = [TokenOutput("a", [1, 2, 3]), TokenOutput("b", [1])]
    clock.add(plan(2), SIX_TOKENS, outputs, PhaseTimes(propose_s=0.5, score_s=3.0, verify_s=0.25), seconds=seconds)
    assert clock.plain_s == plain_s


def test_a_plain_step_would_have_been_as_much_slower() -> None:
    clock = StepClock(COSTS, is_awaited=False)
    outputs = [TokenOutput("a", [1]), TokenOutput("b", [1])]
    clock.add(plan(2), SIX_TOKENS, outputs, PhaseTimes(score_s=6.0), seconds=6.5)
    assert clock.plain_s == 2 * 1.5 + 0.5
    clock.add(plan(2), SIX_TOKENS, outputs, PhaseTimes(score_s=7.0), seconds=1.0)  # a GPU: how long it took to launch
    assert clock.plain_s == 3.5 + 1.5


def test_costs_that_were_measured_beside_other_programs_gain_nothing() -> None:
    clock = StepClock(COSTS, is_awaited=True)
    outputs = [TokenOutput("a", [1]), TokenOutput("b", [1])]
    clock.add(plan(2), SIX_TOKENS, outputs, PhaseTimes(score_s=0.3), seconds=0.3)
    assert clock.plain_s == pytest.approx(0.15), "a tenth of what was measured, for one of two steps"


def test_only_steps_of_drafting_and_decoding_count() -> None:
    clock = StepClock(COSTS, is_awaited=True)
    clock.add(plan(2, length=4), [], [], PhaseTimes(), seconds=2.0)
    clock.add(plan(2, speculates=False), [], [], PhaseTimes(), seconds=1.0)
    assert (clock.steps_s, clock.speculative_s, clock.plain_s) == (3.0, 0.0, 0.0)
    unmeasured = StepClock(None, is_awaited=True)
    unmeasured.add(plan(2), [], [], PhaseTimes(), seconds=2.0)
    assert (unmeasured.steps_s, unmeasured.speculative_s) == (2.0, 0.0)


def ask(name: str, **fields: object) -> Request:
    request = Request(name, tuple(range(10, 20)), SamplingParams(), Sampling(seed=0), max_tokens=6)
    return structs.replace(request, **fields)


def test_a_controller_tells_steps_where_asked_and_counts_where_not() -> None:
    inbox = LocalInbox()
    speculative = SpeculativeConfig("fake", num_speculative_tokens=4, draft_shape="chain")
    controller = fake_engine.build(inbox, print, speculative=speculative)
    assert controller.stats().speculation == "on"
    inbox.put([ask("told", wants_steps=True), ask("untold"), ask("plain", wants_steps=True, speculate=False)])
    outputs: list[TokenOutput] = []
    while sum(output.finish_reason is not None for output in outputs) < 3:
        outputs += controller.step()
    steps = {
        name: [output.step for output in outputs if output.request_id == name] for name in ("told", "untold", "plain")
    }
    # The fake accepts half of each draft; the last draft is cut to the tokens still to come.
    assert steps["told"] == [Step(4, 2, 4), Step(2, 1, 2), Step()]
    assert set(steps["untold"]) == {None}
    assert steps["plain"] == [Step()] * 6
    ends = [output for output in outputs if output.finish_reason is not None]
    assert all(output.queued_s is not None and output.queued_s >= 0 for output in ends)
    assert all(output.queued_s is None for output in outputs if output.finish_reason is None)
    stats = controller.stats()
    assert stats.num_speculative_tokens == 4
    assert sum(stats.step_tokens) == stats.steps
    assert stats.fed_tokens == 30 + 5 + 2 * 2 + 12, (
        "prompts, plain outputs, outputs of the two others, and draft tokens"
    )
    assert stats.steps_s > 0
