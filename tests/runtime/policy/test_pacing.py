"""Work that is spread over rounds."""

from itertools import pairwise

import pytest

from runtime.policy.switching import Pace, Share


@pytest.mark.parametrize(("seconds", "every"), [(0.0005, 5), (0.00001, 1), (1.0, 32)])
def test_work_takes_its_share_of_the_time_or_less_unless_it_would_be_too_rare(seconds: float, every: int) -> None:
    """A round takes 10 ms. In any rounds the first of which has the work, it takes a hundredth at most."""
    pace, rounds = Pace(), []
    for number in range(320):
        if pace.is_due:
            rounds.append(number)
            pace.done(seconds, 0.01, Share(0.01, 32))
        else:
            pace.skip()
    gaps = {second - first for first, second in pairwise(rounds)}
    assert len(gaps) == 1
    gap = gaps.pop()
    assert every <= gap <= every + 1
    assert gap == 32 or seconds <= gap * 0.01 * 0.01


def test_it_can_be_asked_for_at_once() -> None:
    pace = Pace()
    pace.done(1.0, 0.01, Share(0.01, 32))
    assert not pace.is_due
    pace.advance()
    assert pace.is_due


def test_while_nothing_is_known_of_rounds_it_is_done_in_each() -> None:
    pace = Pace()
    pace.done(1.0, 0.0, Share(0.01, 32))
    assert pace.is_due
