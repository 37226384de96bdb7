"""How many draft tokens pay: for chains token by token and row by row, for trees one size for all rows."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from protos.messages import Verdict
from runtime.policy.acceptance import AcceptanceModel, RequestAcceptance
from runtime.policy.allocation import Allocation, RoundCosts, allocate
from runtime.policy.cost_model import Ints
from runtime.policy.sizes import SizeModel, choose_size, ladder


@dataclass(frozen=True)
class DecodingRow:
    """A decoding row: its most draft tokens, and what its request showed so far."""

    limit: int
    acceptance: RequestAcceptance = field(default_factory=RequestAcceptance)


class Chooser(Protocol):
    """Measures acceptance, and chooses by it."""

    def choose(self, rows: Seq[DecodingRow], costs: RoundCosts) -> Allocation:
        """Return the number of draft tokens of each row that maximises tokens per second."""
        ...

    def record(self, verdict: Verdict, acceptance: RequestAcceptance, num_asked: int) -> None:
        """Learn from the verdict of a row.

        Args:
            verdict: of the row.
            acceptance: what its request showed before.
            num_asked: draft tokens that were asked for, at least one. A draft may have fewer, or none.
        """
        ...

    def age(self) -> None:
        """Let the next verdicts count more."""
        ...

    def describe(self) -> str:
        """Return what was measured, for a log line."""
        ...


class ChainChooser:
    """For drafts without branches, of at most *limit* tokens."""

    def __init__(self, limit: int) -> None:
        self._model = AcceptanceModel(limit)

    def choose(self, rows: Seq[DecodingRow], costs: RoundCosts) -> Allocation:
        """See `Chooser`."""
        self._model.refresh()
        survival_RD = self._model.survival([row.acceptance for row in rows])
        return allocate(survival_RD, _limits(rows), len(rows), costs, self._model.drafted)

    def record(self, verdict: Verdict, acceptance: RequestAcceptance, num_asked: int) -> None:
        """See `Chooser`."""
        self._model.observe(acceptance, num_asked, verdict.proposed, len(verdict.path))

    def age(self) -> None:
        """See `Chooser`."""
        self._model.age()

    def describe(self) -> str:
        """See `Chooser`."""
        return f"{self._model.rates[0]:.0%} of the first draft tokens are accepted"


class TreeChooser:
    """For drafts with branches, of at most *limit* nodes."""

    def __init__(self, limit: int) -> None:
        self._model = SizeModel(ladder(limit))

    def choose(self, rows: Seq[DecodingRow], costs: RoundCosts) -> Allocation:
        """See `Chooser`."""
        return choose_size(self._model, _limits(rows), len(rows), costs)

    def record(self, verdict: Verdict, acceptance: RequestAcceptance, num_asked: int) -> None:
        """See `Chooser`."""
        self._model.observe(num_asked, verdict.proposed, len(verdict.path))

    def age(self) -> None:
        """See `Chooser`."""
        self._model.age()

    def describe(self) -> str:
        """See `Chooser`."""
        return f"{self._model.accepted()[-1]:.2f} draft tokens of the largest tree are accepted"


def _limits(rows: Seq[DecodingRow]) -> Ints:
    return np.array([row.limit for row in rows], np.int64)
