"""The choice of draft tokens against all choices there are."""

from dataclasses import replace
from itertools import product
from typing import TypeVar
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.policy.allocation import Offer, allocate, may_pay
from runtime.policy.cost_model import CostCurve, RoundCosts

T = TypeVar("T")
ROWS, DEPTH = 3, 3
NUM_ROWS = st.integers(1, ROWS)
SECONDS = st.floats(0.1, 4.0)


def lists(elements: st.SearchStrategy[T], size: int) -> st.SearchStrategy[list[T]]:
    return st.lists(elements, min_size=size, max_size=size)


@st.composite
def offers(draw: st.DrawFn, num_rows: int) -> Offer:
    """Return what a draft worker may bring that drafts all tokens it is asked for."""
    rates_RD = draw(lists(lists(st.floats(0.01, 0.99), DEPTH), num_rows))
    limits_R = draw(lists(st.integers(0, DEPTH), num_rows))
    return Offer(np.cumprod(rates_RD, axis=1), np.ones(DEPTH), np.array(limits_R))


@st.composite
def costs(draw: st.DrawFn, num_known: int, *, rows_cost: bool) -> RoundCosts:
    """Return costs that need not rise with the tokens, nor with the rows unless *rows_cost*."""
    largest = num_known * (1 + DEPTH)
    target = draw(lists(SECONDS, largest))
    draft = draw(lists(SECONDS, ROWS)) if rows_cost else [1.0] * ROWS
    levels = sorted(draw(lists(st.floats(0.0, 1.0), DEPTH)))
    curves = [
        CostCurve(dict(enumerate(each, 1)), len(each)) for each in (np.maximum.accumulate(target), draft, levels, [0.0])
    ]
    return RoundCosts(*curves, num_known, prompts_s=draw(st.sampled_from([0.0, 0.1, 0.5, 2.0])))


def rate(offer: Offer, chosen: tuple[int, ...], costs: RoundCosts) -> float:
    """Return the tokens per second of a choice."""
    earned = sum(offer.survival_RD[row, :k].sum() for row, k in enumerate(chosen))
    tokens, num_drafting = len(chosen) + earned, sum(k > 0 for k in chosen)
    seconds = costs.target.at(costs.num_known + sum(chosen))
    if num_drafting:
        seconds += costs.levels_s(max(chosen), num_drafting) + costs.prompts_s * tokens
    return float(tokens / seconds)


@given(st.data())
def test_no_choice_is_faster_where_rows_draft_for_nothing(data: st.DataObject) -> None:
    num_rows = data.draw(NUM_ROWS)
    offer = data.draw(offers(num_rows))
    cost = data.draw(costs(num_rows, rows_cost=False))
    found = allocate([offer], num_rows, cost)
    choices = product(*(range(limit + 1) for limit in offer.limits_R.tolist()))
    best = max(rate(offer, choice, cost) for choice in choices)
    assert found.tokens / found.seconds == pytest.approx(best)
    assert rate(offer, tuple(found.k_RS[:, 0].tolist()), cost) == pytest.approx(best)


@given(st.data())
def test_nothing_pays_where_that_is_seen_without_a_search(data: st.DataObject) -> None:
    num_rows = data.draw(NUM_ROWS)
    offer = data.draw(offers(num_rows))
    cost = data.draw(costs(num_rows, rows_cost=True))
    choices = product(*(range(limit + 1) for limit in offer.limits_R.tolist()))
    best = max(rate(offer, choice, cost) for choice in choices)
    pays = best * cost.plain() / num_rows > 1 + 1e-9
    assert may_pay([offer], num_rows, cost) or not pays


@given(st.data())
def test_nothing_pays_from_any_source_where_that_is_seen_without_a_search(data: st.DataObject) -> None:
    """A look-up, which finds a draft now and then, and predictions, which cost nothing, before the draft worker."""
    num_rows = data.draw(NUM_ROWS)
    worker = data.draw(offers(num_rows))
    found_D = np.minimum.accumulate(data.draw(lists(st.floats(0.05, 1.0), DEPTH)))
    before = [
        replace(one, survival_RD=one.survival_RD * found_D, drafted_D=found_D, is_worker=False, is_free=is_free)
        for is_free in data.draw(st.sampled_from([[False], [True], [True, False]]))
        for one in [data.draw(offers(num_rows))]
    ]
    cost = data.draw(costs(num_rows, rows_cost=True))
    with patch("runtime.policy.allocation.may_pay", return_value=any(one.limits_R.any() for one in (*before, worker))):
        pays = allocate([*before, worker], num_rows, cost).gain > 1 + 1e-9
    assert may_pay([*before, worker], num_rows, cost) or not pays


def test_it_is_seen_without_a_search_with_many_rows() -> None:
    """Scoring takes about as long as what a draft token saves."""
    target = CostCurve({tokens: 1.0 + tokens for tokens in range(1, 200)}, 199)
    one = CostCurve({1: 1.0}, 1)
    for acceptance, expected in ((0.3, False), (0.999, True)):
        offer = Offer(np.cumprod(np.full((32, 4), acceptance), axis=1), np.ones(4), np.full(32, 4))
        assert may_pay([offer], 32, RoundCosts(target, CostCurve({1: 0.01}, 32), one, one, 32)) == expected


@pytest.mark.parametrize(
    ("is_free", "prompts_s", "expected"), [(False, 0.41, True), (False, 2.0, False), (True, 2.0, True)]
)
def test_prompts_are_part_of_it_but_for_predictions(is_free: bool, prompts_s: float, expected: bool) -> None:
    """A draft of one token, mostly accepted, in a tenth of a round. Seconds for prompts count with each token."""
    one, draft = CostCurve({1: 1.0}, 1), CostCurve({1: 0.1}, 1)
    offer = Offer(np.array([[0.9]]), np.ones(1), np.array([1]), is_worker=not is_free, is_free=is_free)
    cost = RoundCosts(one, draft, one, one, 1, prompts_s=prompts_s)
    assert may_pay([offer], 1, cost) == expected
    assert bool(allocate([offer], 1, cost).k_RS.any()) == expected
