"""What a draft spends on tokens that it has not read, and what prompts cost, in the adaptive policy."""

import itertools
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from protos.messages import RoundPlan, Row, Verdict
from runtime.core.sequence import Sequence as EngineSequence
from runtime.policy.acceptance import DecodingRow
from runtime.policy.adaptive import AdaptivePolicy
from runtime.policy.allocation import Offer, allocate
from runtime.policy.base import FinishedStep
from runtime.policy.choosers import ChainChooser
from runtime.policy.cost_model import CostCurve, RoundCosts, UsualPrompts
from runtime.policy.round_costs import LONGEST_CATCH_UP, CatchUp, EndedRequests, RoundCostModel, without_draft
from runtime.policy.switching import LEAST_TRIAL_SHARE, ON_ABOVE, TRIAL_ROUNDS, TRIAL_SHARE, Switch, Trials
from tests.support.policy_simulation import LIMIT, Simulation, best_fixed, cheap, fixed_rate, flat, steep, warmed_up
from tests.support.scheduling import decoding, make_request

PROMPT = 100


@pytest.mark.parametrize("catch_up", [0.0, 5.0, 40.0])
def test_it_is_switched_on_once_it_would_have_saved_what_that_costs(catch_up: float) -> None:
    gain, switch = 1.25, switched_off()
    rounds = 0
    while not switch.update(gain, 1, 8, catch_up):
        rounds += 1
    assert switch.is_on
    saved = 1 - 1 / gain  # of a plain round, in each round
    assert rounds == pytest.approx(catch_up / saved, abs=16)  # until the gain is smoothed


def test_what_was_missed_before_it_last_seemed_not_to_pay_does_not_count() -> None:
    switch = switched_off()
    for _ in range(20):
        for _ in range(12):
            assert not switch.update(1.25, 1, 8, 10.0)
        for _ in range(12):
            assert not switch.update(1.0, 1, 8, 10.0)


def switched_off() -> Switch:
    """Return a switch that was switched off for eight rows and has rested."""
    switch = Switch()
    switch.update(1.0, 1, 8)
    while not switch.update(1.0, 1, 8):
        pass
    for _ in range(200):
        assert not switch.update(1.0, 1, 8)
    assert not switch.is_on
    assert switch.gain < ON_ABOVE
    return switch


def test_what_the_draft_reads_in_a_trial_is_paid_in_full() -> None:
    """The trial spends 100 ms on catching up, fifty times a plain round: the next one waits until that was saved."""
    trials = Trials(LIMIT)
    while not trials.start_if_due(0.002):
        trials.end_round(0.002)
    for index in range(TRIAL_ROUNDS):
        catch_up_s = 0.0 if index else 0.1
        trials.end_round(0.004 + catch_up_s, 0.002 + catch_up_s, 0.002, catch_up_s)
    assert not trials.is_running
    waited_s = 0.0
    while not trials.start_if_due(0.002):
        trials.end_round(0.002)
        waited_s += 0.002
    assert waited_s > 0.1 / TRIAL_SHARE


def test_tokens_that_came_without_drafts_are_lacking() -> None:
    catch_up, sequences = CatchUp(), [decoding(0), decoding(1)]
    catch_up.begin(sequences, drafted=False, drafts=True)
    assert catch_up.is_pending
    catch_up.observe(0, 0.4)  # four tokens, two of each
    catch_up.count(0, goes_on=False)
    catch_up.begin(sequences, drafted=True, drafts=True)
    catch_up.count(0, goes_on=False)
    assert not catch_up.is_pending
    catch_up.begin(sequences, drafted=True, drafts=False)
    assert catch_up.needed_s(sequences) == 0.0
    sequences[0].token_ids += [3, 4, 5]
    assert catch_up.needed_s(sequences) == pytest.approx(3 * 0.1)
    assert catch_up.needed_s([*sequences, decoding(2)]) == pytest.approx(5 * 0.1)


def test_rows_without_a_draft_are_those_that_were_asked_for_one() -> None:
    rows = [Row(0, 1, 1, 2, 4), Row(1, 1, 1, 2, 4), Row(2, 1, 1, 2, 0)]
    verdicts = [Verdict(0, (1,), 4, range(0)), Verdict(1, (1,), 0, range(0)), Verdict(2, (1,), 0, range(0))]
    assert without_draft(FinishedStep(RoundPlan(0, rows), verdicts, 3, 0.0, 0.1)) == {1}


@pytest.mark.parametrize("context", [0, 4096, 32768])
def test_catching_up_with_long_prompts_does_not_count_against_drafts(context: int) -> None:
    """Four rows. With prompts of 32,768 tokens the draft catches up for 64 rounds, in which no row has a draft."""
    rates = [0.8] * 4
    policy = AdaptivePolicy(
        LIMIT, ChainChooser(LIMIT), RoundCostModel(warmed_up(flat), 36, 4, LIMIT), clock=lambda: 0.0
    )
    simulation = Simulation(policy, flat, cheap, unread=4 * context)
    while simulation.unread:
        simulation.run(rates, 1)
    simulation.run(rates, 100)
    assert simulation.run(rates, 500) >= 0.95 * best_fixed(rates, flat, cheap)


class ForgetfulDraft:
    """Costs as much as `cheap`, and 20 ms more in the first round after some without drafts."""

    def __init__(self) -> None:
        self.simulation: Simulation | None = None
        self._last_s = 0.0

    def __call__(self, rows: int) -> float:
        if not rows or self.simulation is None:
            return 0.0
        is_behind = self.simulation.seconds - self._last_s > 0.04
        self._last_s = self.simulation.seconds
        return cheap(rows) + is_behind * 0.01  # for each of the two levels of a trial


def test_trials_in_which_the_draft_catches_up_take_their_share_of_the_time() -> None:
    """Deciding and learning take 0.1 ms each, so most rounds are not learnt from."""
    draft, calls = ForgetfulDraft(), itertools.count()
    model = RoundCostModel(warmed_up(flat), 36, 4, LIMIT)
    policy = AdaptivePolicy(LIMIT, ChainChooser(LIMIT), model, clock=lambda: 0.0001 * next(calls))
    simulation = draft.simulation = Simulation(policy, flat, draft)
    rates = [0.0] * 4
    simulation.run(rates, 500)
    assert simulation.run(rates, 10000) >= 0.988 * fixed_rate(0, rates, flat, cheap)


class SlowLearner(ChainChooser):
    """Takes 10 ms to learn from a row, by a clock that shows nothing else."""

    seconds = 0.0

    def record(self, verdict: Verdict, row: DecodingRow, asked: Sequence[int], source: int) -> None:
        self.seconds += 0.01
        super().record(verdict, row, asked, source)


def test_trials_pay_for_what_is_learnt_in_them() -> None:
    """It takes five times as long as what the steps of a trial lose."""
    chooser = SlowLearner(LIMIT)
    model = RoundCostModel(warmed_up(steep), 64, 4, LIMIT)
    policy = AdaptivePolicy(LIMIT, chooser, model, clock=partial(getattr, chooser, "seconds"))
    simulation = Simulation(policy, steep, cheap)
    simulation.run([0.0], 2000)
    learnt_s, served_s = chooser.seconds, simulation.seconds
    simulation.run([0.0], 20000)
    assert 0 < chooser.seconds - learnt_s <= 1.2 * LEAST_TRIAL_SHARE * (simulation.seconds - served_s)


def test_a_row_that_never_has_a_draft_is_learnt_of_in_the_end() -> None:
    """Its context is longer than the draft's, say. The draft is waited for in every round."""
    model, caught_up = RoundCostModel(warmed_up(flat), 64, 8, LIMIT), []
    rows = [Row(0, 1, 1, 2, 4), Row(1, 1, 1, 2, 4)]
    verdicts = [Verdict(0, (1, 1), 4, range(1)), Verdict(1, (1,), 0, range(0))]
    for _ in range(4 * LONGEST_CATCH_UP):
        step = FinishedStep(RoundPlan(0, rows), verdicts, 3, 4 * cheap(2), 4 * cheap(2) + flat(6))
        caught_up.append(model.catches_up(step, 4))
        model.observe_catch_up(step, 4)
    assert caught_up == [True] * LONGEST_CATCH_UP + [False] * 3 * LONGEST_CATCH_UP


def test_a_late_draft_is_not_one_that_catches_up() -> None:
    model = RoundCostModel(warmed_up(flat), 64, 8, LIMIT)
    step = FinishedStep(RoundPlan(0, [Row(0, 1, 1, 2, 4)]), [Verdict(0, (1,), 0, range(0))], 1, 0.0, flat(1))
    assert not model.catches_up(step, 4)


def answered(key: int, num_answered: int, num_cached_tokens: int = 0) -> EngineSequence:
    """Return a sequence with so many tokens of an answer."""
    request, length = make_request(str(key), [1] * PROMPT), PROMPT + num_answered
    return EngineSequence(request, [1] * length, length, None, 1, slot=0, key=key, num_cached_tokens=num_cached_tokens)


@pytest.mark.parametrize("num_rows", [1, 64])
def test_what_the_draft_spends_on_prompts_is_learnt_for_each_token_of_an_answer(num_rows: int) -> None:
    """Answers have 40 tokens. The draft reads a prompt in the round after the target did, in 10 ms."""
    model = RoundCostModel(warmed_up(flat), 64 * (LIMIT + 1), 64, LIMIT)
    serve_prompts(model, num_rows, depth=2)
    assert model.of(1).prompts_s == pytest.approx(0.01 / 40, rel=0.1)
    assert model.of(1).plain() == pytest.approx(flat(1))


def test_of_prompts_that_come_while_it_is_off_the_price_is_known() -> None:
    model = RoundCostModel(warmed_up(flat), 64 * (LIMIT + 1), 64, LIMIT)
    serve_prompts(model, 1, depth=2)
    serve_prompts(model, 1, depth=0, num_answered=20)
    assert model.of(1).prompts_s == pytest.approx(0.01 / 20, rel=0.1)


def serve_prompts(model: RoundCostModel, num_rows: int, *, depth: int, num_answered: int = 40) -> None:
    """Serve requests that end together, 60 times as many as there are at once."""
    rows = [Row(slot, 10, 1, 11, depth) for slot in range(num_rows)]
    prompts = [Row(slot, 0, 100, 100) for slot in range(num_rows)]
    for key in range(600):
        model.ended.update([answered(key, num_answered)])
    decoding_s = depth * cheap(num_rows)
    catch_up_s = 0.01 * num_rows if depth else 0.0
    after = [(rows, decoding_s + catch_up_s), *[(rows, decoding_s)] * (num_answered - 2)]
    for asked, draft_s in [(prompts, 0.0), *after] * 60:
        model.observe_catch_up(FinishedStep(RoundPlan(0, asked), [], num_rows, draft_s, draft_s + 0.02), depth)


def test_of_requests_that_run_nothing_is_known() -> None:
    ended, running = EndedRequests(), [answered(0, 20), answered(1, 40)]
    ended.update(running)
    assert ended.prompts == UsualPrompts()
    ended.update(running[1:])
    assert ended.prompts == UsualPrompts(length=PROMPT, ratio=PROMPT / 20)


def test_what_was_in_the_prefix_cache_is_no_part_of_prompts() -> None:
    ended = EndedRequests()
    ended.update([answered(0, 20, num_cached_tokens=80)])
    ended.update([])
    assert ended.prompts == UsualPrompts(length=20, ratio=1)


def memory_bound(prompts: UsualPrompts, num_rows: int = 32) -> RoundCosts:
    """Return costs of a GPU on which up to 192 tokens take one second, and each further one takes 10 ms."""
    target = CostCurve({tokens: 1 + 0.01 * max(0, tokens - 192) for tokens in range(1, 289)}, 288)
    one = CostCurve({1: 1.0}, 1)
    return RoundCosts(target, CostCurve({1: 0.001}, num_rows), one, one, num_rows, prompts=prompts)


@pytest.mark.parametrize(
    ("prompts", "pays"),
    [
        (UsualPrompts(), True),
        (UsualPrompts(length=32, ratio=0.125), True),
        (UsualPrompts(length=256, ratio=8), False),  # more prompt tokens in each step than it computes for nothing
        (UsualPrompts(length=8192, ratio=8), True),  # in one step of 32: all others have none
    ],
)
def test_draft_tokens_beside_prompts_are_not_free(prompts: UsualPrompts, pays: bool) -> None:
    """Three draft tokens for each row are scored for nothing; one of ten is accepted."""
    offer = Offer(np.cumprod(np.full((32, 3), 0.1), axis=1), np.ones(3), np.full(32, 3))
    costs = memory_bound(prompts)
    best = allocate([offer], 32, costs)
    assert best.gain > 1
    usual = best.usual_gain(32, costs)
    assert (usual > 1) == pays
    assert usual == best.gain or not pays


def test_above_the_largest_size_seconds_rise_on() -> None:
    curve = CostCurve({size: 1.0 + size for size in range(1, 101)}, 100)
    assert curve.beyond(150) == pytest.approx(151)
    assert curve.beyond(50.5) == pytest.approx(51.5)
    assert CostCurve({1: 1.0, 50: 2.0, 100: 1.5}, 100).beyond(300) == pytest.approx(1.5)
