"""A smaller model drafts one token after another (Leviathan et al. 2023; Chen et al. 2023), or a tree of them.

It samples with the target's own noise, so that its guesses stay right at any temperature (DESIGN section 5).
"""

from collections.abc import Sequence as Seq
from typing import ClassVar, Self

import torch

from proposers.shared.chains import Chains
from proposers.shared.dynamic_tree import CHAINS, Tree, TreeShape
from protos.config.engine import SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.draft_module import DraftRunner, on_a_worker


class DraftModelProposer:
    """Drafts a chain of k tokens a row, or a tree of k nodes, with any causal language model."""

    on_worker: ClassVar[bool] = True

    def __init__(self, runner: DraftRunner, shape: TreeShape = CHAINS) -> None:
        self.runner, self.shape = runner, shape

    @classmethod
    def create(cls, config: SpeculativeConfig, runner: DraftRunner | None) -> Self:
        """Return a proposer for the draft model that *runner* runs."""
        return cls(on_a_worker(runner, "draft_model"), TreeShape.of(config))

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Return `row.k` tokens for each row."""
        return self._chains(rows) if self.shape.width == 1 else self._trees(rows)

    def _chains(self, rows: Seq[DraftRow]) -> list[Draft]:
        chains, ids_R = Chains(rows), torch.empty(0, dtype=torch.int64)
        for step in range(chains.steps):
            active = chains.active(step)
            logits_RV = self._behind(active, ids_R[: len(active)], step)
            ids_R = self.runner.sample(active, logits_RV, step)
            chains.add(ids_R)
        return chains.drafts()

    def _behind(self, rows: Seq[DraftRow], ids_R: torch.Tensor, step: int) -> torch.Tensor:
        """Return logits `[R, V]` behind the *step* tokens drafted so far, of which *ids_R* are the last."""
        return self.runner.extend(rows, ids_R, step - 1) if step else self.runner.catch_up(rows)

    def _trees(self, rows: Seq[DraftRow]) -> list[Draft]:
        return Tree(self.runner, rows, _alone, self.shape).grow(self.runner.catch_up(rows))


def _alone(logits_NV: torch.Tensor, _depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A language model says logits, and is fed nothing beside tokens."""
    return logits_NV, logits_NV.new_empty(len(logits_NV), 0)
