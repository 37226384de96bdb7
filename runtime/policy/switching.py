"""Whether speculation is on, and when it is tried, at first and again while it is off."""

import logging
import math
from collections import Counter
from statistics import median

from protos.stats import SpeculationChange
from runtime.policy.base import OTHER_LOAD, WARMING_ROUNDS, is_other_load

logger = logging.getLogger(__name__)

SMOOTHING = 0.2  # weight of the newest round in the smoothed gain
ON_ABOVE, OFF_BELOW = 1.03, 1.015
"""Speculation is switched on and off at these smoothed gains. Between them it stays as it is. A gain does not count the
policy's own time, which is about 1 % while speculation is on."""
FIRST_PAUSE, LONGEST_PAUSE = 64, 1024
"""Speculation stays off for so many rounds at least: twice as many whenever it was switched on for a shorter time."""
MOST_MISSED = 4.0
"""It is switched off once decoding without it would have saved so many plain rounds since it seems not to pay."""
TRIAL_SHARE, LEAST_TRIAL_SHARE = 0.01, 0.004
"""Of the time, for trials, and for deciding while speculation is off: before the first trial, and after some that did
not bring draft tokens back, each of which halves it."""
TRIAL_ROUNDS = WARMING_ROUNDS + 4
"""A trial drafts in so many rounds in a row."""
TRIAL_TOKENS = 1
"""Draft tokens of a row in a trial. The first one shows the most for the least: so trials come sooner."""
MOST_LOST = 2.0
"""A round of a trial that lost more plain rounds, and more than so many times what the median lost, was disturbed."""
TRIAL_PAUSE = 16
"""Rounds after a trial before the next one: what it showed is used first."""
OTHER_TRIAL = 4
"""What trials showed says little of so many times more rows, or fewer."""
MOST_SAVED = 10
"""Trials for which time is saved at most."""
FIRST_ROUNDS, FIRST_PLAIN = 48, 6
"""So many first rounds decide nothing: the very first take longer than later ones. The last of them are plain."""
MOST_LOST_FIRST = 32.0
"""Plain rounds that the first rounds may lose until only the plain ones of them are left: with a draft that is 20 ms
away they would take seconds."""


class Switch:
    """Whether speculation is on, by the gain that is predicted for it. `changes` counts its changes by reason.

    The gain is smoothed over the rounds of a load. The first prediction for a load changes nothing: a load that lasts
    for a few rounds only is not worth what the draft spends on catching up. It is switched on once it would have saved
    as much as that would have cost at any time since (the rule of ski rental: whatever comes, not much more is lost,
    nor missed), and off once it has lost as much as a mistake would cost: a few drafts that were wrong by chance do not
    turn it off.
    """

    def __init__(self) -> None:
        self.is_on = True
        self.changes: Counter[str] = Counter()
        self._log_gain = math.log(ON_ABOVE)
        self._rounds = 0  # in this state
        self._pause = FIRST_PAUSE
        self._num_rows = 0  # of this load
        self._num_changed = 0  # rows at the last change
        self._is_renewed = False  # since then
        # What the other state would have saved since it seems better, and the least that it would have cost, in plain
        # rounds.
        self._missed, self._least = 0.0, math.inf

    @property
    def gain(self) -> float:
        """The smoothed gain: tokens per second relative to plain decoding."""
        return math.exp(self._log_gain)

    def log(self, num_rows: int, acceptance: str) -> None:
        """Log the state, what it was decided for, and the *acceptance* that was measured."""
        state = "on again" if self.is_on else "off"
        text = "speculation is %s: %d rows decode, %s, predicted speed-up %.2f"
        logger.info(text, state, num_rows, acceptance, self.gain)

    def renew(self) -> None:
        """Note that the requests are others than when it was switched off."""
        self._is_renewed = True

    def update(
        self, gain: float, num_rounds: int, num_rows: int, catch_up: float = 0.0, *, is_current: bool = False
    ) -> bool:
        """Take the gain predicted for the last *num_rounds* rounds of *num_rows*; return whether the switch changed.

        *catch_up* is what switching on costs, in plain rounds. A pause is never long if what is known of drafts
        *is_current*, although none are scored, and other requests do not wait for its end.
        """
        self._rounds += num_rounds
        if is_other_load(self._num_rows, num_rows):
            is_loss = self.is_on and gain < OFF_BELOW  # it goes on, while a load that may end soon gains nothing
            self._log_gain, self._num_rows = math.log(gain), num_rows
            self._missed, self._least = self._missed * is_loss, math.inf
            return False
        self._log_gain += (1 - (1 - SMOOTHING) ** num_rounds) * (math.log(gain) - self._log_gain)
        if self.is_on and self.gain < OFF_BELOW:
            lost = num_rounds * (OFF_BELOW / self.gain - 1)
            return self._misses(lost, MOST_MISSED) and self._change("does_not_pay", num_rows)
        if not self.is_on and self.gain > ON_ABOVE and self._is_rested(num_rows, is_current=is_current):
            return self._misses(num_rounds * (1 - 1 / self.gain), catch_up) and self._change("pays", num_rows)
        self._missed, self._least = 0.0, math.inf
        return False

    def _misses(self, num_plain_rounds: float, most: float) -> bool:
        """Count what the other state would have saved; return whether it is as much as *most* ever was."""
        self._missed, self._least = self._missed + num_plain_rounds, min(self._least, most)
        return self._missed >= self._least

    def _next_pause(self, num_rows: int) -> int:
        """Return for how long speculation stays off. If more rows came since it was switched on, that was right."""
        is_mistake = self._rounds < self._pause and num_rows < OTHER_LOAD * self._num_changed
        return min(2 * self._pause, LONGEST_PAUSE) if is_mistake else FIRST_PAUSE

    def _is_rested(self, num_rows: int, *, is_current: bool) -> bool:
        """Whether the pause is over. There is none with fewer rows than it was switched off for."""
        if is_current and (self._is_renewed or self._rounds >= FIRST_PAUSE):
            return True
        return self._rounds >= self._pause or OTHER_LOAD * num_rows <= self._num_changed

    def _change(self, reason: SpeculationChange, num_rows: int) -> bool:
        if self.is_on:
            self._pause = self._next_pause(num_rows)
        self.is_on = not self.is_on
        self._rounds, self._num_changed, self._is_renewed = 0, num_rows, False
        self._missed, self._least = 0.0, math.inf
        self.changes[reason] += 1
        return True


class Trials:
    """Lets trials take a share of the time: that of every round is saved, and a trial spends what it lost.

    So do rounds with another number of draft tokens while speculation is on (`Exploration`).

    Args:
        limit: most draft tokens of a row.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._share = TRIAL_SHARE
        self._saved_s = 0.0
        self._usual_s, self._num_rows = 0.0, 1  # what the last trial lost, of so many rows
        self._lost_s: list[float] = []  # by each round of this trial
        self._catch_up_s = 0.0  # of this trial, in which the draft caught up
        self._rounds_left = 0
        self._pause = 0

    @property
    def is_running(self) -> bool:
        """Whether this round is part of a trial."""
        return self._rounds_left > 0

    @property
    def has_gained(self) -> bool:
        """Whether the last trial lost nothing against plain decoding."""
        return self._usual_s == 0

    def start_if_due(self, once_s: float, round_s: float = 0.0, num_rows: int = 1) -> bool:
        """Start a trial of *num_rows*, if enough time was saved for it.

        It is expected to lose *once_s*, and *round_s* in each round, or as much as the last one, less with fewer rows.
        """
        if max(num_rows, self._num_rows) >= OTHER_TRIAL * min(num_rows, self._num_rows):
            self.restore_share()
        needed_s = max(once_s + TRIAL_ROUNDS * round_s, self._usual_s * min(1.0, num_rows / self._num_rows))
        if self._pause > 0 or self._saved_s < needed_s:
            return False
        self._saved_s = min(self._saved_s, MOST_SAVED * needed_s)
        self._halve_share()
        self._rounds_left, self._lost_s, self._catch_up_s, self._num_rows = TRIAL_ROUNDS, [], 0.0, num_rows
        return True

    def restore_share(self) -> None:
        """Let the next trials take as much of the time as the first did: draft tokens pay, or just did, or may now."""
        self._share = TRIAL_SHARE

    def _halve_share(self) -> None:
        self._share = max(LEAST_TRIAL_SHARE, self._share / 2)

    def pay(self, expected_s: float, *, resumes: bool) -> bool:
        """Return whether enough time was saved for rounds that lose *expected_s*; if so, spend it.

        If there were no draft tokens before, it *resumes* them.
        """
        if self._saved_s < expected_s:
            return False
        self._saved_s -= expected_s
        if resumes:
            self._halve_share()
        return True

    def spend(self, seconds: float) -> None:
        """Count *seconds* of the policy's own time."""
        self._saved_s -= seconds

    def add(self, num_rounds: int, seconds: float) -> None:
        """Count rounds outside of trials."""
        self._saved_s += self._share * seconds
        self._pause -= num_rounds

    def prolong(self) -> None:
        """Add a round to a trial: in this one the draft only caught up."""
        self._rounds_left += self.is_running

    def end_round(self, seconds: float, lost_s: float = 0.0, plain_s: float = 0.0, catch_up_s: float = 0.0) -> bool:
        """Count a round; return whether a trial has ended.

        It took *seconds*, and lost *lost_s* against plain decoding, whose rounds take *plain_s*. Of that, *catch_up_s*
        counts in full, in which the draft caught up.
        """
        self._saved_s += self._share * seconds
        self._pause -= 1
        if not self._rounds_left:
            return False
        self._lost_s.append(lost_s - catch_up_s)
        self._catch_up_s += catch_up_s
        self._rounds_left -= 1
        if self._rounds_left and not self._is_hopeless(plain_s):
            return False
        self._end(plain_s)
        return True

    def _is_hopeless(self, plain_s: float) -> bool:
        """Whether rounds lose more than all draft tokens that a row can have would gain if they were accepted."""
        return len(self._lost_s) > WARMING_ROUNDS and median(self._lost_s) > self._limit * plain_s

    def _end(self, plain_s: float) -> None:
        most_s = MOST_LOST * max(plain_s, median(self._lost_s))
        self._usual_s = max(0.0, self._catch_up_s + sum([min(one_s, most_s) for one_s in self._lost_s]))
        self._saved_s -= self._usual_s
        self._rounds_left, self._pause = 0, TRIAL_PAUSE


class Resuming:
    """When draft tokens come back after rounds without, while speculation is on.

    That is once they would have saved the time in which the draft catches up (see `Switch`), as much as that was when
    they began to be missed, or less: a load of few rows may end before. What the draft has to read more since then is
    no reason to wait for longer: with many rows that may be as much in each round as draft tokens would save. What one
    round saves is not worth deciding once more.

    Attributes:
        num_held: for how many rounds they are held back; 0: they are not.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Hold nothing back: speculation was switched on or off."""
        self._missed_s = 0.0
        self._gain_s = 0.0  # of each round since the last decision, if it held draft tokens back
        self._least_s = math.inf  # in which the draft would have caught up since then
        self.num_held = 0

    def holds(self, catch_up_s: float, gain_s: float, num_rounds: int) -> bool:
        """Return whether draft tokens that gain *gain_s* in each round are held back, for `num_held` rounds.

        It is *num_rounds* since the last decision.
        """
        self._missed_s += num_rounds * self._gain_s
        self._least_s = min(self._least_s, catch_up_s)
        missing_s = self._least_s - self._missed_s
        self.num_held = math.ceil(missing_s / gain_s) if 0 < gain_s <= missing_s else 0
        self._gain_s = gain_s if self.num_held else 0.0
        self._missed_s, self._least_s = (self._missed_s, self._least_s) if self.num_held else (0.0, math.inf)
        return self.num_held > 0


class FirstRounds:
    """Counts the first rounds of an engine, in which drafts are tried whether they seem to pay or not.

    Args:
        limit: most draft tokens of a row. A round that lost more plain rounds counts as having lost so many.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_left = FIRST_ROUNDS
        self._lost = 0.0  # plain rounds

    @property
    def are_over(self) -> bool:
        """Whether decisions are made."""
        return self._num_left == 0

    def start(self) -> bool:
        """Count a round; return whether it drafts."""
        self._num_left -= 1
        return self._num_left >= FIRST_PLAIN

    def end_round(self, lost_s: float, plain_s: float) -> None:
        """Count what a round lost, of whose shape a plain round takes *plain_s*."""
        if self._num_left <= FIRST_PLAIN or not plain_s:
            return
        self._lost += min(lost_s / plain_s, float(self._limit))
        if self._lost > MOST_LOST_FIRST:
            self._num_left = FIRST_PLAIN
