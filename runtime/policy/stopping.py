"""How likely a draft token must be to be accepted, so that it pays: for `assistant_confidence_threshold` "auto".

Rounds bring Y tokens in T seconds. One more draft token of a row takes c seconds: the row's share of a draft step, and
what the target takes longer to score it. With probability s it is accepted, after all before it. It raises the tokens
per second if s > c Y / T. That is the choice of `runtime.policy.allocation`, with the confidence of single tokens. As
the choice changes Y and T, so they change the choice, until both agree.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from protos.messages import StepCosts
from runtime.core.sequence import Sequence
from runtime.policy.base import FinishedStep, Policy
from runtime.policy.pacing import Warming
from runtime.policy.round_costs import Round, RoundCostModel

SMOOTHING = 0.05
"""Weight of the newest round in the smoothed tokens and seconds."""
MOST_SLOW = 2.0
"""A round counts as no longer than so many smoothed ones: something disturbed it."""
SLOPE_ROWS = 4
"""What the target takes longer for a draft token is read from the cost of so many for each row."""


class StoppingPolicy:
    """Another policy, and the least survival of draft tokens by what rounds cost and brought.

    Args:
        inner: decides everything else.
        costs: of rounds, with its own corrections.
    """

    def __init__(self, inner: Policy, costs: RoundCostModel) -> None:
        self._inner, self._costs, self._warming = inner, costs, Warming()
        self._tokens = self._seconds = 0.0
        self.least_survival = 0.0

    @property
    def limit(self) -> int:
        """See `Policy`."""
        return self._inner.limit

    @property
    def current(self) -> int:
        """See `Policy`."""
        return self._inner.current

    @property
    def changes(self) -> Mapping[str, int]:
        """See `Policy`."""
        return self._inner.changes

    @property
    def predicted_speedup(self) -> float | None:
        """See `Policy`."""
        return self._inner.predicted_speedup

    @property
    def stays_plain(self) -> bool:
        """See `Policy`."""
        return self._inner.stays_plain

    def begin_step(self, running: Seq[Sequence]) -> None:
        """See `Policy`."""
        self._inner.begin_step(running)
        self._warming.count(drafts=self.current > 0)
        num_rows = sum([sequence.is_decoding for sequence in running])
        if num_rows and self._seconds:
            self.least_survival = self._least(num_rows)

    def _least(self, num_rows: int) -> float:
        """Return the tokens that the engine brings in the seconds that one more draft token of a row takes."""
        costs = self._costs.of(num_rows)
        more = SLOPE_ROWS * num_rows
        scoring_s = max(0.0, costs.target.at(num_rows + more) - costs.target.at(num_rows)) / more
        return (costs.draft.at(num_rows) / num_rows + scoring_s) * self._tokens / self._seconds

    def num_draft_tokens(self, sequence: Sequence, source: int | None = None) -> int:
        """See `Policy`."""
        return self._inner.num_draft_tokens(sequence, source)

    def end_step(self, step: FinishedStep) -> None:
        """See `Policy`. In the first rounds with drafts the draft catches up."""
        self._inner.end_step(step)
        if self._warming.is_on or not step.worker_is_up:
            return
        done = _drafted(step)
        self._costs.observe(done)
        if done.depth and done.decodes:
            weight, most_s = (SMOOTHING, MOST_SLOW * self._seconds) if self._seconds else (1.0, done.seconds)
            self._tokens += weight * (done.num_tokens - self._tokens)
            self._seconds += weight * (min(done.seconds, most_s) - self._seconds)

    def revise(self, costs: StepCosts) -> None:
        """See `Policy`. What rounds brought is smoothed anew: they took other seconds before."""
        self._inner.revise(costs)
        self._costs.revise(costs)
        self._tokens = self._seconds = 0.0


def _drafted(step: FinishedStep) -> Round:
    """Describe a step by the draft tokens that there were, not by those that were asked for."""
    counts = [verdict.proposed for verdict in step.verdicts if verdict.proposed]
    return Round(
        num_known=step.num_known,
        num_scored=sum(counts),
        num_drafting=len(counts),
        depth=max(counts, default=0),
        num_tokens=step.num_tokens,
        draft_s=step.draft_s,
        lookup_s=step.lookup_s,
        seconds=step.seconds,
        decodes=step.plan.decodes,
    )
