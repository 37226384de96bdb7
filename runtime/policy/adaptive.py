"""The adaptive policy: each round, as many draft tokens for each row as pay, none included.

It predicts tokens per second from the costs of rounds (`runtime.policy.cost_model`) and from measured acceptance
(`runtime.policy.acceptance`, `runtime.policy.sizes`). Every round updates both, for use from the next round on. While
speculation is off, it is tried now and then (`runtime.policy.switching`). While it is on, a round now and then has
another K, 0 included, so that the costs of those stay known.
"""

import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

from protos.draft import PREDICTION
from protos.messages import StepCosts
from runtime.core.sequence import Sequence
from runtime.policy.acceptance import WORKER_ALONE, RequestAcceptance, Sources
from runtime.policy.allocation import RoundCosts
from runtime.policy.base import FinishedStep
from runtime.policy.choosers import Chooser, DecodingRow
from runtime.policy.cost_model import Ints
from runtime.policy.round_costs import Round, RoundCostModel
from runtime.policy.switching import SMOOTHING, TRIAL_ROUNDS, WARMING_ROUNDS, FirstRounds, Switch, Trials

logger = logging.getLogger(__name__)

DraftTokens = tuple[int, ...]
"""Most draft tokens of a row from each source."""
NOT_ASKED: tuple[DraftTokens, DecodingRow] = (), DecodingRow((), ())

TRIAL_TOKENS = 2
"""Draft tokens of a row in a trial."""
EXPLORE_EVERY = 100
"""While speculation is on, one round of so many has a random K for all rows, or is plain, if that costs little."""
DECIDING_SHARE, KEEP_AT_MOST = 0.005, 32
"""Share of the time for deciding: where it would be more, a decision is kept for several rounds, at most so many."""
LEARN_EVERY = 4
"""While a decision not to draft is kept, the costs of one round of so many are learnt."""


class AdaptivePolicy:
    """Chooses the number of draft tokens of every row in every round.

    Args:
        limit: most draft tokens of a row.
        may_branch: whether drafts may be trees.
        sources: of drafts.
        chooser: measures acceptance, and chooses by it.
        costs: of rounds.
        clock: seconds, to time decisions.
    """

    least_survival = 0.0

    def __init__(
        self,
        limit: int,
        chooser: Chooser,
        costs: RoundCostModel,
        *,
        sources: Sources = WORKER_ALONE,
        may_branch: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._limit = limit
        self._clock = clock
        self._sources = sources
        self._may_branch = may_branch
        self._chooser = chooser
        self._costs = costs
        self._switch = Switch()
        self._trials = Trials(limit)
        self._requests: dict[int, tuple[RequestAcceptance, ...]] = {}  # of each source, by the sequence's key
        self._by_slot: dict[int, tuple[DraftTokens, DecodingRow]] = {}  # of this round, and what was asked for
        self._chosen: dict[int, DraftTokens] = {}  # in this round, by the sequence's key
        self._typical = self._uniform(limit)  # for sequences that came after the last decision
        self._first = FirstRounds(limit)
        self._keep_for = 0  # rounds for which the last decision is kept
        self._num_kept = 0  # rounds since the last decision
        self._num_drafting = 0  # rounds in a row with draft tokens
        self._is_resting = False  # the last decision is kept in this round: no draft tokens
        self._until_exploring = EXPLORE_EVERY
        self._random = random.Random(0)
        self._round_s = 0.0

    @property
    def limit(self) -> int:
        """The largest K there can be."""
        return self._limit

    @property
    def current(self) -> int:
        """The largest K of this round."""
        return max(map(max, self._chosen.values()), default=max(self._typical))

    @property
    def changes(self) -> Counter[str]:
        """Changes between on and off, by reason."""
        return self._switch.changes

    @property
    def predicted_speedup(self) -> float:
        """Tokens per second relative to plain decoding, smoothed over rounds; 1 where no draft token pays."""
        return self._switch.gain

    def begin_step(self, running: Seq[Sequence]) -> None:
        """See `Policy`."""
        if self._keep_for and self._sources.predicts and any(map(self._is_newly_predicted, running)):
            self._keep_for = 0
        self._is_resting = self._keep_for > 0 and not (self.current or self._switch.is_on or self._trials.is_running)
        if self._is_resting:
            self._keep()
            self._num_drafting = 0
            return
        decoding = [sequence for sequence in running if sequence.is_decoding]
        if not decoding:
            self._chosen, self._by_slot = {}, {}
            self._typical = self._uniform(self._limit if self._switch.is_on else 0)
            return
        self._forget_ended(running)
        rows = {sequence.key: self._row(sequence) for sequence in decoding}
        self._choose(rows, sum([sequence.num_uncomputed for sequence in running]))
        self._by_slot = {one.slot: (self._asked(one, rows[one.key]), rows[one.key]) for one in decoding}
        self._num_drafting = self._num_drafting + 1 if self.current else 0

    def _is_newly_predicted(self, sequence: Sequence) -> bool:
        """Whether nothing was decided yet for a request with a prediction."""
        return bool(sequence.request.prediction_token_ids) and sequence.is_decoding and sequence.key not in self._chosen

    def _keep(self) -> None:
        self._keep_for -= 1
        self._num_kept += 1

    def _asked(self, sequence: Sequence, row: DecodingRow) -> DraftTokens:
        return tuple(map(min, row.limits, self._chosen.get(sequence.key, self._typical)))

    def _row(self, sequence: Sequence) -> DecodingRow:
        limit, sources = sequence.most_drafts(self._limit, may_branch=self._may_branch), self._sources
        limits = tuple([limit * sources.may_draft(source, sequence.request) for source in range(len(sources))])
        acceptances = self._requests.get(sequence.key)
        if acceptances is None:
            acceptances = self._requests[sequence.key] = tuple([RequestAcceptance() for _ in limits])
        return DecodingRow(limits, acceptances)

    def _uniform(self, k: int) -> DraftTokens:
        return (k,) * len(self._sources)

    def _forget_ended(self, running: Seq[Sequence]) -> None:
        if len(self._requests) > 2 * len(running) + 64:
            self._requests = {one.key: self._requests[one.key] for one in running if one.key in self._requests}

    def _choose(self, rows: dict[int, DecodingRow], num_known: int) -> None:
        if not self._first.are_over:
            self._use_first(rows, num_known)
        elif self._trials.is_running:
            self._use_everywhere(TRIAL_TOKENS, rows)
        elif (k := self._explored(len(rows), num_known)) is not None:
            self._use_everywhere(k, rows)
        elif self._keep_for > 0:
            self._keep()
        else:
            self._decide(rows, num_known)
            if not self._switch.is_on and self._starts_trial(len(rows), num_known):
                self._use_everywhere(TRIAL_TOKENS, rows)

    def _use_first(self, rows: dict[int, DecodingRow], num_known: int) -> None:
        """Draft in the first rounds, whether it seems to pay or not."""
        self._num_kept += 1
        if not self._first.start():
            self._use_everywhere(0, rows)
            return
        k_RS = self._chooser.choose(list(rows.values()), self._costs.of(num_known)).k_RS
        if k_RS.any():
            self._use(k_RS, rows)
        else:
            self._use_everywhere(TRIAL_TOKENS, rows)

    def _explored(self, num_rows: int, num_known: int) -> int | None:
        """Return the number of draft tokens to try in this round: None in most rounds, and where it costs too much."""
        self._until_exploring -= 1
        if not self._switch.is_on or self._until_exploring > 0:
            return None
        self._until_exploring = EXPLORE_EVERY
        self._costs.age()
        k = self._random.choice((0, self._random.randint(1, self._limit)))
        costs = self._costs.of(num_known)
        more_s = costs.uniform(k, num_rows) - costs.uniform(max(self._typical), num_rows)
        return k if self._trials.pay(max(0.0, more_s)) else None

    def _use_everywhere(self, k: int, rows: dict[int, DecodingRow]) -> None:
        self._chosen = {key: tuple([min(k, limit) for limit in row.limits]) for key, row in rows.items()}
        self._typical = self._uniform(k)
        self._keep_for = 0

    def _use(self, k_RS: Ints, rows: dict[int, DecodingRow]) -> None:
        self._chosen = dict(zip(rows, map(tuple, k_RS.tolist()), strict=True))
        self._typical = tuple(k_RS.mean(axis=0).round().astype(int).tolist())

    def _decide(self, rows: dict[int, DecodingRow], num_known: int) -> None:
        began = self._clock()
        costs = self._costs.of(num_known)
        best = self._chooser.choose(list(rows.values()), costs)
        self._update_switch(best.gain, len(rows))
        self._use(best.k_RS if self._switch.is_on else self._predicted_alone(rows, costs), rows)
        if self._round_s:
            took_s = self._clock() - began
            self._keep_for = min(KEEP_AT_MOST, int(took_s / (DECIDING_SHARE * self._round_s)))

    def _predicted_alone(self, rows: dict[int, DecodingRow], costs: RoundCosts) -> Ints:
        """Return the draft tokens of all rows and sources while speculation is off, `[R, S]`: of predictions only."""
        predicted = [row.only(PREDICTION) for row in rows.values()] if self._sources.predicts else []
        if any(any(row.limits) for row in predicted):
            return self._chooser.choose(predicted, costs).k_RS
        return np.zeros((len(rows), len(self._sources)), np.int64)

    def _update_switch(self, gain: float, num_rows: int) -> None:
        num_rounds, self._num_kept = 1 + self._num_kept, 0
        if self._switch.update(gain, num_rounds):
            state = "on again" if self._switch.is_on else "off"
            logger.info(
                "speculation is %s: %d rows decode, %s, predicted speed-up %.2f",
                state,
                num_rows,
                self._chooser.describe(),
                self.predicted_speedup,
            )

    def _starts_trial(self, num_rows: int, num_known: int) -> bool:
        costs = self._costs.of(num_known)
        lost_s = costs.uniform(TRIAL_TOKENS, num_rows) - costs.plain()
        if not self._trials.start_if_due(TRIAL_ROUNDS * max(0.0, lost_s)):
            return False
        # What is known of drafts is old. If the next trials show something else, they must not be outweighed.
        self._chooser.age()
        self._costs.age()
        return True

    def num_draft_tokens(self, sequence: Sequence, source: int | None = None) -> int:
        """See `Policy`."""
        chosen = self._chosen.get(sequence.key, self._typical)
        k = max(chosen) if source is None else chosen[source]
        return sequence.most_drafts(k, may_branch=self._may_branch)

    def end_step(self, step: FinishedStep) -> None:
        """See `Policy`."""
        self._round_s += (step.seconds - self._round_s) * (SMOOTHING if self._round_s else 1.0)
        if self._is_resting and self._num_kept % LEARN_EVERY:
            self._trials.end_round(step.seconds)
            return
        plain_s = self._learn(step)
        lost_s = step.seconds - plain_s * step.num_tokens / max(1, len(step.plan.rows))
        self._first.end_round(lost_s, plain_s)
        if self._trials.end_round(step.seconds, lost_s, plain_s):
            self._keep_for = 0

    def revise(self, costs: StepCosts) -> None:
        """See `Policy`. The next round is decided anew."""
        self._costs.revise(costs)
        self._keep_for = 0

    def _learn(self, step: FinishedStep) -> float:
        """Learn acceptance and costs; return the seconds of a plain step of the same rows."""
        done = self._describe(step)
        if not 1 <= self._num_drafting <= WARMING_ROUNDS:
            self._record(step)
            self._costs.observe(done)
        return self._costs.of(done.num_known).plain()

    def _record(self, step: FinishedStep) -> None:
        """Learn acceptance. Of rows that began in this step, nothing is: they may have been asked for other drafts."""
        sources = {row.slot: row.source for row in step.plan.rows}
        for verdict in step.verdicts if not self._is_resting else ():
            asked, row = self._by_slot.get(verdict.slot, NOT_ASKED)
            if any(asked):
                self._chooser.record(verdict, row, asked, sources[verdict.slot])

    def _describe(self, step: FinishedStep) -> Round:
        rows, worker = step.plan.rows, self._sources.worker
        by_worker = {row.slot for row in rows if row.source == worker}
        asked = {row.slot: self._by_slot.get(row.slot, NOT_ASKED)[0] for row in rows}
        wanted = [asked[slot][worker] for slot in by_worker if len(asked[slot]) > worker and asked[slot][worker]]
        return Round(
            num_known=sum([row.length for row in rows]),
            num_scored=sum([verdict.proposed for verdict in step.verdicts]),
            num_drafting=len(wanted),
            depth=max(wanted, default=0),
            num_tokens=step.num_tokens,
            draft_s=step.draft_s,
            seconds=step.seconds,
            decodes=step.plan.decodes,
            num_looked=sum([any(one[PREDICTION + 1 : worker]) for one in asked.values()]),
            lookup_s=step.lookup_s,
            got_none=bool(wanted) and not any(one.proposed for one in step.verdicts if one.slot in by_worker),
        )
