"""Seconds of a round by its shape: measured in warm-up, corrected by every round.

A round that feeds N tokens, for R rows of which draft tokens in D levels were made, costs

    target(N) + levels(D) draft(R)

`target` includes sampling and the work of the controller. Each of the three is a curve of its own. The KV cache is read
once whatever the number of draft tokens, so it is part of `target`, whose corrections follow the lengths of contexts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

CLIP = math.log(2)
"""A round that took more than twice the predicted seconds, or less than half, counts as one that took that."""
ONCE = 0.2
"""The error of a slower round counts as this one at most, unless that of the round before was larger, too: single
rounds are disturbed. What all sizes share and what is a size's own follow the same error, so that they do not part."""
SHARED_RATE, OWN_RATE = 0.045, 0.005
"""Weight of the newest round in the correction of the whole curve, and of its size. The first rounds weigh more. Where
only one size is run, it is the machine that became slower, rather than that size."""
UNMEASURED_S = {1: 0.001, 64: 0.001}
"""A curve of which nothing was measured: as if larger rounds cost nothing, so that they are tried and correct it."""
EXACT_SIZES = 16
"""Sizes up to this have a correction each; above, neighbouring sizes share one."""
FEW = 8
"""Of so many first rounds of a size the median counts: first rounds take longer, and so do disturbed ones. The fastest
would make a size seem the faster, the fewer rounds it had."""
MEMORY = 32
"""Rounds by which an estimate is known best."""
NOISE = 0.1
"""Of the logarithm of one round's seconds."""
MOVED = 0.03
"""If the shared correction moved by so much since a size was run, its estimate is in doubt. A third of it is noise."""
SLOW_FADES = 0.5
"""How soon it is forgotten that a size was found slow and is not run, relative to its rounds."""
NEVER = 1e-9
"""A smaller probability counts as this one."""
REFRESH_EVERY = 8
"""The tabulated curve is computed again after this many rounds, or at once after one that weighs more than 1 in 8."""


class CostCurve:
    """Seconds by size, from 0 to *largest*.

    The logarithm of the seconds is that of the measured curve, plus a correction that all sizes share, plus one of the
    size's own. The shared one follows changes of the machine's speed also for sizes that were not run since.

    Args:
        measured: seconds by size; linear in between, proportional above; empty if nothing was measured.
        largest: sizes above count as this one.
        has_ratios: whether it is of ratios, which another curve is multiplied by. Sizes then share no correction: what
            all of them share is left to the other curve.
    """

    def __init__(self, measured: Mapping[int, float], largest: int, *, has_ratios: bool = False) -> None:
        self.largest = largest
        self._shared_rate = 0.0 if has_ratios else SHARED_RATE
        self._own_rate = SHARED_RATE if has_ratios else OWN_RATE
        known = measured or UNMEASURED_S
        sizes = np.array(sorted(known), np.float64)
        seconds = np.array([max(known[int(size)], 1e-9) for size in sizes])
        self._size_N = np.arange(largest + 1, dtype=np.float64)
        proportional_N = seconds[-1] * self._size_N / sizes[-1]
        base_N = np.where(self._size_N > sizes[-1], proportional_N, np.interp(self._size_N, sizes, seconds))
        self._log_base_N = np.log(np.maximum(base_N, 1e-9))
        self._bin_N = _bins(largest)
        num_bins = int(self._bin_N[-1]) + 1
        # Lists: single elements are read and written in every round.
        self._log_bases, self._bins = self._log_base_N.tolist(), self._bin_N.tolist()
        self._own_B, self._count_B = [0.0] * num_bins, [0.0] * num_bins
        self._is_fresh_B = [False] * num_bins  # seen since it aged last
        self._shared_B = [0.0] * num_bins  # the shared correction that the size's own one goes with
        self._shared = 0.0
        self._few: dict[int, list[float]] = {}  # what the first rounds of a size showed, by its bin
        self._count, self._error = 0, 0.0  # rounds, and the error of the last one
        self._refresh()

    def seconds(self, size_N: Ints) -> Floats:
        """Return the predicted seconds for each size."""
        seconds_N: Floats = self._seconds_N[np.minimum(size_N, self.largest)]
        return seconds_N

    def between(self, size_N: Floats) -> Floats:
        """Return the predicted seconds for each expected size, of any shape."""
        seconds_N: Floats = np.interp(size_N, self._size_N, self._seconds_N)
        return seconds_N

    def expected(self, size_M: Floats, log_none_M: Floats, *, at_least: int = 0, otherwise_s: float = 0.0) -> Floats:
        """Return the expected seconds of rounds of *at_least* and, in addition, of *size_M* on average.

        With the probability whose logarithm is *log_none_M* there is nothing in addition, which takes *otherwise_s*:
        never more than with something, whatever a few disturbed rounds have shown.
        """
        none_M = np.exp(log_none_M)
        some_M = np.maximum(1 - none_M, NEVER)
        something_s_M = np.maximum(self.between(at_least + size_M / some_M), otherwise_s)
        seconds_M: Floats = none_M * otherwise_s + some_M * something_s_M
        return seconds_M

    def at(self, size: int) -> float:
        """Return the predicted seconds for one size."""
        return float(self._seconds_N[min(size, self.largest)])

    def beyond(self, size: float) -> float:
        """Return the predicted seconds for an expected size. Above the largest they rise as in the upper half."""
        middle = self.largest // 2
        rise_s = (self.at(self.largest) - self.at(middle)) / max(1, self.largest - middle)
        return float(self.between(np.array(size))) + max(0.0, rise_s) * max(0.0, size - self.largest)

    def least_each(self, largest: int) -> float:
        """Return the fewest seconds for each unit of the sizes from 1 to *largest*."""
        sizes = np.arange(1, largest + 1)
        return float((self.seconds(sizes) / sizes).min())

    def least_further(self, size: int, most: int) -> float:
        """Return the fewest seconds, at least 0, by which up to *most* units more than *size* take longer, for each."""
        further = np.arange(1, most + 1)
        return max(0.0, float(((self.seconds(size + further) - self.at(size)) / further).min()))

    def observe(self, size: int, seconds: float, num_rounds: int = 1) -> None:
        """Correct the curve by *num_rounds* rounds of *size*, of which the median took *seconds*."""
        size = min(size, self.largest)
        bin_ = self._bins[size]
        found = math.log(max(seconds, 1e-9)) - self._log_bases[size] - self._shared
        if not self._count and self._shared_rate:
            self._shared, found = self._shared + found, 0.0
        own, count, moved = self._own_B[bin_], self._count_B[bin_], self._moved(bin_)
        of_few = num_rounds / (count + num_rounds) if count < MEMORY else 0.0
        rate = max(_rate(self._own_rate, num_rounds), of_few, self._doubt(moved))
        error = self._lasting(found - own, num_rounds)
        if count < FEW and num_rounds == 1:
            self._own_B[bin_] = self._typical(size, found)
        else:
            self._few.pop(bin_, None)  # a median of later rounds begins with what these show
            self._own_B[bin_] = own + rate * error
            self._shared += (1 - rate) * _rate(self._shared_rate, num_rounds) * error
        self._shared_B[bin_] = self._shared - (moved / 2 if count else 0.0)
        self._count_B[bin_] = min(MEMORY, count + num_rounds)
        self._is_fresh_B[bin_] = True
        self._count += 1
        if self._count % REFRESH_EVERY == 0 or rate * REFRESH_EVERY > 1:
            self._refresh()

    def _lasting(self, error: float, num_rounds: int) -> float:
        """Return the part of the *error* of so many rounds that the one before showed, too, beyond `ONCE`."""
        before, self._error = self._error, min(CLIP, max(-CLIP, error))
        return self._error if num_rounds > 1 else min(self._error, max(ONCE, before))

    def _typical(self, size: int, found: float) -> float:
        """Return the median of what the first rounds of *size* showed of its own correction, and was assumed before."""
        bin_ = self._bins[size]
        few = self._few.setdefault(bin_, [self._own_B[bin_] if self._count_B[bin_] else float(self._own_N[size])])
        few.append(min(few[0] + CLIP, max(few[0] - CLIP, found)))
        return sorted(few)[(len(few) - 1) // 2]

    @staticmethod
    def _doubt(moved: float) -> float:
        return min(0.5, (abs(moved) - MOVED / 3) / NOISE)

    def is_in_doubt(self, size: int) -> bool:
        """Whether rounds of other sizes took other times than before since *size* was run last.

        What changed, the speed of the machine or those sizes alone, only rounds of *size* show.
        """
        bin_ = self._bins[min(size, self.largest)]
        return bool(self._count_B[bin_]) and abs(self._moved(bin_)) > MOVED

    def _moved(self, bin_: int) -> float:
        """Return by how much the shared correction has moved since this size was run."""
        return self._shared - self._shared_B[bin_]

    def age(self, kept: float) -> None:
        """Let the next rounds count more at sizes that were not seen since the last call, and forget some of the past.

        Where a size was found slow, it is not run again. If the machine is faster now, only forgetting shows it. That a
        size was found fast is not forgotten: disturbed rounds are slow, and so may be what warm-up measured.

        Args:
            kept: the share of the rounds of such a size that counts on.
        """
        for bin_, is_fresh in enumerate(self._is_fresh_B):
            if not is_fresh:
                self._count_B[bin_] *= kept
                self._few.pop(bin_, None)
                self._own_B[bin_] *= kept**SLOW_FADES if self._own_B[bin_] > 0 else 1.0
        self._is_fresh_B = [False] * len(self._is_fresh_B)
        self._refresh()

    def _refresh(self) -> None:
        """Tabulate the curve. Sizes that were not run have the corrections of the nearest ones that were."""
        run_M = np.flatnonzero(self._count_B)
        own_B = np.array(self._own_B)
        self._own_N = np.interp(self._bin_N, run_M, own_B[run_M]) if len(run_M) else own_B[self._bin_N]
        self._seconds_N = np.exp(self._log_base_N + self._shared + self._own_N)


def _rate(of_one: float, num_rounds: int) -> float:
    """Return the weight of so many rounds together, of which each has the weight *of_one*."""
    return 1 - (1 - of_one) ** num_rounds


def _bins(largest: int) -> Ints:
    """Return the bin of each size from 0 to *largest*: exact up to `EXACT_SIZES`, then eight for each doubling."""
    sizes = np.arange(largest + 1)
    above = np.floor(8 * np.log2(np.maximum(sizes, EXACT_SIZES) / EXACT_SIZES)).astype(np.int64)
    return np.where(sizes <= EXACT_SIZES, sizes, EXACT_SIZES + 1 + above)


@dataclass(frozen=True)
class UsualPrompts:
    """Prompts of the requests that ended lately, without what was in the prefix cache.

    Attributes:
        length: tokens, on average.
        ratio: tokens for each token of an answer.
    """

    length: float = 0.0
    ratio: float = 0.0


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of the rounds that are compared.

    Attributes:
        target: by tokens fed.
        draft: of one level of the worker's drafts, by rows that it drafts for.
        levels: of so many levels, in units of one. The first takes longer than a further one.
        lookups: of proposers in the controller process, by rows that they are asked for.
        num_known: known tokens fed, prompt chunks included.
        prefill_s: what the round takes longer for prompt chunks, whatever is drafted. It is no part of the seconds that
            are compared: otherwise draft tokens would seem cheap in a round that is slow anyway.
        prompts_s: what drafting spends on prompts, for each token of an answer; from predictions, nothing.
        prompts: that the target usually reads.
    """

    target: CostCurve
    draft: CostCurve
    levels: CostCurve
    lookups: CostCurve
    num_known: int
    prefill_s: float = 0.0
    prompts_s: float = 0.0
    prompts: UsualPrompts = UsualPrompts()

    def plain(self) -> float:
        """Return the seconds without draft tokens."""
        return self.target.at(self.num_known) - self.prefill_s

    def uniform(self, k: int, num_rows: int) -> float:
        """Return the seconds with *k* draft tokens for each of *num_rows* rows."""
        if not k:
            return self.plain()
        return self.target.at(self.num_known + k * num_rows) - self.prefill_s + self.drafting(k, num_rows)

    def scoring(self, num_scored_M: Floats, log_nothing_M: Floats) -> Floats:
        """Return the expected seconds of the target.

        Args:
            num_scored_M: draft tokens on average, `[M]`.
            log_nothing_M: logarithms of the probabilities that there are none, `[M]`.
        """
        plain_s = self.target.at(self.num_known)
        scored_s_M = self.target.expected(num_scored_M, log_nothing_M, at_least=self.num_known, otherwise_s=plain_s)
        return scored_s_M - self.prefill_s

    def with_usual_prompts(self, num_sampling: int, num_scored: float, num_tokens: float) -> float:
        """Return the seconds of the target on average, those for prompts included.

        Args:
            num_sampling: rows that decode.
            num_scored: draft tokens.
            num_tokens: that the rows gain. The more they are, the sooner other requests come, with their prompts.
        """
        num_decoding, num_prompts = num_sampling + num_scored, self.prompts.ratio * num_tokens
        chunk = max(self.prompts.length, num_prompts)  # of the steps that read any
        share = num_prompts / max(1.0, chunk)
        return (1 - share) * self.target.beyond(num_decoding) + share * self.target.beyond(num_decoding + chunk)

    def drafting(self, depth: int, num_rows: int) -> float:
        """Return the seconds for drafts of *depth* levels for *num_rows* rows, for which all sources are asked.

        Those for prompts are not in it.
        """
        return self.levels_s(depth, num_rows) + self.lookups.at(num_rows)

    def levels_s(self, depth: int, num_rows: int) -> float:
        """Return the seconds for the levels of the worker's drafts, 0 for none."""
        return self.levels.at(depth) * self.draft.at(num_rows) if depth else 0.0
