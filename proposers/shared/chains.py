"""Chains, drafted one token per step. A row leaves the batch when its chain is complete."""

from collections.abc import Sequence as Seq

import torch

from protos.config.engine import MAX_SPECULATIVE_TOKENS
from protos.draft import Draft, DraftRow


class Chains:
    """The chains of one round, drafted together.

    Args:
        rows: the rows to draft for.
        max_steps: the longest chain that can be drafted.

    Attributes:
        rows: the longest chains first, so that the active rows of a step are the first ones of the step before.
        steps: length of the longest chain.
    """

    def __init__(self, rows: Seq[DraftRow], max_steps: int = MAX_SPECULATIVE_TOKENS) -> None:
        self._order = sorted(range(len(rows)), key=lambda i: -rows[i].length)
        self.rows = [rows[i] for i in self._order]
        self.steps = min(max_steps, self.rows[0].length if rows else 0)
        self._columns: list[list[int]] = []

    def active(self, step: int) -> list[DraftRow]:
        """Return the rows that need token number *step*, from 0."""
        return self.rows[: sum(row.length > step for row in self.rows)] if step < self.steps else []

    def add(self, ids_R: torch.Tensor) -> None:
        """Append a token to each active row of this step."""
        self._columns.append(ids_R.tolist())

    def drafts(self) -> list[Draft]:
        """Return the chains in the order in which the rows were given."""
        drafts = [Draft(())] * len(self.rows)
        for place, i in enumerate(self._order):
            drafts[i] = Draft(tuple(column[place] for column in self._columns[: self.rows[place].length]))
        return drafts
