"""Which draft tokens of a batch pay: the choice that maximises expected tokens per second.

A slot is one draft token of one row at one depth, from one of the sources that may draft for the row. It earns the
probability that it and all before it are accepted, and costs what the round takes longer with it. For each number of
levels of the draft worker's drafts, slots are taken in the order of what each earns for each token scored; a source's
slots for a row come in the order of their depth. So for each number of slots the set is the best there is, and the
number with the highest rate is found by trying all.

A row has one draft: that of the first source, in their order, that is asked and finds one.
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from runtime.policy.cost_model import NEVER, Flags, Floats, Ints, RoundCosts

CALIBRATION_ROUNDS = 48
"""Rounds that predictions are compared with; older ones fade."""
FADING_ROUNDS = 320
"""Rounds without draft tokens in which the weight of those with some falls to a third."""
FEWEST = 16
"""With fewer rounds, predictions are not compared."""
PREDICTION_ERROR = 0.1
"""Of the logarithm of predicted tokens per second: the standard deviation."""
MOST_SECONDS = 2.0
"""A round that took longer than so many times what was predicted was disturbed, and counts as one that took that."""


@dataclass(frozen=True)
class Allocation:
    """The number of draft tokens of each row from each source, int64 `[R, S]`, and what they are expected to bring.

    Attributes:
        tokens: expected tokens of the round, those of the target included.
        seconds: of the round.
        gain: tokens per second, relative to a round without draft tokens.
        scored: expected draft tokens.
    """

    k_RS: Ints
    tokens: float
    seconds: float
    gain: float
    scored: float = 0.0

    def usual_gain(self, num_sampling: int, costs: RoundCosts) -> float:
        """Return the gain, unless it is a loss once the usual prompts of *num_sampling* rows are counted.

        Draft tokens and prompts use the same tokens that a GPU computes for nothing: where prompts use them in most
        steps, draft tokens only seem to be free in the others.
        """
        target_s = costs.target.beyond(costs.num_known + self.scored) - costs.prefill_s
        seconds = self.seconds - target_s + costs.with_usual_prompts(num_sampling, self.scored, self.tokens)
        plain_s = costs.with_usual_prompts(num_sampling, 0, num_sampling)
        usual = self.tokens / seconds * plain_s / num_sampling
        return self.gain if usual > 1 else usual


class Calibration:
    """Compares what was predicted of rounds with what they brought.

    What is measured for each depth and size follows a change of the text only slowly, and may be wrong together. The
    tokens per second of all rounds show that soon. They are trusted by their variance.
    """

    def __init__(self) -> None:
        self._num_rows, self._tokens, self._seconds = 0, 1.0, 1.0  # predicted of the next rounds; no rows: nothing
        self.clear()

    @property
    def usual_s(self) -> float:
        """Predicted seconds of the last rounds that were predicted."""
        return self._seconds

    def clear(self) -> None:
        """Forget all rounds."""
        self._count = self._sum_tokens = self._sum_squares = self._sum_seconds = 0.0  # relative to what was predicted

    def fade(self, num_rounds: int) -> None:
        """Count so many rounds without draft tokens: what was predicted of those before matters less and less."""
        kept = (1 - 1 / FADING_ROUNDS) ** num_rounds
        self._count, self._sum_tokens = kept * self._count, kept * self._sum_tokens
        self._sum_squares, self._sum_seconds = kept * self._sum_squares, kept * self._sum_seconds

    def expect(self, best: Allocation, prompts_s: float) -> None:
        """Compare the next rounds with *best*, without the seconds for prompts in it, for each token."""
        self._num_rows = len(best.k_RS) if best.k_RS.any() else 0
        self._tokens, self._seconds = best.tokens, best.seconds - prompts_s * best.tokens

    def expect_nothing(self) -> None:
        """Compare the next rounds with no prediction."""
        self._num_rows = 0

    def observe(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Count a round in which so many rows decoded, if it is one of those that were predicted."""
        if num_rows != self._num_rows:
            return
        kept, tokens = 1 - 1 / CALIBRATION_ROUNDS, num_tokens / self._tokens
        self._count = kept * self._count + 1
        self._sum_tokens = kept * self._sum_tokens + tokens
        self._sum_squares = kept * self._sum_squares + tokens * tokens
        self._sum_seconds = kept * self._sum_seconds + min(MOST_SECONDS, seconds / self._seconds)

    def end_idle(self, num_rows: int, rounds: Seq[tuple[int, float]], *, is_on: bool) -> None:
        """Count idle rounds of so many rows, each with its tokens and seconds. Off, they and the one after fade it."""
        if not is_on:
            self.fade(1 + len(rounds))
        for num_tokens, seconds in rounds if is_on else ():
            self.observe(num_rows, num_tokens, seconds)

    @property
    def factor(self) -> float:
        """The factor of the tokens per second that are predicted next."""
        if self._count < FEWEST:
            return 1.0
        mean = self._sum_tokens / self._count
        variance = max(0.0, self._sum_squares / self._count / mean**2 - 1) / self._count
        trust = PREDICTION_ERROR**2 / (PREDICTION_ERROR**2 + variance)
        return math.exp(trust * math.log(self._sum_tokens / self._sum_seconds))


@dataclass(frozen=True)
class Offer:
    """What a source of drafts may bring.

    Attributes:
        survival_RD: probability that it drafts d + 1 tokens for a row that it is asked for, and all are accepted; falls
            along D.
        drafted_D: probability that it drafts d + 1 tokens; a slot without a token costs the target nothing.
        limits_R: most draft tokens of each row; 0 where it is not asked.
        is_worker: whether it is the draft worker, whose levels cost.
        is_free: whether its drafts cost nothing to make. Those of sources that are neither are looked up.
    """

    survival_RD: Floats
    drafted_D: Floats
    limits_R: Ints
    is_worker: bool = True
    is_free: bool = False

    @property
    def found_R(self) -> Floats:
        """Accepted tokens of a draft of each row on average, where one is found; 0 where the source is not asked."""
        within_RD = np.arange(len(self.drafted_D))[None, :] < self.limits_R[:, None]
        accepted_R: Floats = (self.survival_RD * within_RD).sum(axis=1) / self.drafted_D[0]
        return accepted_R

    def most_gained(self, token_s: float, plain_s: float, costs: RoundCosts) -> float:
        """Return the most tokens that drafts may gain on average for each row, less what their seconds are worth.

        A draft token takes the target *token_s* or more; without, a row gains a token in *plain_s*.
        """
        num_rows, depth_D = len(self.limits_R), np.arange(1, len(self.drafted_D) + 1)
        drafting_s_D = 0.0 * depth_D
        if self.is_worker:
            drafting_s_D = costs.levels.seconds(depth_D) * costs.draft.least_each(num_rows)
        elif not self.is_free:
            drafting_s_D += costs.lookups.least_each(num_rows)
        earned_D = np.maximum(self.survival_RD.max(axis=0) - self.drafted_D * (token_s / plain_s), 0.0)
        return max(0.0, float((np.cumsum(earned_D) - drafting_s_D / plain_s).max()))


def may_pay(offers: Seq[Offer], num_sampling: int, costs: RoundCosts) -> bool:
    """Return False if no draft tokens pay, where a bound shows it without a search, as it mostly does with many rows.

    In the bound, tokens of all rows are accepted as often as those of the best one, and each takes the fewest seconds
    that any number of tokens takes for each; so does each row of drafting. For the arguments see `allocate`.
    """
    num_slots = sum([int(one.limits_R.sum()) for one in offers])
    if not (num_sampling and num_slots):
        return False
    plain_s, token_s = costs.plain() / num_sampling, costs.target.least_further(costs.num_known, num_slots)
    gained = [one.most_gained(token_s, plain_s, costs) for one in offers]
    is_free = any(one.is_free and more > 0 for one, more in zip(offers, gained, strict=True))
    return is_free or sum(gained) > costs.prompts_s / plain_s


def allocate(offers: Seq[Offer], num_sampling: int, costs: RoundCosts) -> Allocation:
    """Return the best number of draft tokens for each row from each source.

    Args:
        offers: of the sources, in the order in which they are asked; at least one.
        num_sampling: rows that gain a token of the target's own, those without draft tokens included.
        costs: of the round.
    """
    plain_s = costs.plain()
    if may_pay(offers, num_sampling, costs):
        slots = _Slots.of(offers)
        taken_N, tokens, seconds, scored = slots.best(num_sampling, costs)
        gain = tokens / seconds * plain_s / num_sampling
        if gain > 1:
            return Allocation(slots.count(taken_N), tokens, seconds, gain, scored)
    return Allocation(np.zeros((len(offers[0].limits_R), len(offers)), np.int64), num_sampling, plain_s, 1.0)


@dataclass(frozen=True)
class _Slots:
    """Slots in the order in which they are taken.

    Attributes:
        shape, place_N: that of an array of all slots there could be, `[S, R, D]`, and where each is in it, flat.
        levels_N: levels of the worker's drafts that it needs, 0 if it is looked up.
        sums_FN: what adds up: accepted tokens, tokens scored, rows looked up, rows the worker drafts for, and the
            logarithms of the probabilities that nothing is drafted, and nothing by the worker.
    """

    shape: tuple[int, int, int]
    place_N: Ints
    levels_N: Ints
    sums_FN: Floats

    @staticmethod
    def of(offers: Seq[Offer]) -> "_Slots":
        shape = (len(offers), *offers[0].survival_RD.shape)
        worth_SRD, levels_SRD, sums_FSRD = np.empty(shape), np.zeros(shape, np.int64), np.zeros((6, *shape))
        asked_R = np.ones(shape[1])  # the probability that no source before had a draft
        depth_D = np.arange(1, shape[2] + 1)
        for source, one in enumerate(offers):
            earned_RD, scored_RD, looked_RD, drafting_RD, nothing_RD, idle_RD = sums_FSRD[:, source]
            np.multiply(asked_R[:, None], one.survival_RD, out=earned_RD)
            np.multiply(asked_R[:, None], one.drafted_D, out=scored_RD)
            nothing_RD[:, 0] = np.log(np.maximum(1 - scored_RD[:, 0], NEVER))
            if one.is_worker:
                drafting_RD[:, 0], idle_RD[:, 0] = asked_R, np.log(np.maximum(1 - asked_R, NEVER))
                levels_SRD[source] = depth_D
            elif not one.is_free:
                looked_RD[:, 0] = asked_R
            worth_RD = np.minimum.accumulate(one.survival_RD / one.drafted_D, axis=1)
            worth_SRD[source] = np.where(depth_D <= one.limits_R[:, None], worth_RD, -1.0)
            asked_R = np.where(one.limits_R > 0, asked_R * (1 - one.drafted_D[0]), asked_R)
        order_N = np.argsort(-worth_SRD, axis=None, kind="stable")  # a row's slots of one source stay in order
        place_N = order_N[: np.count_nonzero(worth_SRD >= 0)]
        return _Slots(shape, place_N, levels_SRD.ravel()[place_N], sums_FSRD.reshape(6, -1)[:, place_N])

    def best(self, num_sampling: int, costs: RoundCosts) -> tuple[Flags, float, float, float]:
        """Return which slots have the highest rate, whatever the levels; their tokens, seconds and tokens scored."""
        levels_L = np.flatnonzero(np.bincount(self.levels_N))
        is_within_LN = self.levels_N <= levels_L[:, None]
        sums_FLN = np.cumsum(self.sums_FN[:, None] * is_within_LN, axis=2)
        earned_LN, scored_LN, looked_LN, drafting_LN, nothing_LN, idle_LN = sums_FLN
        tokens_LN = num_sampling + earned_LN
        seconds_LN = costs.scoring(scored_LN, nothing_LN)
        seconds_LN += costs.prompts_s * tokens_LN * (looked_LN + drafting_LN > 0)
        if looked_LN[-1, -1]:
            seconds_LN += np.where(looked_LN > 0, costs.lookups.between(looked_LN), 0.0)
        if levels_L[-1]:
            levels_s_L = np.where(levels_L > 0, costs.levels.seconds(levels_L), 0.0)
            seconds_LN += levels_s_L[:, None] * costs.draft.expected(drafting_LN, idle_LN)
        level, index = divmod(int(np.argmax(tokens_LN / seconds_LN)), len(self.levels_N))
        is_taken_N = is_within_LN[level] & (np.arange(len(self.levels_N)) <= index)
        tokens, seconds, scored = (float(each_LN[level, index]) for each_LN in (tokens_LN, seconds_LN, scored_LN))
        return is_taken_N, tokens, seconds, scored

    def count(self, is_taken_N: Flags) -> Ints:
        """Return how many slots are taken of each row and source, `[R, S]`."""
        is_taken_SRD = np.zeros(self.shape, np.int64)
        is_taken_SRD.ravel()[self.place_N[is_taken_N]] = 1
        taken_RS: Ints = is_taken_SRD.sum(axis=2).T
        return taken_RS
