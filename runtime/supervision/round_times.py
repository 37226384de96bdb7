"""Times of rounds: what each phase took, and how long the next round should take."""

from collections.abc import Mapping

from protos.stats import PhaseTimes
from protos.worker_messages import RoundDone
from runtime.policy.interpolation import interpolate


class PhaseTotals:
    """Adds up `PhaseTimes` over the rounds of a worker group."""

    def __init__(self) -> None:
        self._propose_s = self._transfer_s = self._score_s = self._verify_s = 0.0
        self._late_drafts = 0

    @property
    def times(self) -> PhaseTimes:
        """The times of all rounds."""
        return PhaseTimes(self._propose_s, self._transfer_s, self._score_s, self._verify_s, self._late_drafts)

    def add(self, done: RoundDone, propose_s: float | None) -> None:
        """Add a round. *propose_s* is what a draft worker measured.

        None without a draft worker: target 0 proposes, and the time that it waited is the proposing time.
        """
        self._propose_s += done.wait_s if propose_s is None else propose_s
        self._transfer_s += 0.0 if propose_s is None else max(0.0, done.wait_s - propose_s)
        self._score_s += done.score_s
        self._verify_s += done.verify_s
        self._late_drafts += done.draft_missed


class RoundTimePredictor:
    """Predicts the seconds of a round: step times measured in warm-up, times a slowdown factor learnt from rounds.

    Args:
        step_s: measured seconds of a forward by number of tokens; empty if nothing was measured.
    """

    def __init__(self, step_s: Mapping[int, float]) -> None:
        self._step_s = step_s
        self._slowdown = 1.0

    def predict(self, num_tokens: int) -> float:
        """Return the seconds that a round of this many tokens should take; 0.0 if nothing was measured."""
        return self._slowdown * self._measured(num_tokens)

    def update(self, num_tokens: int, seconds: float) -> None:
        """Record a finished round. The slowdown factor rises immediately and decays by 1 % per round."""
        expected = self._measured(num_tokens)
        if expected > 0:
            self._slowdown = max(1.0, seconds / expected, self._slowdown * 0.99)

    def _measured(self, num_tokens: int) -> float:
        return interpolate(self._step_s, num_tokens) if self._step_s else 0.0
