"""The adaptive policy: each round, as many draft tokens for each row as pay, none included.

It predicts tokens per second from costs of rounds (`cost_model`) and from measured acceptance (`acceptance`, `sizes`).
Rounds correct both, and what was predicted from them (`allocation`). While speculation is off, it is tried now and then
(`switching`); while it is on, a round has another K now and then, 0 included, to know what that costs (`exploration`).
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from protos.messages import StepCosts
from runtime.core.sequence import Sequence
from runtime.policy.acceptance import WORKER_ALONE, Asked, DecodingRow, DecodingRows, Sources
from runtime.policy.allocation import Calibration
from runtime.policy.base import FinishedStep
from runtime.policy.choosers import Chooser, Chosen, chosen_of_predictions, record
from runtime.policy.exploration import Exploration, Hindsight, LookUp, loss, lost_in, num_explored
from runtime.policy.pacing import DECIDING, LEARNING, IdleRounds, Pace, RoundKind, RunningLoad, Starting, Warming
from runtime.policy.round_costs import RoundCostModel
from runtime.policy.switching import SMOOTHING, TRIAL_TOKENS, FirstRounds, Resuming, Switch, Trials


class AdaptivePolicy:
    """Chooses the number of draft tokens of every row in every round.

    Args:
        limit: most draft tokens of a row.
        may_branch: whether drafts may be trees.
        look_up: looks up drafts in the controller process; None if no source does.
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
        look_up: LookUp | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.limit, self._chosen = limit, Chosen(limit, len(sources))
        self._chooser, self._costs, self._may_branch, self._clock = chooser, costs, may_branch, clock
        self._switch, self._resuming, self._calibration = Switch(), Resuming(), Calibration()
        self.changes = self._switch.changes
        self._trials, self._exploration = Trials(limit), Exploration(chooser.sizes)
        self._rows = DecodingRows(limit, sources, may_branch=may_branch)
        self._by_slot: dict[int, Asked] = {}  # of this round, and of idle ones after it
        self._first, self._deciding, self._learning = FirstRounds(limit), Pace(), Pace()
        self._hindsight = Hindsight(look_up, limit, chooser, self._rows, clock)
        self._idle = IdleRounds(self._deciding, self._learning, predicts=sources.predicts)
        self._num_kept, self._decided = 0, RunningLoad()  # rounds since the last decision, and what it was for
        self._starting, self._warming, self._kind = Starting(), Warming(), RoundKind.FIRST
        # Seconds that switching on would take, those of a round, smoothed, and those spent on this one.
        self._catch_up_s = self._round_s = self._begin_s = self._decide_s = 0.0

    @property
    def current(self) -> int:
        """The largest K of this round."""
        return self._chosen.largest

    @property
    def predicted_speedup(self) -> float:
        """Tokens per second relative to plain decoding, smoothed over rounds; 1 where no draft token pays."""
        return self._switch.gain

    @property
    def stays_plain(self) -> bool:
        """See `Policy`."""
        return not self.current and self._kind.stays(self._next_kind(), is_idle=self._idle.goes_on_later)

    @property
    def _learns(self) -> bool:
        """Whether acceptance and costs are learnt of this round."""
        return self._kind.tries or self._learning.is_due

    def begin_step(self, running: Seq[Sequence]) -> None:
        """See `Policy`."""
        self._starting.begin(running)
        if self._hindsight.look_if_due(running, self._chosen, self._round_s):
            self._deciding.hasten(self._round_s, DECIDING[False])
            self._idle.stop()
        if self._idle.goes_on(running):
            self._kind = RoundKind.IDLE
            return
        began = self._clock()
        self._end_idle(running)
        self._kind, had_drafts = self._next_kind(), self.current > 0
        self._decide_s, self._by_slot = 0.0, {}
        is_kept = self._kind is RoundKind.KEPT
        if not is_kept or (self._learns and self.current):
            self._begin(running)
        self._deciding.skip(int(is_kept))
        self._num_kept += is_kept
        self._warming.count(drafts=self.current > 0)
        self._costs.catch_up.begin(running, drafted=had_drafts, drafts=self.current > 0)
        self._begin_s = self._clock() - began

    def _next_kind(self) -> RoundKind:
        """Return what the next round is, unless it is idle."""
        if not self._first.are_over:
            return RoundKind.FIRST
        if self._trials.is_running:
            return RoundKind.TRIAL
        if self._exploration.is_due:
            return RoundKind.EXPLORE
        return RoundKind.DECIDE if self._deciding.is_due else RoundKind.KEPT

    def _end_idle(self, running: Seq[Sequence]) -> None:
        """Count the idle rounds before this one of *running*. It is decided anew if these are others."""
        idle, is_on = self._idle, self._switch.is_on
        self._num_kept += idle.num_rounds
        self._warming.count(drafts=self.current > 0, num_rounds=idle.num_rounds)
        self._exploration.count(1 + idle.num_rounds, is_on=is_on and self._first.are_over)
        self._calibration.end_idle(idle.num_rows, idle.rounds, is_on=is_on)
        self._learn_idle(idle)
        self._trials.add(idle.num_rounds, idle.seconds)
        if idle.is_renewed or self._decided.is_other(running) or self._rows.are_newly_predicted(running, self._chosen):
            self._deciding.advance()
        idle.end(running)

    def _learn_idle(self, idle: IdleRounds) -> None:
        """Learn of idle rounds, and what they cost by a typical one."""
        for step in idle.learnt if self._by_slot else ():
            record(self._chooser, step, self._by_slot, self._costs.slots_catching_up(step, self.current))
        if (typical := idle.typical) is not None:
            catching_up = self._costs.slots_catching_up(typical, self.current)
            self._costs.learn(typical, self._by_slot, catches_up=bool(catching_up), num_rounds=len(idle.last))
            self._learning.wait(LEARNING[self.current == 0].rounds)

    def _begin(self, running: Seq[Sequence]) -> None:
        """Decide, unless the last decision is kept, and note what was asked for, where something is learnt from it."""
        rows = self._rows.of(running)
        if not rows:
            self._use_everywhere(self.limit if self._switch.is_on else 0)
            return
        if self._kind is not RoundKind.KEPT:
            if not self._switch.is_on and self._decided.is_renewed(running):
                self._calibration.clear()  # it was of other text
                self._switch.renew()
            self._decided = RunningLoad.of(running)
            self._catch_up_s = 0.0 if self.current or self._exploration.paid else self._costs.catch_up.needed_s(running)
            self._costs.ended.update(running)
            self._choose(rows, sum([sequence.num_uncomputed for sequence in running]))
        if self.current:
            self._by_slot = self._chosen.asked(running, rows)

    def _choose(self, rows: dict[int, DecodingRow], num_known: int) -> None:
        if self._kind is RoundKind.FIRST:
            self._use_first(rows, num_known)
        elif self._kind is RoundKind.TRIAL:
            self._use_everywhere(TRIAL_TOKENS)
        elif self._kind is RoundKind.EXPLORE and (k := self._explored(len(rows), num_known)) is not None:
            self._use_everywhere(k)
            self._deciding.wait(num_explored(k))
        else:
            self._decide(rows, num_known)
            if not self._switch.is_on:
                self._start_trial_if_due(len(rows), num_known)

    def _use_first(self, rows: dict[int, DecodingRow], num_known: int) -> None:
        """Draft in the first rounds, whether it seems to pay or not."""
        self._num_kept += 1
        if not self._first.start():
            self._use_everywhere(0)
        elif (k_RS := self._chooser.choose(list(rows.values()), self._costs.of(num_known, len(rows))).k_RS).any():
            self._chosen.use(k_RS, rows)
        else:
            self._use_everywhere(TRIAL_TOKENS)

    def _explored(self, num_rows: int, num_known: int) -> int | None:
        """Return the number of draft tokens to try in this round; None where it costs too much."""
        usual, costs, gain = max(self._chosen.typical), self._costs.of(num_known, num_rows), self._switch.gain
        token_each_s, usual_s = self._costs.catch_up.read_s(num_rows), self._calibration.usual_s
        k = self._exploration.choose(usual, gain)
        each_s = loss(k, usual, num_rows, costs, gain=gain, catch_up_s=token_each_s, usual_s=usual_s)
        if not self._trials.pay(self._catch_up_s + num_explored(k) * each_s, resumes=not self.current):
            return None
        self._exploration.begin(k)
        if k:
            self._costs.age(is_on=True)
        return k

    def _use_everywhere(self, k: int) -> None:
        self._calibration.expect_nothing()
        self._chosen.use_everywhere(k)
        self._deciding.advance()

    def _decide(self, rows: dict[int, DecodingRow], num_known: int) -> None:
        began = self._clock()
        costs = self._costs.of(num_known, len(rows))
        best = self._chooser.choose(list(rows.values()), costs)
        gain = best.usual_gain(len(rows), costs) * self._calibration.factor if best.k_RS.any() else 1.0
        if self._may_draft(gain, len(rows), costs.plain()):
            if self.current and not self._chosen.is_decided:
                self._trials.restore_share()  # the round before tried what pays
            self._calibration.expect(best, costs.prompts_s)
            self._chosen.use(best.k_RS, rows)
        else:
            self._calibration.expect_nothing()
            self._chosen.use(chosen_of_predictions(self._chooser, list(rows.values()), costs, self._rows.sources), rows)
        self._decide_s = self._clock() - began
        self._deciding.done(self._decide_s, self._round_s, DECIDING[self.current == 0], most=self._resuming.num_held)
        if num_known > len(rows) and self._switch.is_on and not self.current:
            self._deciding.advance()  # none pay beside a prompt, but they may in the next round

    def _may_draft(self, gain: float, num_rows: int, plain_s: float) -> bool:
        """Take the *gain* of draft tokens; return whether there may be any now."""
        num_rounds, catch_up, self._num_kept = 1 + self._num_kept, self._catch_up_s / plain_s, 0
        if self._switch.update(gain, num_rounds, num_rows, catch_up, is_current=self._hindsight.is_current):
            self._trials.restore_share()
            if self._switch.is_on:
                self._calibration.clear()
            self._resuming.clear()
            self._switch.log(num_rows, self._chooser.describe())
            return self._switch.is_on
        return self._switch.is_on and not self._resuming.holds(self._catch_up_s, (1 - 1 / gain) * plain_s, num_rounds)

    def _start_trial_if_due(self, num_rows: int, num_known: int) -> None:
        each_s = loss(TRIAL_TOKENS, 0, num_rows, self._costs.of(num_known, num_rows), gain=1.0, catch_up_s=0.0)
        if self._trials.start_if_due(self._catch_up_s, each_s, num_rows):
            # What is known of drafts is old: it must not outweigh what the next trials show.
            self._chooser.age()
            self._costs.age(is_on=False)
            self._kind = RoundKind.TRIAL
            self._use_everywhere(TRIAL_TOKENS)

    def num_draft_tokens(self, sequence: Sequence, source: int | None = None) -> int:
        """See `Policy`."""
        k = self._chosen.most(sequence.key, source)
        if k and self._starting.makes_other_load(sequence, self._decided.num_running):
            return 0  # these would read their prompts for a number that is about to be decided anew
        return sequence.most_drafts(k, may_branch=self._may_branch)

    def end_step(self, step: FinishedStep) -> None:
        """See `Policy`. It decides anew where the draft worker is lost, or is back."""
        if self._rows.note_worker(is_up=step.worker_is_up):
            self._decide_next()
            return
        if self._kind is RoundKind.IDLE:
            self._idle.add(step)
            return
        if step.plan.decodes or not self._round_s:
            self._round_s += (step.seconds - self._round_s) * (SMOOTHING if self._round_s else 1.0)
            if self._switch.is_on and not self._warming.is_on:
                self._calibration.observe(len(step.plan.rows), step.num_tokens, step.seconds)
        spent_s = self._begin_s
        if self._learns:
            began = self._clock()
            self._end_learning(step)
            spent_s += self._clock() - began
            self._learning.done(spent_s - self._decide_s, self._round_s, LEARNING[self.current == 0])
        else:
            self._trials.end_round(step.seconds)
            self._learning.skip()
        if not self._switch.is_on:
            self._trials.spend(spent_s)
        self._costs.observe_catch_up(step, self.current)
        if self._next_kind().tries or self._warming.is_on or (self.current > 0 and self._costs.catch_up.is_pending):
            return
        if self.current == 0 and not self._idle.is_predicted:
            self._idle.start(learns=False, decided=self._decided)
        elif step.plan.decodes:
            self._idle.start(learns=self._switch.is_on)

    def _end_learning(self, step: FinishedStep) -> None:
        """Learn costs, and acceptance but for slots whose draft was catching up; count what the round lost."""
        catch_up_s = self._costs.catching_up_s(step, self.current)
        catching_up = self._costs.slots_catching_up(step, self.current)
        if not self._warming.is_on:
            record(self._chooser, step, self._by_slot, catching_up)
            self._costs.learn(step, self._by_slot, catches_up=bool(catching_up), deciding_s=self._begin_s)
        if self.current and self._costs.is_plain_in_doubt(step.num_known):
            self._exploration.doubt(self._switch.gain)
        seconds, plain_s = step.seconds - self._begin_s, self._costs.of(step.num_known).plain()
        lost_s = lost_in(step, seconds, plain_s)
        self._first.end_round(lost_s - catch_up_s, plain_s)
        if catching_up and not (self._warming.is_on or any(verdict.proposed for verdict in step.verdicts)):
            self._trials.prolong()
        if self._trials.end_round(seconds, lost_s, plain_s, catch_up_s):
            self._deciding.advance()
            if self._trials.has_gained:
                self._calibration.clear()

    def revise(self, costs: StepCosts) -> None:
        """See `Policy`."""
        self._costs.revise(costs)
        self._decide_next()

    def _decide_next(self) -> None:
        self._idle.stop()
        self._deciding.advance()
