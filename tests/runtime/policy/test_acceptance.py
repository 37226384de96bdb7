"""Measured acceptance: of a method, and of its requests."""

import numpy as np
import pytest

from runtime.policy.acceptance import AcceptanceModel, RequestAcceptance


def shown(model: AcceptanceModel, accepted: int, num_rounds: int) -> RequestAcceptance:
    """Return a request that got two draft tokens in so many rounds, of which so many were *accepted*."""
    request = RequestAcceptance()
    for _ in range(num_rounds):
        model.observe(request, 2, 2, accepted)
    model.refresh()
    return request


def test_one_long_request_shows_less_of_others_than_many_short_ones() -> None:
    """As many rounds of both: were all alike, half of the first draft tokens would have been right."""
    model = AcceptanceModel(2)
    for _ in range(20):
        shown(model, 2, 3)
    shown(model, 0, 60)
    assert model.rates[0] > 0.55


@pytest.mark.parametrize("accepted", [0, 2])
def test_the_only_request_is_as_good_as_was_expected_of_it(accepted: int) -> None:
    """What it was expected to show was mostly assumed; with it, the estimate of all requests has changed."""
    model = AcceptanceModel(2)
    request = shown(model, accepted, 60)
    usual, of_request = model.survival([RequestAcceptance(), request])
    assert of_request == pytest.approx(usual, abs=0.03)


def test_a_request_that_repeats_itself_is_no_worse_for_having_taught_the_method_that_drafts_are_found() -> None:
    """As with n-grams: few drafts are found, and their tokens are right. In this request one is found each round."""
    model = AcceptanceModel(8)
    for number in range(40):
        model.observe(RequestAcceptance(), 8, 8 * (number % 10 == 0), 8 * (number % 10 == 0))
    model.refresh()
    request = RequestAcceptance()
    for _ in range(30):
        model.observe(request, 8, 8, 8)
    model.refresh()
    usual, of_request = model.survival([RequestAcceptance(), request])
    assert model.rates[0] > 0.3
    assert np.all(of_request >= usual)


def test_a_method_that_is_never_right_is_not_taken_to_be_right_after_a_while_without_drafts() -> None:
    model = AcceptanceModel(2)
    for _ in range(20):
        shown(model, 0, 20)
    for _ in range(3):
        model.age()
        model.refresh()
    assert model.rates[0] < 0.05
    shown(model, 2, 20)
    assert model.rates[0] > 0.4, "what was seen before weighs little"
    assert np.all(np.diff(model.survival([RequestAcceptance()])) <= 0)
