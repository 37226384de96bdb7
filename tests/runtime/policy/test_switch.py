"""Whether speculation is on, as the number of requests swings."""

from runtime.policy.switching import FIRST_PAUSE, Resuming, Switch


def decide(switch: Switch, gain: float, num_rows: int) -> bool:
    """Decide once for ten rounds."""
    return switch.update(gain, 10, num_rows, catch_up=1.0)


def test_it_is_switched_off_however_often_the_load_swings_if_drafts_pay_at_none() -> None:
    switch = Switch()
    swings = 0
    while switch.is_on:
        for num_rows in (32, 32, 16, 8):
            decide(switch, 1.0, num_rows)
        swings += 1
        assert swings < 80
    assert switch.changes == {"does_not_pay": 1}


def test_a_load_at_which_drafts_pay_ends_a_loss() -> None:
    switch = Switch()
    for _ in range(200):
        for num_rows, gain in ((32, 1.0), (32, 1.0), (8, 1.3), (8, 1.3)):
            decide(switch, gain, num_rows)
    assert switch.is_on


def test_what_a_short_load_would_gain_does_not_switch_it_on() -> None:
    switch = Switch()
    while switch.is_on:
        decide(switch, 1.0, 32)
    for _ in range(100):
        for num_rows in (32, 16):
            decide(switch, 1.1, num_rows)
    assert not switch.is_on


def test_draft_tokens_come_back_once_they_would_have_saved_what_the_draft_reads_first() -> None:
    resuming = Resuming()

    def num_held(catch_up_s: float, gain_s: float, num_rounds: int) -> int:
        assert resuming.holds(catch_up_s, gain_s, num_rounds) == (resuming.num_held > 0)
        return resuming.num_held

    assert num_held(0.010, 0.002, 7) == 5
    assert num_held(0.011, 0.001, 4) == 2  # since then, 0.008 would have been saved, and 0.001 came to be read
    assert num_held(0.012, -0.001, 4) == 0  # they do not pay any more
    assert num_held(0.012, 0.004, 64) == 3
    assert num_held(0.012, 0.004, 3) == 0
    assert num_held(0.0, 0.004, 3) == 0  # the draft has read all
    assert num_held(0.003, 0.004, 3) == 0  # less than one round saves
    assert num_held(0.012, 0.004, 64) == 3
    resuming.clear()
    assert resuming.num_held == 0


def test_what_the_draft_has_to_read_more_while_they_are_held_back_does_not_hold_them_back() -> None:
    """Many rows: in each round as much comes to be read as draft tokens would save. They would never come back."""
    resuming, rounds, num_held = Resuming(), 0, 0
    while resuming.holds(0.003 + 0.0005 * rounds, 0.0003, num_held):
        num_held = resuming.num_held
        rounds += num_held
    assert rounds <= 11
    switch = Switch()
    while switch.is_on:
        decide(switch, 0.9, 64)
    rounds = 0
    while not switch.is_on:
        switch.update(1.05, 1, 64, catch_up=4 + 0.06 * rounds)
        rounds += 1
    assert rounds < 4 * FIRST_PAUSE


def mistaken(times: int, *, is_current: bool) -> Switch:
    """Return a switch that was switched on by mistake so many times, and is off since then."""
    switch = Switch()
    for _ in range(times):
        while switch.is_on:
            decide(switch, 0.9, 1)
        while not switch.is_on:
            switch.update(1.2, 10, 1, is_current=is_current)
    while switch.is_on:
        decide(switch, 0.9, 1)
    return switch


def rounds_off(switch: Switch, *, is_current: bool) -> int:
    """Return for how many rounds it stays off although draft tokens seem to pay."""
    num_rounds = 0
    while not switch.is_on:
        switch.update(1.2, 1, 1, is_current=is_current)
        num_rounds += 1
    return num_rounds


def test_a_pause_is_long_after_mistakes_but_not_where_it_is_known_what_drafts_would_bring() -> None:
    assert rounds_off(mistaken(3, is_current=False), is_current=False) > 4 * FIRST_PAUSE
    assert rounds_off(mistaken(3, is_current=True), is_current=True) <= FIRST_PAUSE


def test_of_other_requests_it_does_not_wait_for_the_end_of_a_pause_where_that_is_known() -> None:
    for is_current, most in ((True, 10), (False, 1000)):
        switch = mistaken(1, is_current=is_current)
        switch.renew()
        num_rounds = rounds_off(switch, is_current=is_current)
        assert num_rounds <= most
        assert is_current or num_rounds > FIRST_PAUSE - 10
