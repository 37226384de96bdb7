"""The adaptive policy against a simulated engine, whose costs and acceptance are known."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import mean

import pytest

from protos.messages import RoundPlan, Row, StepCosts, Verdict
from runtime.policy.acceptance import DecodingRow, RequestAcceptance
from runtime.policy.adaptive import AdaptivePolicy
from runtime.policy.allocation import Allocation
from runtime.policy.base import FinishedStep
from runtime.policy.choosers import ChainChooser, TreeChooser
from runtime.policy.cost_model import RoundCosts
from runtime.policy.round_costs import FIRST_LEVEL, RoundCostModel
from tests.support.policy_simulation import (
    LIMIT,
    SIZES,
    Seconds,
    Simulation,
    best_fixed,
    cheap,
    fixed_rate,
    flat,
    steep,
    warmed_up,
)
from tests.support.scheduling import decoding

FULL = pytest.mark.full


def adaptive(target: Seconds, costs: StepCosts | None, seed: int = 0) -> Simulation:
    model = RoundCostModel(costs, 64 * (LIMIT + 1), 64, LIMIT)
    return Simulation(AdaptivePolicy(LIMIT, ChainChooser(LIMIT), model, clock=lambda: 0.0), target, cheap, seed=seed)


@pytest.mark.parametrize(
    ("target", "costs", "share"),
    [(flat, warmed_up(flat), 0.97), (steep, warmed_up(steep), 0.97), (steep, warmed_up(flat), 0.9), (flat, None, 0.8)],
)
@pytest.mark.parametrize("rate", [0.0, pytest.param(0.3, marks=FULL), 0.6, pytest.param(0.9, marks=FULL)])
@pytest.mark.parametrize("num_rows", [1, pytest.param(8, marks=FULL), 32])
def test_it_is_as_fast_as_the_best_k(
    rate: float, num_rows: int, target: Seconds, costs: StepCosts | None, share: float
) -> None:
    """With costs of another machine or with none, what it learns while serving gives almost the same."""
    simulation = adaptive(target, costs)
    rates = [rate] * num_rows
    simulation.run(rates, 300)  # until it has learnt
    assert simulation.run(rates, 4000) >= share * best_fixed(rates, target, cheap)


@pytest.mark.parametrize("rate", [0.3, pytest.param(0.6, marks=FULL)])
@pytest.mark.parametrize("num_rows", [pytest.param(1, marks=FULL), 8])
def test_it_follows_a_change_of_the_number_of_threads(num_rows: int, rate: float) -> None:
    """Half of the threads compute half as much, and read weights almost as fast: another K pays.

    With all threads again, sizes that were slow meanwhile are tried only as that is forgotten, so another K than the
    best one may stay for a while; but for trials, it is not slower than none.
    """

    def halved(tokens: int) -> float:
        return 0.0035 * max(1.0, tokens / 8) + 0.00004 * tokens

    rates = [rate] * num_rows
    simulation = adaptive(flat, warmed_up(flat))
    for target, least in (
        (flat, 0.95 * best_fixed(rates, flat, cheap)),
        (halved, 0.95 * best_fixed(rates, halved, cheap)),
        (flat, 0.97 * fixed_rate(0, rates, flat, cheap)),
    ):
        simulation.target = target
        simulation.run(rates, 300)
        assert simulation.run(rates, 3000) >= least


def test_a_draft_that_is_never_right_costs_hardly_anything() -> None:
    simulation = adaptive(flat, warmed_up(flat))
    speed = simulation.run([0.0], 1500)
    assert speed >= 0.97 * best_fixed([0.0], flat, cheap)
    assert simulation.policy.changes == {"does_not_pay": 1}


def test_rows_get_what_each_of_them_pays() -> None:
    rates = [0.9] * 4 + [0.02] * 4
    simulation = adaptive(flat, warmed_up(flat))
    simulation.run(rates, 300)
    assert simulation.run(rates, 1500) > best_fixed(rates, flat, cheap)
    by_row = [0] * 8
    for _ in range(200):
        simulation.run(rates, 1)
        by_row = [total + k for total, k in zip(by_row, simulation.ks, strict=True)]
    assert min(by_row[:4]) > 5 * max(by_row[4:])


def test_changing_load_and_text_switch_it_at_most_twice_each() -> None:
    simulation = adaptive(flat, warmed_up(flat), seed=3)
    phases = (([0.9], 1000), ([0.4] * 64, 1000), ([0.9], 1000), ([0.0], 1000), ([0.9], 2000))
    seconds_K = [0.0] * (LIMIT + 1)
    for rates, rounds in phases:
        switches, tokens = sum(simulation.policy.changes.values()), simulation.num_tokens
        simulation.run(rates, rounds)
        assert sum(simulation.policy.changes.values()) - switches <= 2
        gained = simulation.num_tokens - tokens
        for k in range(LIMIT + 1):
            seconds_K[k] += gained / fixed_rate(k, rates, flat, cheap)
    assert simulation.seconds <= min(seconds_K)
    assert simulation.policy.current > 0  # the text is predictable again, which trials have shown


def test_it_comes_back_at_once_when_the_load_falls() -> None:
    """That it was switched off, and on for a short time only, counts for loads like the one where that was."""
    simulation = adaptive(steep_from_eight, warmed_up(steep_from_eight))
    simulation.run([0.9], 500)
    for num_rows in (64, 24, 64, 24, 64):
        simulation.run([0.5] * num_rows, 200)
    assert not simulation.policy.current
    simulation.run([0.9], 40)
    assert simulation.policy.current > 0


def steep_from_eight(tokens: int) -> float:
    return 0.003 + 0.0006 * max(0, tokens - 8)


def test_of_trees_it_takes_the_size_that_pays() -> None:
    """Twice as many nodes bring a level more; steps read weights up to 16 tokens."""
    policy = AdaptivePolicy(
        32, TreeChooser(32), RoundCostModel(warmed_up(flat), 33 * 4, 4, 32), may_branch=True, clock=lambda: 0.0
    )
    rng, sizes = random.Random(1), []
    for _ in range(1500):
        sequence = decoding(0)
        policy.begin_step([sequence])
        k = policy.num_draft_tokens(sequence)
        accepted = next(
            (depth for depth in range((k + 1).bit_length() - 1) if rng.random() > 0.7), (k + 1).bit_length() - 1
        )
        verdict = Verdict(0, (1,) * (accepted + 1), k, range(accepted))
        draft_s = 0.00002 * k
        step = FinishedStep(RoundPlan(0, [Row(0, 1, 1, 2, k)]), [verdict], accepted + 1, draft_s, draft_s + flat(1 + k))
        policy.end_step(step)
        sizes.append(k)
    assert sizes[-200:].count(8) > 150


def test_it_comes_back_soon_after_drafts_were_slow_for_a_while() -> None:
    """Another program took the draft's processor: what was learnt then must not last."""
    simulation = adaptive(flat, warmed_up(flat))
    simulation.run([0.8], 500)
    simulation.draft = lambda rows: 20 * cheap(rows)
    simulation.run([0.8], 2040)  # a trial has just ended
    assert not simulation.policy.current
    simulation.draft = cheap
    began = simulation.seconds
    while not simulation.policy.current or simulation.policy.changes["pays"] < 1:
        simulation.run([0.8], 20)
    assert simulation.seconds - began < 15.0  # a trial lost 57 ms then, which is 0.4 % of the time until the next
    simulation.run([0.8], 300)
    assert simulation.run([0.8], 1000) >= 0.97 * best_fixed([0.8], flat, cheap)


class SlowAfterDrafts:
    """Rounds with drafts are slow, and so is the first one without: caches hold other data."""

    def __init__(self) -> None:
        self._last = 1

    def __call__(self, tokens: int) -> float:
        slow = 1.2 if tokens > 1 else 1.25 if self._last > 1 else 1.0
        self._last = tokens
        return slow * flat(tokens)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=FULL), pytest.param(2, marks=FULL)])
def test_what_plain_rounds_cost_is_learnt_from_several_in_a_row(seed: int) -> None:
    """While speculation is on, they are rare. With what only the first of them shows, it would stay on."""
    simulation = adaptive(SlowAfterDrafts(), warmed_up(flat), seed)
    simulation.run([0.7], 2000)
    assert simulation.policy.current
    simulation.run([0.2], 500)
    assert simulation.run([0.2], 1000) >= 0.97 * best_fixed([0.2], SlowAfterDrafts(), cheap)


def test_it_comes_back_soon_after_text_that_cannot_be_predicted() -> None:
    simulation = adaptive(flat, warmed_up(flat))
    simulation.run([0.0], 3000)
    began = simulation.seconds
    while simulation.policy.changes["pays"] < 1:
        simulation.run([0.9], 20)
    assert simulation.seconds - began < 2.0


@pytest.mark.parametrize(("found", "pays"), [(0.25, True), (0.02, False)])
def test_a_method_that_often_finds_nothing_is_used_where_it_pays(found: float, pays: bool) -> None:
    """With one row, steps of two tokens and more cost twice as much as plain ones, and looking up a tenth."""
    simulation = adaptive(lambda tokens: 0.003 if tokens == 1 else 0.006, warmed_up(flat))
    simulation.found, simulation.draft = found, lambda rows: 0.0003 / LIMIT
    simulation.run([0.9], 500)
    speed, plain = simulation.run([0.9], 1500), 1 / 0.003 / 1.05
    assert speed >= (1.2 if pays else 0.97) * plain
    assert not (pays and simulation.policy.changes)


@pytest.mark.parametrize(("prompts_s", "pays"), [(0.0001, True), (0.003, False)])
def test_what_the_draft_spends_on_prompts_is_part_of_what_drafts_cost(prompts_s: float, pays: bool) -> None:
    costs, row = RoundCostModel(warmed_up(flat), 64, 8, LIMIT).of(1), DecodingRow((LIMIT,), (RequestAcceptance(),))
    chosen, free = (ChainChooser(LIMIT).choose([row], each) for each in (replace(costs, prompts_s=prompts_s), costs))
    assert chosen.k_RS.any() == pays
    if pays:
        assert chosen.k_RS == free.k_RS
        assert chosen.seconds - free.seconds == pytest.approx(prompts_s * chosen.tokens)


def test_drafts_are_no_cheaper_beside_prompt_chunks() -> None:
    """A round of 200 prompt tokens is slow anyway. Compared is what it would take with and without draft tokens."""
    model = RoundCostModel(warmed_up(flat), 64 * (LIMIT + 1), 64, LIMIT)
    beside, alone = model.of(204, 4), model.of(4)
    assert beside.plain() == pytest.approx(alone.plain())
    more_s = flat(204 + 8) - flat(204) + (FIRST_LEVEL + 1) * cheap(4)
    assert beside.uniform(2, 4) - beside.plain() == pytest.approx(more_s, rel=0.05)


class SlowChooser(ChainChooser):
    """Takes 0.1 ms to choose, by a clock that shows nothing else."""

    seconds = 0.0

    def choose(self, rows: Sequence[DecodingRow], costs: RoundCosts) -> Allocation:
        self.seconds += 0.0001
        return super().choose(rows, costs)


def test_chance_in_the_drafts_of_one_request_does_not_turn_it_off() -> None:
    """One draft token brings 11 %: with one row, a few wrong ones in a row must not look like a bad request."""

    def target(tokens: int) -> float:
        return 0.0016 + 0.00012 * tokens

    def draft(rows: int) -> float:
        return 0.00045 + 0.00004 * rows

    costs = StepCosts({size: target(size) for size in SIZES}, {size: draft(size) for size in SIZES[:7]})
    rates = []
    for seed in range(16):
        chooser = SlowChooser(3)
        model = RoundCostModel(costs, 256, 64, 3)
        policy = AdaptivePolicy(3, chooser, model, clock=partial(getattr, chooser, "seconds"))
        simulation = Simulation(policy, target, draft, seed=seed)
        simulation.run([0.5], 200)
        rates.append(simulation.run([0.5], 1500))
    assert mean(rates) >= 0.98 * fixed_rate(1, [0.5], target, draft)
    best = fixed_rate(1, [0.5], target, draft)
    assert sum(rate < 0.96 * best for rate in rates) <= 2


def test_what_is_decided_in_the_last_round_of_a_request_is_good_for_the_next_one() -> None:
    simulation = adaptive(flat, warmed_up(flat))
    simulation.run([0.9], 500)
    policy, ending, new = simulation.policy, decoding(1), decoding(2)
    k = policy.num_draft_tokens(new)
    ending.token_ids.extend([1] * ending.depth)
    ending.num_computed = len(ending.token_ids) - 1
    policy.begin_step([ending])
    assert policy.num_draft_tokens(ending) == 0
    assert policy.num_draft_tokens(new) == k > 0
