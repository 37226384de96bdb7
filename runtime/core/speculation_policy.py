"""How many guesses a row gets. Never changes what comes out, only how fast."""

import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

from protos.config.engine import SpeculativeConfig
from protos.errors import ConfigError
from protos.messages import Request, StepCosts
from runtime.core.threshold import ASSUMED_ACCEPTANCE, derive

logger = logging.getLogger(__name__)

RESUME_STEPS = 16


class Policy(Protocol):
    """Asked once a step, then once for each row that samples.

    `limit` is the largest K there can be, 0 where nobody speculates; `current` is this step's; `changes` counts changes
    of K by reason.
    """

    @property
    def limit(self) -> int: ...  # noqa: D102

    @property
    def current(self) -> int: ...  # noqa: D102

    @property
    def changes(self) -> Mapping[str, int]: ...  # noqa: D102

    def begin_step(self, num_decoding: int) -> None:
        """Learn how many rows decode in this step; rows still reading their prompt do not count."""
        ...

    def guesses(self, request: Request) -> int:
        """Return the most draft tokens this row may get now."""
        ...


class NoSpeculation:
    """What runs when speculation is not configured."""

    limit = current = 0
    changes: Mapping[str, int] = MappingProxyType({})

    def begin_step(self, num_decoding: int) -> None:
        """Nothing depends on it."""

    def guesses(self, request: Request) -> int:
        """Return 0."""
        return 0


class BatchSizeSwitch:
    """Off above `limit` decoding rows; on again once at most 0.8 of it were seen for 16 steps in a row."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._resume_at = max(1, limit * 4 // 5)
        self._calm_steps = 0
        self.is_on = True

    def update(self, num_decoding: int) -> str | None:
        """Take one step into account; return the reason where the switch moved."""
        if num_decoding > self._limit:
            return self._turn_off()
        self._calm_steps = self._calm_steps + 1 if num_decoding <= self._resume_at else 0
        if self.is_on or self._calm_steps < RESUME_STEPS:
            return None
        self.is_on = True
        return "batch_size_fell"

    def _turn_off(self) -> str | None:
        self._calm_steps = 0
        was_on, self.is_on = self.is_on, False
        return "batch_size_rose" if was_on else None


class BatchSizeTable:
    """`[start, end, K]` ranges, inclusive; sizes between and behind them carry the K before."""

    def __init__(self, ranges: tuple[tuple[int, int, int], ...], limit: int) -> None:
        _check_table(ranges, limit)
        self._starts = [start for start, _, _ in ranges]
        self._guesses = [guesses for _, _, guesses in ranges]

    def guesses(self, num_decoding: int) -> int:
        """Return K for this many decoding rows."""
        return self._guesses[bisect_right(self._starts, max(1, num_decoding)) - 1]


def _check_table(ranges: tuple[tuple[int, int, int], ...], limit: int) -> None:
    name = "num_speculative_tokens_per_batch_size"
    if not ranges or ranges[0][0] != 1:
        raise ConfigError(f"{name} must begin with a range from batch size 1, got {list(ranges)}")
    previous_end = 0
    for start, end, guesses in ranges:
        if not previous_end < start <= end:
            raise ConfigError(f"{name}: range {[start, end, guesses]} must rise and lie behind {previous_end}")
        if not 0 <= guesses <= limit:
            raise ConfigError(f"{name}: K = {guesses} is outside 0..{limit} (num_speculative_tokens)")
        previous_end = end


class SpeculationPolicy:
    """Fixed K, or by batch size. `changes` counts changes of K by reason."""

    def __init__(self, config: SpeculativeConfig) -> None:
        limit, table = config.disable_by_batch_size, config.num_speculative_tokens_per_batch_size
        self._fixed = config.num_speculative_tokens
        self._switch = BatchSizeSwitch(limit) if limit is not None else None
        self._table = BatchSizeTable(table, self._fixed) if table is not None else None
        self._from_table = self._table.guesses(1) if self._table else self._fixed
        self._current = self._from_table
        self.changes: Counter[str] = Counter()

    @property
    def limit(self) -> int:
        """K as configured."""
        return self._fixed

    @property
    def current(self) -> int:
        """K of this step."""
        return self._current

    def begin_step(self, num_decoding: int) -> None:
        """Settle K for this step."""
        if self._table:
            self._follow_table(self._table.guesses(num_decoding))
        if self._switch:
            reason = self._switch.update(num_decoding)
            if reason:
                self.changes[reason] += 1
                state = "on again" if self._switch.is_on else "off"
                logger.info("speculation is %s: %d rows decode (%s)", state, num_decoding, reason)
        self._current = self._from_table if self._switch is None or self._switch.is_on else 0

    def _follow_table(self, guesses: int) -> None:
        if guesses != self._from_table:
            self._from_table = guesses
            self.changes["batch_size_table"] += 1

    def guesses(self, request: Request) -> int:
        """Return K of this step, or as many as a request wants, if those are fewer."""
        if not request.speculate:
            return 0
        wanted = request.num_speculative_tokens
        return self._current if wanted is None else min(wanted, self._current)


def make_policy(config: SpeculativeConfig | None) -> Policy:
    """Return the policy *config* asks for.

    Raises:
        ConfigError: the table of batch sizes does not make sense.
    """
    return NoSpeculation() if config is None else SpeculationPolicy(config)


def settled(config: SpeculativeConfig, costs: StepCosts | None, max_rows: int) -> tuple[SpeculativeConfig, str]:
    """Return *config* with its batch-size threshold, and a line about it.

    The user's own threshold or table stands; else it is derived from *costs*, where they were measured, for batches
    of at most *max_rows*.
    """
    if config.num_speculative_tokens_per_batch_size is not None:
        return config, "speculation: guesses by batch size, as configured"
    limit = config.disable_by_batch_size
    if limit is not None:
        return config, f"speculation: off above {limit} decoding rows, as configured"
    if costs is None:
        return config, "speculation: on at every batch size (no step costs were measured)"
    limit = derive(costs, config.num_speculative_tokens, max_rows)
    if limit is None:
        return config, f"speculation: on at every batch size up to {max_rows}, by measured step costs"
    return replace(config, disable_by_batch_size=limit), (
        f"speculation: off above {limit} decoding rows, by measured step costs at an assumed acceptance of "
        f"{ASSUMED_ACCEPTANCE:.0%}; disable_by_batch_size sets another threshold"
    )
