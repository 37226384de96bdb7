"""Policies by batch size: a fixed K, off above a threshold, or K from a table.

Above some batch size speculation costs more than it gains. That threshold is derived from the step costs measured in
warm-up. A plain step of b rows costs t(b) and gives b tokens. With K draft tokens per row a step costs
K d(b) + t(b (K + 1)) and gives b (1 + a + ... + a^K) tokens, where a is the rate at which draft tokens are accepted
(Leviathan et al. 2023).
"""

import logging
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from statistics import median

from msgspec import structs

from protos.config.engine import SpeculativeConfig
from protos.errors import ConfigError
from protos.messages import StepCosts
from protos.stats import SpeculationChange
from runtime.core.sequence import Sequence
from runtime.policy.base import FinishedStep
from runtime.policy.interpolation import interpolate
from runtime.policy.round_costs import NOT_WAITED

logger = logging.getLogger(__name__)

RESUME_STEPS = 16
WAY_ROUNDS = 32
"""Rounds of which the way of drafts is the median; the threshold is derived again after so many."""
FORGOTTEN_ROUNDS = 4096
"""After so many rounds without drafts, their way is taken to be what it was in warm-up, until it is measured again."""

ASSUMED_ACCEPTANCE = 0.7
"""Acceptance rate of a typical trained draft of the same family; the true rate is known only while serving."""


class BatchSizeSwitch:
    """Turns off above `limit` decoding rows; on again after 16 steps in a row with at most 0.8 of it.

    `limit` None: it stays on.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._calm_steps = 0
        self.is_on = True

    @property
    def may_turn_on(self) -> bool:
        """Whether the next step may turn it on."""
        return not self.is_on and self._calm_steps >= RESUME_STEPS - 1

    def update(self, num_decoding: int) -> SpeculationChange | None:
        """Record one step; return the reason if the switch changed."""
        if self.limit is not None and num_decoding > self.limit:
            return self._turn_off()
        is_calm = self.limit is None or num_decoding <= max(1, self.limit * 4 // 5)
        self._calm_steps = self._calm_steps + 1 if is_calm else 0
        if self.is_on or self._calm_steps < RESUME_STEPS:
            return None
        self.is_on = True
        return "batch_size_fell"

    def _turn_off(self) -> SpeculationChange | None:
        self._calm_steps = 0
        was_on, self.is_on = self.is_on, False
        return "batch_size_rose" if was_on else None


class BatchSizeTable:
    """K by batch size: inclusive ranges `[start, end, K]`; sizes between and after them have the K of the range before.

    Raises:
        ConfigError: the ranges do not start at 1, do not rise, or have a K outside 0 .. *limit*.
    """

    def __init__(self, ranges: tuple[tuple[int, int, int], ...], limit: int) -> None:
        _check_table(ranges, limit)
        self._starts = [start for start, _, _ in ranges]
        self._ks = [k for _, _, k in ranges]

    def k(self, num_decoding: int) -> int:
        """Return K for this many decoding rows."""
        return self._ks[bisect_right(self._starts, max(1, num_decoding)) - 1]


def _check_table(ranges: tuple[tuple[int, int, int], ...], limit: int) -> None:
    name = "num_speculative_tokens_per_batch_size"
    if not ranges or ranges[0][0] != 1:
        raise ConfigError(f"{name} must begin with a range from batch size 1, got {list(ranges)}")
    previous_end = 0
    for start, end, k in ranges:
        if not previous_end < start <= end:
            raise ConfigError(f"{name}: range {[start, end, k]} must rise and start after {previous_end}")
        if not 0 <= k <= limit:
            raise ConfigError(f"{name}: K = {k} is outside 0..{limit} (num_speculative_tokens)")
        previous_end = end


class DraftWay:
    """Seconds of a round that drafts take beyond what drafting took in warm-up.

    Mostly the plan's way to a draft on another machine, and the table's way back.

    Args:
        costs: of steps, measured in warm-up.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._way_s: deque[float] = deque(maxlen=WAY_ROUNDS)
        self._until_due = WAY_ROUNDS
        self._num_unused = 0  # rounds without drafts

    def was_not_waited_for(self, k: int, step: FinishedStep) -> bool:
        """Whether target rank 0 went on without late drafts: such a round does not show how long they are under way."""
        drafting_s = k * interpolate(self._costs.draft_s, len(step.plan.rows))
        return step.draft_s < NOT_WAITED * drafting_s and not any(one.proposed for one in step.verdicts)

    def observe(self, k: int, num_rows: int, draft_s: float) -> bool:
        """Record a round with *k* draft tokens for each row; return whether the threshold is to be derived again."""
        self._num_unused = 0
        self._way_s.append(max(0.0, draft_s - k * interpolate(self._costs.draft_s, num_rows)))
        self._until_due -= 1
        is_due = self._until_due == 0
        self._until_due = self._until_due or WAY_ROUNDS
        return is_due

    def forget(self) -> bool:
        """Record a round without drafts; return whether what was measured is forgotten: nothing would show a change."""
        self._num_unused += 1
        is_old = self._num_unused % FORGOTTEN_ROUNDS == 0 and bool(self._way_s)
        if is_old:
            self._way_s.clear()
        return is_old

    def costs(self, k: int) -> StepCosts:
        """Return the costs of steps with the way, in equal parts on *k* draft tokens."""
        way_s = median(self._way_s or [0.0]) / k
        return structs.replace(
            self._costs, draft_s={rows: seconds + way_s for rows, seconds in self._costs.draft_s.items()}
        )


class BatchSizePolicy:
    """Fixed K, or K by batch size. `changes` counts changes of K by reason.

    Args:
        config: with its threshold, if it has one.
        derive: returns *config* with the threshold for other costs, and a line that describes it; None: it has the same
            threshold whatever steps cost.
        costs: of steps, measured in warm-up, from which *config* has its threshold; None if they were not measured.
    """

    least_survival = 0.0
    predicted_speedup = None

    def __init__(
        self,
        config: SpeculativeConfig,
        derive: Callable[[StepCosts], tuple[SpeculativeConfig, str]] | None = None,
        costs: StepCosts | None = None,
    ) -> None:
        table = config.num_speculative_tokens_per_batch_size
        self._limit = config.num_speculative_tokens
        self._may_branch = config.may_branch
        self._derive = derive
        self._way = _way(derive, costs)
        self._switch = BatchSizeSwitch(config.disable_by_batch_size)
        self._table = BatchSizeTable(table, self._limit) if table is not None else None
        self._from_table = self._table.k(1) if self._table else self._limit
        self._current = self._from_table
        self.changes: Counter[str] = Counter()

    @property
    def limit(self) -> int:
        """K as configured."""
        return self._limit

    @property
    def current(self) -> int:
        """K of this step."""
        return self._current

    @property
    def stays_plain(self) -> bool:
        """See `Policy`."""
        return self._current == 0 and not self._switch.may_turn_on

    def begin_step(self, running: Seq[Sequence]) -> None:
        """See `Policy`. Rows still reading their prompt do not count."""
        num_decoding = sum([sequence.is_decoding for sequence in running])
        if self._table:
            self._update_from_table(self._table.k(num_decoding))
        reason = self._switch.update(num_decoding)
        if reason:
            self.changes[reason] += 1
            state = "on again" if self._switch.is_on else "off"
            logger.info("speculation is %s: %d rows decode (%s)", state, num_decoding, reason)
        self._current = self._from_table if self._switch.is_on else 0

    def _update_from_table(self, k: int) -> None:
        if k != self._from_table:
            self._from_table = k
            self.changes["batch_size_table"] += 1

    def num_draft_tokens(self, sequence: Sequence, source: int | None = None) -> int:
        """Return K of this step, or the sequence's own limit if that is lower."""
        return sequence.most_drafts(self._current, may_branch=self._may_branch)

    def end_step(self, step: FinishedStep) -> None:
        """See `Policy`. A derived threshold follows what drafts take on their way."""
        if self._way is None or not step.plan.decodes or not step.worker_is_up:
            return
        if not self._current:
            is_due = self._way.forget()
        elif self._way.was_not_waited_for(self._current, step):
            return
        else:
            is_due = self._way.observe(self._current, len(step.plan.rows), step.draft_s)
        if is_due:
            self._move(self._way.costs(self._limit))

    def revise(self, costs: StepCosts) -> None:
        """See `Policy`. A threshold that was derived from costs is derived again."""
        self._way = _way(self._derive, costs)
        self._move(costs)

    def _move(self, costs: StepCosts) -> None:
        if self._derive is None:
            return
        config, line = self._derive(costs)
        if config.disable_by_batch_size != self._switch.limit:
            self._switch.limit = config.disable_by_batch_size
            logger.info(line)


def _way(derive: object, costs: StepCosts | None) -> DraftWay | None:
    """Return what measures the way of drafts; None where the threshold does not depend on it."""
    return None if derive is None or costs is None or not costs.draft_s else DraftWay(costs)


def with_threshold(config: SpeculativeConfig, costs: StepCosts | None, max_rows: int) -> tuple[SpeculativeConfig, str]:
    """Return *config* with its batch-size threshold, and a line that describes it.

    The user's own threshold or table takes precedence. Otherwise the threshold is derived from *costs*, if they were
    measured, for batches of at most *max_rows*.
    """
    if config.num_speculative_tokens_per_batch_size is not None:
        return config, "speculation: draft tokens by batch size, as configured"
    limit = config.disable_by_batch_size
    if limit is not None:
        return config, f"speculation: off above {limit} decoding rows, as configured"
    if costs is None:
        return config, "speculation: on at every batch size (no step costs were measured)"
    limit = derive_threshold(costs, config.num_speculative_tokens, max_rows)
    if limit is None:
        return config, f"speculation: on at every batch size up to {max_rows}, by measured step costs"
    return replace(config, disable_by_batch_size=limit), (
        f"speculation: off above {limit} decoding rows, by measured step costs at an assumed acceptance of "
        f"{ASSUMED_ACCEPTANCE:.0%}; disable_by_batch_size sets another threshold"
    )


def derive_threshold(costs: StepCosts, k: int, max_rows: int) -> int | None:
    """Return the largest batch size at which *k* draft tokens pay off, None if they do up to *max_rows*.

    At least 1: a single request always speculates.
    """
    for rows in range(2, max_rows + 1):
        if speedup(costs, k, rows) < 1.0:
            return rows - 1
    return None


def speedup(costs: StepCosts, k: int, rows: int, acceptance: float = ASSUMED_ACCEPTANCE) -> float:
    """Return how many times faster *rows* decoding rows are with *k* draft tokens each than without."""
    tokens = sum(acceptance**i for i in range(k + 1))
    draft_s = k * interpolate(costs.draft_s, rows) if costs.draft_s else 0.0
    return tokens * interpolate(costs.target_s, rows) / (draft_s + interpolate(costs.target_s, rows * (k + 1)))
