"""What rounds cost, as the adaptive policy compares and learns it."""

from collections.abc import Mapping
from dataclasses import dataclass

from protos.draft import PREDICTION
from protos.messages import StepCosts
from runtime.policy.acceptance import WORKER_ALONE, Sources
from runtime.policy.allocation import RoundCosts
from runtime.policy.base import FinishedStep
from runtime.policy.cost_model import CostCurve

FREE = {1: 0.0}
PROMPTS_RATE = 0.02
"""Weight of the newest round in what the draft spends on prompts."""
NOT_WAITED = 0.5
"""A round without the drafts asked for that took less than this share of what drafting costs did not wait for them."""


@dataclass(frozen=True)
class Round:
    """What a round was and took.

    Attributes:
        num_known: known tokens fed.
        num_scored: draft tokens scored.
        num_drafting: rows for which the draft worker was asked.
        depth: most draft tokens that it was asked for.
        num_tokens: tokens that the rows gained.
        draft_s: seconds of the round spent on drafts.
        seconds: of the whole round.
        decodes: whether all rows decode: no prompt chunks.
        num_looked: rows for which drafts were looked up.
        lookup_s: of *draft_s*, those spent on that.
        got_none: whether the draft worker was asked, and no draft of it came.
    """

    num_known: int
    num_scored: int
    num_drafting: int
    depth: int
    num_tokens: int
    draft_s: float
    seconds: float
    decodes: bool = True
    num_looked: int = 0
    lookup_s: float = 0.0
    got_none: bool = False


class RoundCostModel:
    """Seconds of rounds of one engine: see `runtime.policy.cost_model`.

    Args:
        costs: measured in warm-up; None if nothing was measured.
        max_tokens: most tokens of a round of decoding rows.
        max_rows: most rows.
        max_depth: most draft tokens of a row.
        sources: of drafts; those that there are not cost nothing.
    """

    def __init__(
        self, costs: StepCosts | None, max_tokens: int, max_rows: int, max_depth: int, sources: Sources = WORKER_ALONE
    ) -> None:
        self._max_tokens, self._max_rows = max_tokens, max_rows
        self._sources = sources
        self._prompts_s = 0.0
        self._lookups = CostCurve({} if sources.predicts else FREE, max_rows)
        self.revise(StepCosts({}) if costs is None else costs)
        linear = {depth: float(depth) for depth in range(1, max_depth + 1)}
        self._levels = CostCurve(linear, max_depth, has_ratios=True)

    def revise(self, costs: StepCosts) -> None:
        """Begin with new measured costs, without corrections. What further levels cost relative to one stays."""
        self._target = CostCurve(costs.target_s, self._max_tokens)
        self._draft = CostCurve(costs.draft_s if self._sources.has_worker else FREE, self._max_rows)

    def observe(self, done: Round) -> None:
        """Correct the curves by a round."""
        if done.draft_s:
            self._observe_prompts(done)
        if not done.decodes:
            return
        levels_s = done.draft_s - done.lookup_s
        if done.depth and not (done.got_none and self._was_not_waited_for(done, levels_s)):
            self._draft.observe(done.num_drafting, levels_s / self._levels.at(done.depth))
            self._levels.observe(done.depth, levels_s / self._draft.at(done.num_drafting))
        if done.num_looked:
            self._lookups.observe(done.num_looked, done.lookup_s)
        self._target.observe(done.num_known + done.num_scored, done.seconds - done.draft_s)

    def _was_not_waited_for(self, done: Round, levels_s: float) -> bool:
        """Whether target rank 0 went on without a late draft: such a round does not show what drafts cost."""
        return levels_s < NOT_WAITED * self._levels.at(done.depth) * self._draft.at(done.num_drafting)

    def _observe_prompts(self, done: Round) -> None:
        """Learn what drafting spends on prompts, as seconds of a round on average."""
        usual_s = self.of(done.num_known).levels_s(done.depth, done.num_drafting)
        usual_s += self._lookups.at(done.num_looked) if done.num_looked else 0.0
        spent_s = 0.0 if done.decodes else max(0.0, done.draft_s - usual_s)
        self._prompts_s += PROMPTS_RATE * (spent_s - self._prompts_s)

    def age(self) -> None:
        """Let the next rounds count more where nothing was learnt since the last call."""
        for curve in (self._target, self._draft, self._levels, self._lookups):
            curve.age()

    def of(self, num_known: int) -> RoundCosts:
        """Return the costs of the rounds that feed *num_known* known tokens."""
        return RoundCosts(self._target, self._draft, self._levels, self._lookups, num_known, self._prompts_s)


def describe(step: FinishedStep, asked: Mapping[int, tuple[int, ...]], worker: int, deciding_s: float) -> Round:
    """Describe a step by what was asked for.

    Args:
        step: finished.
        asked: most draft tokens of the row of each slot from each source; empty if it was not asked for any.
        worker: the source that is the draft worker.
        deciding_s: of its seconds, those that a policy spent.
    """
    rows = step.plan.rows
    by_worker = {row.slot for row in rows if row.source == worker}
    wanted = [asked[slot][worker] for slot in by_worker if len(asked[slot]) > worker and asked[slot][worker]]
    return Round(
        num_known=sum([row.length for row in rows]),
        num_scored=sum([verdict.proposed for verdict in step.verdicts]),
        num_drafting=len(wanted),
        depth=max(wanted, default=0),
        num_tokens=step.num_tokens,
        draft_s=step.draft_s,
        seconds=step.seconds - deciding_s,
        decodes=step.plan.decodes,
        num_looked=sum([any(one[PREDICTION + 1 : worker]) for one in asked.values()]),
        lookup_s=step.lookup_s,
        got_none=bool(wanted) and not any(one.proposed for one in step.verdicts if one.slot in by_worker),
    )
