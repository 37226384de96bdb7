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
PROMPTS_KEPT = 1 - 1 / 512
"""Weight of earlier rounds in how long prompts and answers are."""
DRAFTED_KEPT = 0.9
"""Weight of earlier prompts in what drafting spends on a token of one."""
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


class PromptDrafting:
    """What drafting spends on prompts, for each token of an answer.

    Tokens are counted in all rounds, seconds where there are drafts: with other requests than when drafts were tried
    last, it is known what their prompts would take.
    """

    def __init__(self) -> None:
        self._num_read = self._num_answered = 0.0  # tokens of prompts and of answers
        self._drafted_s = self._num_drafted = 0.0  # of prompts with drafts
        self.is_pending = False
        """Whether a draft may read prompts in this round: they were read by the target in the one before."""

    @property
    def token_s(self) -> float:
        """Seconds for each token of an answer, on average."""
        return self._num_read / max(1.0, self._num_answered) * self._drafted_s / max(1.0, self._num_drafted)

    def count(self, num_read: int, num_answered: int) -> None:
        """Count the tokens of prompts that a round read, and those of answers."""
        self._num_read = PROMPTS_KEPT * self._num_read + num_read
        self._num_answered = PROMPTS_KEPT * self._num_answered + num_answered
        self.is_pending = num_read > 0

    def observe(self, num_read: int, seconds: float) -> None:
        """Learn from a round that read prompts, or from the one after: drafting spent *seconds* on any."""
        kept = DRAFTED_KEPT if num_read else 1.0
        self._num_drafted = kept * self._num_drafted + num_read
        self._drafted_s = kept * self._drafted_s + seconds


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
        self._max_tokens, self._max_rows, self._max_depth = max_tokens, max_rows, max_depth
        self._sources = sources
        self._prompts = PromptDrafting()
        self._lookups = CostCurve({} if sources.predicts else FREE, max_rows)
        self.revise(StepCosts({}) if costs is None else costs)
        linear = {depth: float(depth) for depth in range(1, max_depth + 1)}
        self._levels = CostCurve(linear, max_depth, has_ratios=True)

    def revise(self, costs: StepCosts) -> None:
        """Begin with new measured costs, without corrections. What further levels cost relative to one stays."""
        self._target = CostCurve(costs.target_s, self._max_tokens)
        self._draft = CostCurve(costs.draft_s if self._sources.has_worker else FREE, self._max_rows)

    def observe(self, done: Round) -> None:
        """Correct the curves by a round, unless there are prompts in it."""
        if not done.decodes:
            return
        if not self._prompts.is_pending:
            self._observe_drafting(done)
        self._target.observe(done.num_known + done.num_scored, done.seconds - done.draft_s)

    def _observe_drafting(self, done: Round) -> None:
        levels_s = done.draft_s - done.lookup_s
        if done.depth and not (done.got_none and self._was_not_waited_for(done, levels_s)):
            self._draft.observe(done.num_drafting, levels_s / self._levels.at(done.depth))
            self._levels.observe(done.depth, levels_s / self._draft.at(done.num_drafting))
        if done.num_looked:
            self._lookups.observe(done.num_looked, done.lookup_s)

    def _was_not_waited_for(self, done: Round, levels_s: float) -> bool:
        """Whether target rank 0 went on without a late draft: such a round does not show what drafts cost."""
        return levels_s < NOT_WAITED * self._levels.at(done.depth) * self._draft.at(done.num_drafting)

    def observe_prompts(self, step: FinishedStep, depth: int) -> None:
        """Count the prompts of a step, after `observe`.

        Args:
            step: finished.
            depth: most draft tokens that were asked for; 0 if there were none, or if nothing is learnt of the step.
        """
        rows = step.plan.rows
        num_read = 0 if step.plan.decodes else sum([row.length for row in rows if row.length > 1])
        if depth and (num_read or self._prompts.is_pending):
            num_drafting = sum([row.k > 0 for row in rows])
            usual_s = self._usual_s(depth, num_drafting) if num_drafting else 0.0
            self._prompts.observe(num_read, max(0.0, step.draft_s - usual_s))
        self._prompts.count(num_read, step.num_tokens)

    def _usual_s(self, depth: int, num_rows: int) -> float:
        return self.of(num_rows).levels_s(depth, num_rows) + self._lookups.at(num_rows)

    def is_plain_in_doubt(self, num_rows: int) -> bool:
        """Whether what a plain round of so many rows costs may have changed since there was one."""
        return self._target.is_in_doubt(num_rows)

    def age(self) -> None:
        """Let the next rounds count more where nothing was learnt since the last call."""
        for curve in (self._target, self._draft, self._levels, self._lookups):
            curve.age()

    def of(self, num_known: int, num_decoding: int | None = None) -> RoundCosts:
        """Return the costs of the rounds that feed *num_known* known tokens.

        Args:
            num_known: prompt chunks included.
            num_decoding: those of rows that decode; None: all.
        """
        decoding = num_known if num_decoding is None else num_decoding
        # Room is left for draft tokens: sizes above the largest all cost the same.
        known = min(num_known, max(decoding, self._max_tokens - decoding * self._max_depth))
        prefill_s = max(0.0, self._target.at(known) - self._target.at(decoding))
        curves = (self._target, self._draft, self._levels, self._lookups)
        return RoundCosts(*curves, known, prefill_s, self._prompts.token_s)


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
