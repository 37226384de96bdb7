"""Chains, drafted one token per step. A row leaves the batch when its chain is complete, or stops early."""

from collections.abc import Sequence as Seq

import torch

from protos.config.engine import MAX_SPECULATIVE_TOKENS
from protos.draft import Draft, DraftRow

Kept = slice | list[int]
"""Which rows remain, as an index into what belongs to the rows: a slice, which copies nothing, where it can be one."""


class Chains:
    """The chains of one round, drafted together.

    Args:
        rows: the rows to draft for.
        max_steps: the longest chain that can be drafted.

    Attributes:
        rows: the longest chains first, so that rows that are complete are the last ones.
        steps: length of the longest chain.
        active: the rows that need another token, in the order of `rows`.
    """

    def __init__(self, rows: Seq[DraftRow], max_steps: int = MAX_SPECULATIVE_TOKENS) -> None:
        lengths = [min(max_steps, row.max_chain) for row in rows]
        self._order = sorted(range(len(rows)), key=lambda i: -lengths[i])
        self.rows = [rows[i] for i in self._order]
        self._lengths = [lengths[i] for i in self._order]
        self.steps = self._lengths[0] if rows else 0
        self._tokens: list[list[int]] = [[] for _ in rows]
        self._leave_but([place for place in range(len(rows)) if self._is_short(place)])

    def add(self, ids_R: torch.Tensor, goes_on_R: Seq[bool] | None = None) -> Kept:
        """Append a token to each active row. Rows that are complete leave, and those that are not to go on.

        Returns:
            Which of the rows that were active still are.
        """
        for place, token in zip(self._places, ids_R.tolist(), strict=True):
            self._tokens[place].append(token)
        if self._places and (goes_on_R is None or all(goes_on_R)) and self._is_short(self._places[-1]):
            return slice(len(self._places))  # the last one is the shortest, and all go on
        kept = [
            i for i, place in enumerate(self._places) if self._is_short(place) and (goes_on_R is None or goes_on_R[i])
        ]
        self._leave_but([self._places[i] for i in kept])
        return slice(len(kept)) if not kept or kept[-1] == len(kept) - 1 else kept

    def drafts(self) -> list[Draft]:
        """Return the chains in the order in which the rows were given."""
        drafts = [Draft(())] * len(self.rows)
        for i, tokens in zip(self._order, self._tokens, strict=True):
            drafts[i] = Draft(tuple(tokens))
        return drafts

    def _is_short(self, place: int) -> bool:
        return len(self._tokens[place]) < self._lengths[place]

    def _leave_but(self, places: list[int]) -> None:
        self._places = places
        self.active = [self.rows[place] for place in places]
