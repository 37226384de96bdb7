"""Where the time of rounds goes: what workers measured, and what a step takes as a whole."""

import time
from collections.abc import Sequence

from protos.messages import RoundPlan, StepCosts, TokenOutput
from protos.stats import PhaseTimes
from protos.worker_messages import RoundDone
from runtime.core.threshold import at


class Phases:
    """Adds up `PhaseTimes` over the rounds of a gang."""

    def __init__(self) -> None:
        self._propose_s = self._transfer_s = self._score_s = self._verify_s = 0.0
        self._late_drafts = 0

    @property
    def times(self) -> PhaseTimes:
        """What all rounds took."""
        return PhaseTimes(self._propose_s, self._transfer_s, self._score_s, self._verify_s, self._late_drafts)

    def add(self, done: RoundDone, propose_s: float | None) -> None:
        """Take a round into account; *propose_s* is what a draft of its own process measured, None without one.

        A draft in target 0's process is what that one waits for.
        """
        self._propose_s += done.wait_s if propose_s is None else propose_s
        self._transfer_s += 0.0 if propose_s is None else max(0.0, done.wait_s - propose_s)
        self._score_s += done.score_s
        self._verify_s += done.verify_s
        self._late_drafts += done.draft_missed


class StepClock:
    """Times whole steps, and sets those with guesses against what plain ones would have taken.

    A plain step gives every row one token. It would cost the forward of one token a row, as measured in warm-up, and
    whatever else this step cost beside its own forward and its guesses. Without measured costs nothing is estimated.

    Attributes:
        steps_s: seconds of all steps, from planning to committing.
        guessed_s: of those with guesses in which every row decoded.
        plain_s: what plain steps would have taken for the tokens of the latter.
    """

    def __init__(self, costs: StepCosts | None) -> None:
        self._target_s = {} if costs is None else costs.target_s
        self._before = PhaseTimes()
        self.steps_s = self.guessed_s = self.plain_s = 0.0

    def stepped(self, plan: RoundPlan, outputs: Sequence[TokenOutput], times: PhaseTimes, began: float) -> None:
        """Take a step into account that *began* then and has just been committed; *times* are all rounds' so far."""
        seconds = time.monotonic() - began
        self.steps_s += seconds
        before, self._before = self._before, times
        if not (plan.speculates and self._target_s and all(row.samples and row.length == 1 for row in plan.rows)):
            return
        special_s = _of_guessing(times) - _of_guessing(before)
        num_rows = len(plan.rows)
        plain_s = at(self._target_s, num_rows) + max(0.0, seconds - special_s)
        self.guessed_s += seconds
        self.plain_s += plain_s * sum([len(output.token_ids) for output in outputs]) / num_rows


def _of_guessing(times: PhaseTimes) -> float:
    """Seconds that a plain step would not have spent, or not like this."""
    return times.propose_s + times.transfer_s + times.score_s
