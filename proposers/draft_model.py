"""A smaller language model as the draft (Leviathan et al. 2023; Chen et al. 2023): chains, or trees as in EAGLE-2.

It samples with the target's own noise, so that draft tokens are likely to be accepted at any temperature.
"""

from collections.abc import Sequence as Seq
from typing import ClassVar, Self

import torch

from proposers.shared.chains import Chains
from proposers.shared.dynamic_tree import CHAINS, DynamicTree, TreeShape
from protos.config.engine import SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.draft_module import DraftRunner, on_a_worker


class DraftModelProposer:
    """Drafts a chain of `row.max_chain` tokens per row, or a tree of `row.k` nodes, with any causal language model."""

    on_worker: ClassVar[bool] = True
    method: ClassVar[str] = "draft_model"

    def __init__(self, runner: DraftRunner, shape: TreeShape = CHAINS) -> None:
        self.runner, self.shape = runner, shape

    @classmethod
    def create(cls, config: SpeculativeConfig, runner: DraftRunner | None) -> Self:
        """Return a proposer for the draft model that *runner* runs."""
        return cls(on_a_worker(runner, cls.method), TreeShape.of(config))

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Return a draft of `row.k` nodes for each row."""
        return self._chains(Chains(rows)) if self.shape.width == 1 else self._trees(rows)

    def _chains(self, chains: Chains) -> list[Draft]:
        """Draft one token per step until every row's chain is complete, or stopped early."""
        logits_RV = self.runner.catch_up(chains.active)
        for step in range(chains.steps):
            ids_R = self.runner.sample(chains.active, logits_RV, step)
            kept = chains.add(ids_R, self.runner.goes_on(chains.active))
            if not chains.active:
                break
            logits_RV = self.runner.extend(chains.active, ids_R[kept], step)
        return chains.drafts()

    def _trees(self, rows: Seq[DraftRow]) -> list[Draft]:
        return DynamicTree(self.runner, rows, _predict, self.shape).draft(self.runner.catch_up(rows))


def _predict(logits_NV: torch.Tensor, _depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits as they are, and no features: a language model is fed tokens only."""
    return logits_NV, logits_NV.new_empty(len(logits_NV), 0)
