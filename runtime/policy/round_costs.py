"""What rounds cost, as the adaptive policy compares and learns it."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from protos.draft import PREDICTION
from protos.messages import StepCosts
from runtime.core.sequence import Sequence
from runtime.policy.acceptance import NOT_ASKED, WORKER_ALONE, Asked, Sources
from runtime.policy.base import FinishedStep
from runtime.policy.cost_model import CostCurve, RoundCosts, UsualPrompts

FREE = {1: 0.0}
FIRST_LEVEL = 2.0
"""What the first level of a draft is taken to cost, in units of a further one: it reads what was accepted last, and the
messages of the round are part of it."""
AGED, AGED_OFF = 0.8, 0.25
"""Share of earlier rounds that counts on for sizes that were not run, when others are tried: while it is on, off."""
ENDED_KEPT = 1 - 1 / 128
"""Weight of requests that ended earlier in how long prompts and answers usually are."""
LONGEST_CATCH_UP = 64
"""Rounds that a draft catches up for at most: rows without a draft after that have none for another reason."""
DRAFTED_KEPT = 0.9
"""Weight of what was read earlier in what drafting spends on a token."""
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


class EndedRequests:
    """How long prompts and answers of requests are that ended. Of running ones it is not known."""

    def __init__(self) -> None:
        self._running: dict[int, Sequence] = {}
        self._number = self._num_prompts = self._num_answered = 0.0  # requests, their prompt tokens and answers' tokens

    @property
    def prompts(self) -> UsualPrompts:
        """Their prompts; none if no request ended yet."""
        return UsualPrompts(
            self._num_prompts / max(1.0, self._number), self._num_prompts / max(1.0, self._num_answered)
        )

    def update(self, running: Seq[Sequence]) -> None:
        """Count those that ended since the last call. Requests that came since, and ended, too, are left out."""
        now = {one.key: one for one in running}
        for key in self._running.keys() - now.keys():
            one = self._running[key]
            length = len(one.request.prompt_token_ids)
            self._number = ENDED_KEPT * self._number + 1
            self._num_prompts = ENDED_KEPT * self._num_prompts + length - (one.num_cached_tokens or 0)
            self._num_answered = ENDED_KEPT * self._num_answered + len(one.token_ids) - length
        self._running = now


class CatchUp:
    """What drafting spends on tokens that the draft has not read: prompts, and what came while it did not draft."""

    def __init__(self) -> None:
        self._seconds = self._num_read = 0.0  # of all tokens read
        self._read: dict[int, int] = {}  # tokens of each sequence when drafts ended, by its key
        self._num_lacking = 0  # when drafts began in this round, else 0
        self._is_unread = self._is_counted = False  # after the last round; whether `_num_read` has what is unread
        self._num_rounds_left = LONGEST_CATCH_UP

    @property
    def is_pending(self) -> bool:
        """Whether a draft may read in this round: prompts that the target read in the one before, or what it lacked."""
        return self._is_unread or self._num_lacking > 0

    @property
    def may_go_on(self) -> bool:
        """Whether it is believed that rows without a draft lack one because it catches up."""
        return self._num_rounds_left > 0

    def read_s(self, num_tokens: int) -> float:
        """Return the seconds for so many tokens."""
        return num_tokens * self._seconds / max(1.0, self._num_read)

    def needed_s(self, running: Seq[Sequence]) -> float:
        """Return the seconds for all tokens of *running* that the draft lacks while there are no drafts."""
        return self.read_s(self._lacking(running))

    def _lacking(self, running: Seq[Sequence]) -> int:
        """Return how many tokens the draft has not read. Of prefixes in the cache it mostly has entries, too."""
        return sum([len(one.token_ids) - self._read.get(one.key, one.num_cached_tokens or 0) for one in running])

    def begin(self, running: Seq[Sequence], *, drafted: bool, drafts: bool) -> None:
        """Begin a round after one in which there were drafts or not."""
        if drafted and not drafts:
            self._read = {one.key: len(one.token_ids) for one in running}
        self._num_lacking = self._lacking(running) if drafts and not drafted else 0

    def count(self, num_prompts: int, *, goes_on: bool) -> None:
        """Count the tokens of prompts that a round read; *goes_on* if a row has no draft yet."""
        is_new = num_prompts > 0 or self._num_lacking > 0
        self._num_rounds_left = max(0, self._num_rounds_left - 1) if goes_on and not is_new else LONGEST_CATCH_UP
        self._is_unread = is_new or (goes_on and self.may_go_on)
        self._is_counted = is_new or (goes_on and self._is_counted)

    def observe(self, num_prompts: int, seconds: float) -> None:
        """Learn from a round with drafts that read prompts, or from one after: drafting spent *seconds* on any.

        Nothing is learnt of prompts that the target took from its prefix cache and the draft had to read.
        """
        num_read = num_prompts + self._num_lacking
        if not (num_read or self._is_counted):
            return
        kept = DRAFTED_KEPT if num_read else 1.0
        self._num_read = kept * self._num_read + num_read
        self._seconds = kept * self._seconds + seconds


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
        self.catch_up, self.ended = CatchUp(), EndedRequests()
        self._lookups = CostCurve({} if sources.predicts else FREE, max_rows)
        self.revise(StepCosts({}) if costs is None else costs)
        levels = {depth: FIRST_LEVEL - 1 + depth for depth in range(1, max_depth + 1)}
        self._levels = CostCurve(levels, max_depth, has_ratios=True)

    def revise(self, costs: StepCosts) -> None:
        """Begin with new measured costs, without corrections. What further levels cost relative to one stays."""
        self._target = CostCurve(costs.target_s, self._max_tokens)
        self._draft = CostCurve(costs.draft_s if self._sources.has_worker else FREE, self._max_rows)

    def learn(
        self,
        step: FinishedStep,
        asked: Mapping[int, Asked],
        *,
        catches_up: bool,
        deciding_s: float = 0.0,
        num_rounds: int = 1,
    ) -> None:
        """Correct the curves by a step: see `observe`, and `describe` for what was *asked* for and *deciding_s*."""
        done = describe(step, asked, self._sources.worker, deciding_s)
        self.observe(done, catches_up=catches_up, num_rounds=num_rounds)

    def observe(self, done: Round, *, catches_up: bool = False, num_rounds: int = 1) -> None:
        """Correct the curves by a round, unless there are prompts in it; that of drafts unless the draft *catches_up*.

        It is the median of *num_rounds* alike.
        """
        if not done.decodes:
            return
        if not (catches_up or self.catch_up.is_pending):
            self._observe_drafting(done, num_rounds)
        self._target.observe(done.num_known + done.num_scored, done.seconds - done.draft_s, num_rounds)

    def _observe_drafting(self, done: Round, num_rounds: int) -> None:
        levels_s = done.draft_s - done.lookup_s
        if done.depth and not (done.got_none and self._was_not_waited_for(done, levels_s)):
            self._draft.observe(done.num_drafting, levels_s / self._levels.at(done.depth), num_rounds)
            self._levels.observe(done.depth, levels_s / self._draft.at(done.num_drafting), num_rounds)
        if done.num_looked:
            self._lookups.observe(done.num_looked, done.lookup_s, num_rounds)

    def _was_not_waited_for(self, done: Round, levels_s: float) -> bool:
        """Whether target rank 0 went on without a late draft: such a round does not show what drafts cost."""
        return levels_s < NOT_WAITED * self._levels.at(done.depth) * self._draft.at(done.num_drafting)

    def slots_catching_up(self, step: FinishedStep, depth: int) -> set[int]:
        """Return the slots without a draft because it catches up, before `observe_catch_up`."""
        return without_draft(step) if self.catches_up(step, depth) else set()

    def catching_up_s(self, step: FinishedStep, depth: int) -> float:
        """Return the seconds for tokens that the draft had not read, before `observe_catch_up`."""
        return max(0.0, step.draft_s - self._usual_s(step, depth)) if self.catches_up(step, depth) else 0.0

    def catches_up(self, step: FinishedStep, depth: int) -> bool:
        """Whether the draft caught up in a step with drafts of *depth* levels, before `observe_catch_up`."""
        if not depth or self.catch_up.is_pending or step.num_prompt_tokens:
            return depth > 0
        return self.catch_up.may_go_on and self._goes_on(step, depth)

    def observe_catch_up(self, step: FinishedStep, depth: int) -> None:
        """Learn from a step with drafts of *depth* levels what catching up takes, after `observe`."""
        num_prompts, goes_on = step.num_prompt_tokens, depth > 0 and self._goes_on(step, depth)
        if depth and (num_prompts or goes_on or self.catch_up.is_pending):
            self.catch_up.observe(num_prompts, self.catching_up_s(step, depth))
        self.catch_up.count(num_prompts, goes_on=goes_on)

    def _goes_on(self, step: FinishedStep, depth: int) -> bool:
        """Whether a row has no draft, and not because target rank 0 did not wait for it."""
        if not without_draft(step):
            return False
        return self.catch_up.is_pending or step.draft_s >= NOT_WAITED * self._usual_s(step, depth)

    def _usual_s(self, step: FinishedStep, depth: int) -> float:
        """Return the seconds of drafts of *depth* levels for the rows that may have one."""
        num_rows = sum([row.k > 0 for row in step.plan.rows])
        return self.of(num_rows).levels_s(depth, num_rows) + self._lookups.at(num_rows) if num_rows else 0.0

    def is_plain_in_doubt(self, num_rows: int) -> bool:
        """Whether what a plain round of so many rows costs may have changed since there was one."""
        return self._target.is_in_doubt(num_rows)

    def age(self, *, is_on: bool) -> None:
        """Let the next rounds count more where nothing was learnt since the last call: see `CostCurve.age`.

        Drafts are tried next: another number than usual if speculation *is_on*.
        """
        kept = AGED if is_on else AGED_OFF
        for curve in (self._target, self._draft, self._levels, self._lookups):
            curve.age(kept)

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
        prompts = self.ended.prompts
        return RoundCosts(*curves, known, prefill_s, prompts.ratio * self.catch_up.read_s(1), prompts)


def without_draft(step: FinishedStep) -> set[int]:
    """Return the slots of rows for which the draft worker was asked and drafted nothing: it catches up, or is late."""
    asked = {row.slot for row in step.plan.rows if row.k}
    return {verdict.slot for verdict in step.verdicts if not verdict.proposed and verdict.slot in asked}


def describe(step: FinishedStep, asked: Mapping[int, Asked], worker: int, deciding_s: float) -> Round:
    """Describe a step by what was asked for.

    Args:
        step: finished.
        asked: what rows were asked for, by slot.
        worker: the source that is the draft worker.
        deciding_s: of its seconds, those that a policy spent.
    """
    rows = step.plan.rows
    by_worker = {row.slot for row in rows if row.source == worker}
    k_SR = [asked.get(row.slot, NOT_ASKED).k_S for row in rows]
    wanted = [k_S[worker] for row, k_S in zip(rows, k_SR, strict=True) if row.slot in by_worker and any(k_S[worker:])]
    return Round(
        num_known=step.num_known,
        num_scored=sum([verdict.proposed for verdict in step.verdicts]),
        num_drafting=len(wanted),
        depth=max(wanted, default=0),
        num_tokens=step.num_tokens,
        draft_s=step.draft_s,
        seconds=step.seconds - deciding_s,
        decodes=step.plan.decodes,
        num_looked=sum([any(k_S[PREDICTION + 1 : worker]) for k_S in k_SR]),
        lookup_s=step.lookup_s,
        got_none=bool(wanted) and not any(one.proposed for one in step.verdicts if one.slot in by_worker),
    )
