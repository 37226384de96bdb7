"""What trees of each size bring, and which size is chosen."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.messages import StepCosts
from runtime.policy.cost_model import RoundCosts
from runtime.policy.round_costs import RoundCostModel
from runtime.policy.sizes import SizeModel, choose_size, ladder, rising

NUMBERS = st.floats(0.01, 100.0)


def costs(target_s: dict[int, float], num_known: int = 1) -> RoundCosts:
    return RoundCostModel(StepCosts(target_s, {1: 0.0}), 64, 8, 56).of(num_known)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=8))
def test_the_nearest_values_that_never_fall(values: list[tuple[float, float]]) -> None:
    value_S, weight_S = np.array(values).T
    found_S = rising(value_S, weight_S)
    assert (np.diff(found_S) >= 0).all()
    assert (found_S * weight_S).sum() == pytest.approx((value_S * weight_S).sum())
    # The least distance of any that never fall: moving any of its steps up or down does not come nearer.
    distance = (weight_S * (found_S - value_S) ** 2).sum()
    for first in range(len(values)):
        for last in range(first + 1, len(values) + 1):
            for moved in (-1e-3, 1e-3):
                other_S = found_S.copy()
                other_S[first:last] += moved
                if (np.diff(other_S) >= 0).all():
                    assert (weight_S * (other_S - value_S) ** 2).sum() >= distance - 1e-9


def test_a_size_of_which_much_was_seen_is_not_outweighed_by_others_of_which_little_was() -> None:
    """Nothing was ever accepted, and of the largest size nothing was tried."""
    model = SizeModel(ladder(56))
    for size, num_drafts in ((1, 13), (2, 37), (16, 91)):
        for _ in range(num_drafts):
            model.observe(size, 0, 0)
    assert model.accepted().max() < 0.1


def test_what_one_size_brings_shows_what_others_may() -> None:
    accepted = {}
    for is_right in (True, False):
        model = SizeModel([1, 2, 4, 8])
        for _ in range(100):
            model.observe(4, 4, 2 * is_right)
        accepted[is_right] = model.accepted()
    assert accepted[True][3] > 2
    assert 0.7 < accepted[True][0] < 1.2
    assert accepted[False].max() < 0.2


def test_steps_without_a_draft_cost_what_plain_ones_do() -> None:
    """One draft in four has nodes, 8 of them: such steps take twice as long, and others as long as plain ones."""
    model = SizeModel([8])
    for index in range(196):  # as many drafts as are remembered
        model.observe(8, 8 * (index % 4 == 0), 2 * (index % 4 == 0))
    chosen = choose_size(model, np.array([8]), 1, costs({1: 0.001, 2: 0.002, 16: 0.002}))
    assert chosen.seconds == pytest.approx(0.25 * 0.002 + 0.75 * 0.001, rel=0.05)
    assert chosen.gain == pytest.approx(1.2, rel=0.05)


def test_a_step_that_was_measured_faster_with_more_tokens_is_no_reason_to_draft() -> None:
    model = SizeModel([2])
    for _ in range(100):
        model.observe(2, 1, 0)
    assert choose_size(model, np.array([2]), 1, costs({1: 0.004, 2: 0.003, 16: 0.005})).gain < 1.01
