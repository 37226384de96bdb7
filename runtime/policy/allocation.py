"""Which draft tokens of a batch pay: the choice that maximises expected tokens per second.

A slot is one draft token of one row at one depth. It earns the probability that it and all before it are accepted, and
costs what the round takes longer with it. For each largest depth, slots are taken in the order of their probability;
a row's slots come in the order of their depth, since the probability falls with it. So for each number of slots the
set is the best there is, and the number with the highest rate is found by trying all.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.policy.cost_model import CostCurve, Floats, Ints


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of the rounds that are compared.

    Attributes:
        target: by tokens fed.
        draft: of the first level of a draft, by rows that draft.
        levels: of so many levels, in units of one.
        num_known: known tokens fed, prompt chunks included.
        prompts_s: what the draft spends on prompts, for each round with draft tokens.
    """

    target: CostCurve
    draft: CostCurve
    levels: CostCurve
    num_known: int
    prompts_s: float = 0.0

    def plain(self) -> float:
        """Return the seconds without draft tokens."""
        return self.target.at(self.num_known)

    def uniform(self, k: int, num_rows: int) -> float:
        """Return the seconds with *k* draft tokens for each of *num_rows* rows."""
        if not k:
            return self.plain()
        return self.target.at(self.num_known + k * num_rows) + self.drafting(k, num_rows)

    def drafting(self, depth: int, num_rows: int) -> float:
        """Return the seconds for a draft of *depth* levels for *num_rows* rows."""
        return self.levels_s(depth, num_rows) + self.prompts_s

    def levels_s(self, depth: int, num_rows: int) -> float:
        """Return the seconds for the levels of a draft alone, 0 for none."""
        return self.levels.at(depth) * self.draft.at(num_rows) if depth else 0.0


@dataclass(frozen=True)
class Allocation:
    """The number of draft tokens of each row, int64 `[R]`, and what they are expected to bring.

    Attributes:
        tokens: expected tokens of the round, those of the target included.
        seconds: of the round.
        gain: tokens per second, relative to a round without draft tokens.
    """

    k_R: Ints
    tokens: float
    seconds: float
    gain: float


def allocate(
    survival_RD: Floats, limits_R: Ints, num_sampling: int, costs: RoundCosts, drafted_D: Floats | None = None
) -> Allocation:
    """Return the best number of draft tokens for each row.

    Args:
        survival_RD: `[R, D]`, probability that the first d + 1 draft tokens are accepted; falls along D.
        limits_R: `[R]`, most draft tokens of each row.
        num_sampling: rows that gain a token of the target's own, those without draft tokens included.
        costs: of the round.
        drafted_D: `[D]`, the share of the slots at each depth for which there will be a draft token; others cost the
            target nothing. None: all.
    """
    plain_s = costs.plain()
    nothing = Allocation(np.zeros(len(limits_R), np.int64), num_sampling, plain_s, 1.0)
    slots = _Slots.of(survival_RD, limits_R, np.ones(survival_RD.shape[1]) if drafted_D is None else drafted_D)
    if not len(slots.earned_N) or not num_sampling:
        return nothing
    best, plain_rate = nothing, num_sampling / plain_s
    for depth in range(1, survival_RD.shape[1] + 1):
        count, tokens, seconds = slots.best(depth, num_sampling, costs)
        gain = tokens / seconds / plain_rate
        if count and gain > best.gain:
            best = Allocation(slots.rows_up_to(depth, count, len(limits_R)), tokens, seconds, gain)
    return best


@dataclass(frozen=True)
class _Slots:
    """All slots in the order in which they are taken: row, depth from 0 on, and the token's probabilities.

    `earned_N`: that it is accepted; `drafted_N`: that it is drafted.
    """

    row_N: Ints
    depth_N: Ints
    earned_N: Floats
    drafted_N: Floats

    @staticmethod
    def of(survival_RD: Floats, limits_R: Ints, drafted_D: Floats) -> "_Slots":
        row_N, depth_N = np.nonzero(np.arange(survival_RD.shape[1])[None, :] < limits_R[:, None])
        earned_N = survival_RD[row_N, depth_N]
        order_N = np.lexsort((depth_N, -earned_N))
        return _Slots(row_N[order_N], depth_N[order_N], earned_N[order_N], drafted_D[depth_N[order_N]])

    def best(self, depth: int, num_sampling: int, costs: RoundCosts) -> tuple[int, float, float]:
        """Return the number of slots up to *depth* levels with the highest rate, its tokens and its seconds."""
        taken_N = self.depth_N < depth
        earned_M = self.earned_N[taken_N]
        tokens_M = num_sampling + np.cumsum(earned_M)
        drafting_M = np.cumsum(self.depth_N[taken_N] == 0)
        seconds_M = costs.levels.at(depth) * costs.draft.seconds(drafting_M) + costs.prompts_s
        seconds_M = seconds_M + self._target(np.cumsum(self.drafted_N[taken_N]), drafting_M, costs)
        index = int(np.argmax(tokens_M / seconds_M))
        return index + 1, float(tokens_M[index]), float(seconds_M[index])

    def _target(self, scored_M: Floats, drafting_M: Ints, costs: RoundCosts) -> Floats:
        """Return the target's expected seconds with so many expected draft tokens of so many rows.

        In some rounds nothing is drafted for any row: those cost as much as plain ones.
        """
        nothing_M: Floats = (1 - self.drafted_N[0]) ** drafting_M
        some_M: Floats = np.maximum(1 - nothing_M, 1e-9)
        seconds_M = costs.target.between(costs.num_known + scored_M / some_M)
        return nothing_M * costs.plain() + some_M * seconds_M

    def rows_up_to(self, depth: int, count: int, num_rows: int) -> Ints:
        """Return how many of the first *count* slots up to *depth* levels each row has, `[R]`."""
        taken: npt.NDArray[np.int64] = np.bincount(self.row_N[self.depth_N < depth][:count], minlength=num_rows)
        return taken
