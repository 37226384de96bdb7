"""A smaller language model as the draft (Leviathan et al. 2023; Chen et al. 2023): chains, or trees as in EAGLE-2.

It samples with the target's own noise, so that draft tokens are likely to be accepted at any temperature.
"""

from collections.abc import Sequence as Seq
from typing import ClassVar, Self

import torch

from proposers.shared.dynamic_tree import CHAINS, DynamicTree, TreeShape
from protos.config.engine import SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.draft_module import DraftRunner, on_a_worker


class DraftModelProposer:
    """Drafts a chain of `row.length` tokens per row, or a tree of `row.k` nodes, with any causal language model."""

    on_worker: ClassVar[bool] = True

    def __init__(self, runner: DraftRunner, shape: TreeShape = CHAINS) -> None:
        self.runner, self.shape = runner, shape

    @classmethod
    def create(cls, config: SpeculativeConfig, runner: DraftRunner | None) -> Self:
        """Return a proposer for the draft model that *runner* runs."""
        return cls(on_a_worker(runner, "draft_model"), TreeShape.of(config))

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Return a draft of `row.k` nodes for each row."""
        return self._chains(rows) if self.shape.width == 1 else self._trees(rows)

    def _chains(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Sample one token per step for every row that wants more; those with the longest chains come first."""
        order = sorted(range(len(rows)), key=lambda r: -rows[r].length)
        tokens: list[list[int]] = [[] for _ in rows]
        ids_R = torch.empty(0, dtype=torch.int64)
        for step in range(rows[order[0]].length if rows else 0):
            active = [rows[r] for r in order if rows[r].length > step]
            logits_RV = self._logits(active, ids_R[: len(active)], step)
            ids_R = self.runner.sample(active, logits_RV, step)
            for r, token in zip(order, ids_R.tolist(), strict=False):
                tokens[r].append(token)
        return [Draft(tuple(chain)) for chain in tokens]

    def _logits(self, rows: Seq[DraftRow], ids_R: torch.Tensor, step: int) -> torch.Tensor:
        """Return logits `[R, V]` after *step* draft tokens, of which *ids_R* are the last."""
        return self.runner.extend(rows, ids_R, step - 1) if step else self.runner.catch_up(rows)

    def _trees(self, rows: Seq[DraftRow]) -> list[Draft]:
        return DynamicTree(self.runner, rows, _predict, self.shape).draft(self.runner.catch_up(rows))


def _predict(logits_NV: torch.Tensor, _depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits as they are, and no features: a language model is fed tokens only."""
    return logits_NV, logits_NV.new_empty(len(logits_NV), 0)
