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

from protos.messages import StepCosts, Verdict
from runtime.core.sequence import Sequence
from runtime.policy.acceptance import RequestAcceptance
from runtime.policy.base import FinishedStep
from runtime.policy.choosers import Chooser, DecodingRow
from runtime.policy.round_costs import Round, RoundCostModel
from runtime.policy.switching import MOST_LOST, SMOOTHING, TRIAL_ROUNDS, WARMING_ROUNDS, Switch, Trials

logger = logging.getLogger(__name__)

TRIAL_TOKENS = 2
"""Draft tokens of a row in a trial."""
FIRST_ROUNDS, FIRST_PLAIN = 48, 6
"""So many first rounds decide nothing: the very first take longer than later ones. The last of them are plain."""
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
        may_branch: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._limit = limit
        self._clock = clock
        self._may_branch = may_branch
        self._chooser = chooser
        self._costs = costs
        self._switch = Switch()
        self._trials = Trials()
        self._requests: dict[int, RequestAcceptance] = {}  # by the sequence's key
        self._by_slot: dict[int, tuple[int, RequestAcceptance]] = {}  # of this round: draft tokens asked for
        self._chosen: dict[int, int] = {}  # draft tokens in this round, by the sequence's key
        self._typical = limit  # for sequences that came after the last decision
        self._num_first = FIRST_ROUNDS  # rounds before the first decision
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
        return max(self._chosen.values(), default=self._typical)

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
        self._is_resting = self._keep_for > 0 and not (self._switch.is_on or self._trials.is_running)
        if self._is_resting:
            self._keep()
            self._num_drafting = 0
            return
        decoding = [sequence for sequence in running if sequence.is_decoding]
        if not decoding:
            self._chosen, self._by_slot, self._typical = {}, {}, self._limit if self._switch.is_on else 0
            return
        self._forget_ended(running)
        rows = {sequence.key: self._row(sequence) for sequence in decoding}
        self._choose(rows, sum([sequence.num_uncomputed for sequence in running]))
        self._by_slot = {one.slot: (self._asked(one, rows[one.key]), rows[one.key].acceptance) for one in decoding}
        self._num_drafting = self._num_drafting + 1 if self.current else 0

    def _keep(self) -> None:
        self._keep_for -= 1
        self._num_kept += 1

    def _asked(self, sequence: Sequence, row: DecodingRow) -> int:
        return min(row.limit, self._chosen.get(sequence.key, self._typical))

    def _row(self, sequence: Sequence) -> DecodingRow:
        limit = sequence.most_drafts(self._limit, may_branch=self._may_branch)
        acceptance = self._requests.get(sequence.key)
        if acceptance is None:
            acceptance = self._requests[sequence.key] = RequestAcceptance()
        return DecodingRow(limit, acceptance)

    def _forget_ended(self, running: Seq[Sequence]) -> None:
        if len(self._requests) > 2 * len(running) + 64:
            self._requests = {one.key: self._requests[one.key] for one in running if one.key in self._requests}

    def _choose(self, rows: dict[int, DecodingRow], num_known: int) -> None:
        if self._num_first > 0:
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
        self._num_first -= 1
        self._num_kept += 1
        if self._num_first < FIRST_PLAIN:
            self._use_everywhere(0, rows)
            return
        k_R = self._chooser.choose(list(rows.values()), self._costs.of(num_known)).k_R.tolist()
        if any(k_R):
            self._use(k_R, rows)
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
        more_s = costs.uniform(k, num_rows) - costs.uniform(self._typical, num_rows)
        return k if self._trials.pay(max(0.0, more_s)) else None

    def _use_everywhere(self, k: int, rows: dict[int, DecodingRow]) -> None:
        self._chosen, self._typical = {key: min(k, row.limit) for key, row in rows.items()}, k
        self._keep_for = 0

    def _use(self, k_R: list[int], rows: dict[int, DecodingRow]) -> None:
        self._chosen, self._typical = dict(zip(rows, k_R, strict=True)), round(sum(k_R) / len(rows))

    def _decide(self, rows: dict[int, DecodingRow], num_known: int) -> None:
        began = self._clock()
        best = self._chooser.choose(list(rows.values()), self._costs.of(num_known))
        self._update_switch(best.gain, len(rows))
        self._use(best.k_R.tolist() if self._switch.is_on else [0] * len(rows), rows)
        if self._round_s:
            took_s = self._clock() - began
            self._keep_for = min(KEEP_AT_MOST, int(took_s / (DECIDING_SHARE * self._round_s)))

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

    def num_draft_tokens(self, sequence: Sequence) -> int:
        """See `Policy`."""
        return sequence.most_drafts(self._chosen.get(sequence.key, self._typical), may_branch=self._may_branch)

    def end_step(self, step: FinishedStep) -> None:
        """See `Policy`."""
        self._round_s += (step.seconds - self._round_s) * (SMOOTHING if self._round_s else 1.0)
        lost_s = 0.0 if self._is_resting and self._num_kept % LEARN_EVERY else self._learn(step)
        if self._trials.end_round(step.seconds, lost_s):
            self._keep_for = 0

    def revise(self, costs: StepCosts) -> None:
        """See `Policy`. The next round is decided anew."""
        self._costs.revise(costs)
        self._keep_for = 0

    def _learn(self, step: FinishedStep) -> float:
        """Learn acceptance and costs; return the seconds that the step lost against plain decoding."""
        done = self._describe(step)
        if not 1 <= self._num_drafting <= WARMING_ROUNDS:
            self._record(step.verdicts)
            self._costs.observe(done)
        plain_s = self._costs.of(done.num_known).plain()
        lost_s = step.seconds - plain_s * step.num_tokens / max(1, len(step.plan.rows))
        return min(lost_s, MOST_LOST * plain_s)

    def _record(self, verdicts: Seq[Verdict]) -> None:
        for verdict in verdicts if not self._is_resting else ():
            asked, acceptance = self._by_slot.get(verdict.slot) or (verdict.proposed, RequestAcceptance())
            if asked:
                self._chooser.record(verdict, acceptance, asked)

    def _describe(self, step: FinishedStep) -> Round:
        rows = step.plan.rows
        wanted = [asked for asked, _ in self._by_slot.values() if asked]
        return Round(
            num_known=sum([row.length for row in rows]),
            num_scored=sum([verdict.proposed for verdict in step.verdicts]),
            num_drafting=len(wanted),
            depth=max(wanted, default=0),
            num_tokens=step.num_tokens,
            draft_s=step.draft_s,
            seconds=step.seconds,
            decodes=step.plan.decodes,
        )
