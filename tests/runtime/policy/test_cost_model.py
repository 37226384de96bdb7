"""The cost curve: what one size shows of another."""

import math

from runtime.policy.cost_model import CostCurve


def run(curve: CostCurve, size: int, seconds: float, rounds: int) -> None:
    for _ in range(rounds):
        curve.observe(size, seconds)


def test_a_size_is_in_doubt_when_others_have_changed_and_few_rounds_settle_it() -> None:
    curve = CostCurve({1: 0.004, 2: 0.005}, 8)
    run(curve, 1, 0.004, 100)
    run(curve, 2, 0.005, 100)
    assert not curve.is_in_doubt(1)
    run(curve, 2, 0.0065, 50)
    assert curve.is_in_doubt(1)
    assert curve.at(1) > 1.08 * 0.004, "the machine may have become slower for all sizes"
    run(curve, 1, 0.004, 3)
    assert not curve.is_in_doubt(1)
    assert 0.98 < curve.at(1) / 0.004 < 1.04
    assert 0.97 < curve.at(2) / 0.0065 < 1.03


def test_a_size_that_is_run_all_the_time_is_never_in_doubt() -> None:
    curve = CostCurve({1: 0.004}, 8)
    for seconds in (0.004, 0.006, 0.003):
        for _ in range(100):
            curve.observe(1, seconds)
            assert not curve.is_in_doubt(1)


def test_that_a_size_is_slow_is_forgotten_and_that_it_is_fast_is_not() -> None:
    left = []
    for seconds in (0.0025, 0.0016):
        curve = CostCurve({1: 0.002, 8: 0.002}, 8)
        run(curve, 8, 0.002, 100)
        run(curve, 1, seconds, 20)
        curve.age(0.8)  # what was run since the last time stays
        before = math.log(curve.at(1) / curve.at(8))
        for _ in range(5):
            curve.age(0.8)
        left.append(math.log(curve.at(1) / curve.at(8)) / before)
    slow, fast = left
    assert 0.5 < slow < 0.6 and fast == 1
