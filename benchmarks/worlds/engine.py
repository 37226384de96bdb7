"""A simulated engine: rounds of rows whose draft tokens are right or wrong as their text was made."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.worlds.costs import EngineCosts, Noise
from protos.messages import Request, RoundPlan, Row, Sampling, Verdict
from protos.sampling import SamplingParams
from runtime.core.sequence import Sequence as EngineSequence
from runtime.policy.base import FinishedStep, Policy

CHUNK = 2048
"""Tokens that the target, and a draft, read in a round."""
MOST_LAG = 16
"""A row drafts while it lacks fewer tokens than this, where the draft has a device of its own."""
LOOK_S = 1e-5
"""A policy's work from one look at its clock to the next takes so long at least."""
SHARES = (0.5, 1.5)
"""Least and most tokens of an answer, relative to the usual number."""
TOKENS = [(1,) * number for number in range(66)]
"""Tokens that a row gains, all alike, by how many there are."""


@dataclass
class EndedRounds:
    """Ends rounds: hands them to the policy, and adds up their seconds and tokens."""

    policy: Policy
    seconds: float = field(default=0.0, kw_only=True)
    num_tokens: int = field(default=0, kw_only=True)

    def end_round(
        self,
        rows: Sequence[Row],
        verdicts: Sequence[Verdict],
        draft_s: float,
        seconds: float,
        lookup_s: float = 0.0,
        *,
        worker_is_up: bool = True,
    ) -> None:
        """End a round that took *seconds*, of which *draft_s* were spent on drafts and *lookup_s* on looking up."""
        gained = sum([len(verdict.token_ids) for verdict in verdicts])
        self.seconds += seconds
        self.num_tokens += gained
        plan = RoundPlan(0, rows)
        self.policy.end_step(FinishedStep(plan, verdicts, gained, draft_s, seconds, lookup_s, worker_is_up))


class WorkClock:
    """A clock by which a policy's work takes the same time on each machine; each look at it takes some, too.

    Attributes:
        now: seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the seconds."""
        self.now += LOOK_S
        return self.now


@dataclass(eq=False)
class TextRow:
    """A request while it runs.

    Attributes:
        sequence: of the engine.
        odds: for each token of the answer, a number from 0 to 1. A draft of it is right if that is below the rate at
            which drafts for this request are right. So it is right or wrong whatever the policy.
        num_read: tokens that the draft has read.
        k: draft tokens that it was asked for in this round.
        proposed: those that came.
    """

    sequence: EngineSequence
    odds: Sequence[float]
    num_read: int = 0
    k: int = 0
    proposed: int = 0

    def num_right(self, levels: int, rate: float) -> int:
        """Return how many of the next *levels* draft tokens are right, one after another."""
        first = len(self.sequence.token_ids) - len(self.sequence.request.prompt_token_ids)
        for level, odds in enumerate(self.odds[first : first + levels]):
            if odds >= rate:
                return level
        return levels


@dataclass
class WorldEngine(EndedRounds):
    """An engine without models that serves requests, one after another in each of its places.

    Args:
        policy: decides.
        costs: of its rounds.
        noise: of their seconds.
        clock: of the policy.
        prompt, answer: tokens of each request; of answers, the usual number.
        levels: how many levels a draft of so many tokens has.
        seed: of the text and the noise.

    Attributes:
        rates: at which drafts are right: the first request has the first rate, and so on, in turns. May be changed.
        slowness: factor of all seconds. May be changed.
        num_rounds: so far.
        probes_s: seconds of rounds with drafts while speculation is off, and of those without while it is on.
    """

    costs: EngineCosts
    noise: Noise
    clock: WorkClock
    prompt: int
    answer: int
    levels: Callable[[int], int] = int
    seed: int = 0
    rates: Sequence[float] = (0.0,)
    slowness: float = 1.0
    num_rounds: int = 0
    probes_s: float = 0.0

    def __post_init__(self) -> None:
        self._rows: list[TextRow] = []
        self._num_came = 0
        self._slots: list[int] = []  # that are free
        self._factors = self.noise.factors(self.seed)
        self._begun_s = 0.0  # of the round that was begun before its plan; 0: none was

    def run(self, num_rows: int, num_tokens: int) -> None:
        """Run until *num_tokens* more tokens came, with *num_rows* requests at once."""
        end = self.num_tokens + num_tokens
        while self.num_tokens < end:
            self._fill(num_rows)
            self._round()

    def _fill(self, num_rows: int) -> None:
        """Let requests come where others have ended; where the load fell, the youngest are aborted."""
        self._slots += [row.sequence.slot for row in self._rows[num_rows:]]
        del self._rows[num_rows:]
        missing = num_rows - len(self._rows)
        is_whole_load = missing == num_rows > 1
        for index in range(missing):  # a whole load does not end together
            self._rows.append(self._next(1 - index / missing if is_whole_load else 1.0))

    def _next(self, share: float) -> TextRow:
        """Return the next request, with a *share* of the usual answer left."""
        self._num_came += 1
        dice = random.Random(f"{self.seed} {self._num_came}")
        # With answers of one length, plain decoding would read one prompt a step, and drafts would break that up.
        answer = max(2, round(self.answer * share * dice.uniform(*SHARES)))
        request = Request(str(self._num_came), (1,) * self.prompt, SamplingParams(), Sampling(seed=0), answer)
        sequence = EngineSequence(
            request,
            list(request.prompt_token_ids),
            self.prompt + answer,
            None,
            slot=self._slots.pop() if self._slots else self._num_came,
            key=self._num_came,
            num_cached_tokens=0,
        )
        return TextRow(sequence, [dice.random() for _ in range(answer + 1)])

    def _round(self) -> None:
        began, is_on = self.clock.now, sum(self.policy.changes.values()) % 2 == 0
        self.policy.begin_step([row.sequence for row in self._rows])
        factor, context = self.slowness * next(self._factors), self._ask()
        draft_s = self._draft() * factor
        rows, verdicts, num_fed = self._feed()
        target_s = (self.costs.target(num_fed) + self.costs.context_s * context) * factor
        draft_s += self._catch_up(target_s)
        seconds = draft_s + target_s + self.clock.now - began + self._host_s(target_s)
        self.num_rounds += 1
        self.probes_s += seconds * ((self.policy.current > 0) != is_on)
        began = self.clock.now
        self.end_round(rows, verdicts, draft_s, seconds)
        self.seconds += self.clock.now - began
        self._rows = [row for row in self._rows if not self._has_ended(row)]

    def _ask(self) -> int:
        """Ask the policy for each row; return how many tokens there are in the KV cache."""
        context, ask = 0, self.policy.num_draft_tokens
        for row in self._rows:
            sequence = row.sequence
            num_computed = sequence.num_computed
            context += num_computed
            row.k = ask(sequence) if num_computed >= self.prompt else 0
        return context

    def _draft(self) -> float:
        """Draft for the rows that are near enough; return the seconds, but for reading on a device of its own."""
        left, num_read, is_dedicated = CHUNK, 0, self.costs.is_dedicated
        depth = num_drafting = context = 0
        for row in self._rows:
            k = row.proposed = row.k
            if not k:
                continue
            if lag := len(row.sequence.token_ids) - 1 - row.num_read:
                is_near = lag < (min(left, MOST_LAG) if is_dedicated else left)
                row.proposed = k = k * is_near
                read = min(lag, left) if is_near or not is_dedicated else 0
                row.num_read += read
                left, num_read = left - read, num_read + read
            if k:
                num_drafting, depth, context = num_drafting + 1, max(depth, k), context + row.num_read
        return self.costs.drafting_s(self.levels(depth), num_drafting, context) + self.costs.read_s * num_read

    def _feed(self) -> tuple[list[Row], list[Verdict], int]:
        """Feed the target; return the rows of the round that took part, their verdicts, and the tokens fed."""
        rows, verdicts, num_fed, budget = [], [], 0, CHUNK
        for row in self._rows:
            sequence = row.sequence
            known = len(sequence.token_ids)
            length = min(known - sequence.num_computed, budget)
            if not length:
                continue
            budget -= length
            num_fed += length + row.proposed
            samples = length == known - sequence.num_computed
            rows.append(Row(sequence.slot, known, length, known, row.k, samples, depth=sequence.max_len - known - 1))
            if samples:
                verdicts.append(self._verdict(row, known))
            else:
                sequence.num_computed += length
        return rows, verdicts, num_fed

    def _verdict(self, row: TextRow, known: int) -> Verdict:
        """Commit the tokens of a row that samples, of which so many are *known*."""
        sequence, proposed, accepted = row.sequence, row.proposed, 0
        if proposed:
            accepted = row.num_right(self.levels(proposed), self.rates[sequence.key % len(self.rates)])
            row.num_read = known + accepted
        tokens = TOKENS[accepted + 1]
        sequence.token_ids += tokens
        sequence.num_computed, sequence.num_sent_tokens = known + accepted, known
        return Verdict(sequence.slot, tokens, proposed, range(accepted))

    def _catch_up(self, target_s: float) -> float:
        """Return the seconds that plans and drafts are under way; a device of its own reads meanwhile."""
        if not self.policy.current:
            return 0.0
        left = int(target_s / (self.slowness * self.costs.read_s)) if self.costs.is_dedicated else 0
        for row in self._rows if left else ():
            read = min(left, len(row.sequence.token_ids) - 1 - row.num_read)
            row.num_read, left = row.num_read + read, left - read
        return self.costs.way_s

    def _host_s(self, target_s: float) -> float:
        """Return the seconds that the device waits for the host, and computes what is lost; it may begin a round."""
        is_drafting = any(row.k for row in self._rows)
        lost_s = self._begun_s if is_drafting else 0.0
        waits_s = 0.0 if self._begun_s and not is_drafting else self.costs.host_s
        is_plain = all(row.sequence.num_computed > self.prompt for row in self._rows) and not is_drafting
        continues = is_plain and self.policy.stays_plain and not any(map(_is_over, self._rows))
        self._begun_s = target_s if continues and self.costs.host_s else 0.0
        return lost_s + waits_s

    def _has_ended(self, row: TextRow) -> bool:
        if not _is_over(row):
            return False
        self._slots.append(row.sequence.slot)
        return True


def _is_over(row: TextRow) -> bool:
    return len(row.sequence.token_ids) >= row.sequence.max_len
