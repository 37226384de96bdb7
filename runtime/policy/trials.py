"""When speculation that is off is tried again."""

TRIAL_SHARE = 0.01
"""Of the time, for trials."""
WARMING_ROUNDS = 2
"""Nothing is learnt of so many first rounds with drafts: the draft catches up with the sequences."""
TRIAL_ROUNDS = WARMING_ROUNDS + 4
"""A trial drafts in so many rounds in a row."""
MOST_LOST = 2.0
"""A round of a trial counts as having lost so many plain rounds at most. One that lost more was disturbed."""
TRIAL_PAUSE = 16
"""Rounds after a trial before the next one: what it showed is used first."""
MOST_SAVED = 10
"""Trials for which time is saved at most."""


class Trials:
    """Lets trials take `TRIAL_SHARE` of the time: a share of every round is saved, and a trial spends what it lost.

    So do single rounds with another number of draft tokens while speculation is on.
    """

    def __init__(self) -> None:
        self._saved_s = 0.0
        self._usual_s = 0.0  # what the last trial lost
        self._lost_s = 0.0  # by this trial
        self._rounds_left = 0
        self._pause = 0

    @property
    def is_running(self) -> bool:
        """Whether this round is part of a trial."""
        return self._rounds_left > 0

    def start_if_due(self, expected_s: float) -> bool:
        """Start a trial, which is expected to lose *expected_s*, if enough time was saved for it."""
        needed_s = max(expected_s, self._usual_s)
        if self._pause > 0 or self._saved_s < needed_s:
            return False
        self._saved_s = min(self._saved_s, MOST_SAVED * needed_s)
        self._rounds_left, self._lost_s = TRIAL_ROUNDS, 0.0
        return True

    def pay(self, expected_s: float) -> bool:
        """Return whether enough time was saved for a single round that loses *expected_s*; if so, spend it."""
        if self._saved_s < expected_s:
            return False
        self._saved_s -= expected_s
        return True

    def end_round(self, seconds: float, lost_s: float) -> bool:
        """Count a round that took *seconds*, *lost_s* of them against plain decoding if it was part of a trial.

        Returns:
            Whether a trial has ended.
        """
        self._saved_s += TRIAL_SHARE * seconds
        self._pause -= 1
        if not self._rounds_left:
            return False
        self._lost_s += lost_s
        self._rounds_left -= 1
        if self._rounds_left:
            return False
        self._pause = TRIAL_PAUSE
        self._usual_s = max(0.0, self._lost_s)
        self._saved_s -= self._usual_s
        return True
