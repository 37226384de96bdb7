"""What was predicted of rounds, compared with what they brought."""

import random

import numpy as np
import pytest

from runtime.policy.allocation import Allocation, Calibration

BEST = Allocation(np.array([[3], [3]], np.int64), tokens=5.0, seconds=0.010, gain=1.5)


def calibrated(tokens: float, seconds: float, *, spread: float = 0.5, rounds: int = 200) -> float:
    """Return the factor after rounds that bring *tokens* with this standard deviation, and take *seconds*."""
    rng = random.Random(0)
    calibration = Calibration()
    calibration.expect(BEST, prompts_s=0.0)
    for _ in range(rounds):
        calibration.observe(2, max(2, round(rng.gauss(tokens, spread))), seconds)
    return calibration.factor


def test_right_predictions_stay_as_they_are() -> None:
    assert calibrated(5.0, 0.010) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(("tokens", "seconds", "factor"), [(2.5, 0.010, 0.5), (5.0, 0.0125, 0.8), (6.0, 0.010, 1.2)])
def test_rounds_that_bring_less_or_take_longer_are_believed(tokens: float, seconds: float, factor: float) -> None:
    assert calibrated(tokens, seconds) == pytest.approx(factor, rel=0.06)


def test_what_varies_much_is_believed_less() -> None:
    steady, wild = calibrated(4.0, 0.010, spread=0.2), calibrated(4.0, 0.010, spread=6.0)
    assert steady == pytest.approx(0.8, rel=0.03)
    assert abs(np.log(wild)) < 0.6 * abs(np.log(steady))


def test_few_rounds_and_other_rounds_show_nothing() -> None:
    assert calibrated(2.5, 0.010, rounds=10) == 1.0
    calibration = Calibration()
    calibration.expect(BEST, prompts_s=0.0)
    for _ in range(100):
        calibration.observe(3, 2, 0.010)  # another number of rows
    calibration.expect_nothing()
    for _ in range(100):
        calibration.observe(2, 2, 0.010)
    assert calibration.factor == 1.0


def test_the_seconds_for_prompts_are_not_compared() -> None:
    calibration = Calibration()
    calibration.expect(BEST, prompts_s=0.001)  # five tokens: half of the seconds
    for _ in range(100):
        calibration.observe(2, 5, 0.005)
    assert calibration.factor == pytest.approx(1.0)


def test_rounds_without_draft_tokens_let_it_fade() -> None:
    """While speculation is off, what is measured of each depth is as wrong as before; it is believed for a while."""
    calibration = Calibration()
    calibration.expect(BEST, prompts_s=0.0)
    calibration.end_idle(2, [(2, 0.010)] * 200, is_on=True)
    before = calibration.factor
    calibration.fade(64)
    assert calibration.factor == pytest.approx(before, rel=0.05)
    calibration.fade(1000)
    assert calibration.factor == 1.0
