"""Shared by EAGLE, EAGLE-3 and MTP: the module's own states are fed back in place of the target's features.

The module's states after a token give the logits of the next token, and the features fed together with it. A chain
follows the one token that the target would sample from those logits; a tree follows several
(`proposers.shared.dynamic_tree`).
"""

from collections.abc import Sequence as Seq
from typing import ClassVar, Protocol, Self

import torch

from proposers.shared.chains import Chains
from proposers.shared.dynamic_tree import DynamicTree, TreeShape
from protos.config.engine import SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.draft_module import DraftRunner, Module, on_a_worker


class AutoregressiveModule(Module, Protocol):
    """A module that is fed its own states.

    Attributes:
        max_tokens: length of the longest chain that it can draft.
    """

    max_tokens: int

    def predict(self, states_NX: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the states `[N, X]` after *step* draft tokens.

        Returns:
            fp32 logits over the target's vocabulary `[N, V]`, and the features to feed with the next token `[N, Y]`.
        """
        ...


class AutoregressiveProposer:
    """Drafts a chain, or a tree if `width` is more than 1, with a module that is fed its own states.

    Args:
        runner: runs an `AutoregressiveModule`.
        width: most children of a node, and most nodes of a level that get any.
        depth: levels of a tree, or length of the longest chain.
        threshold: of trees, see `TreeShape`.
    """

    on_worker: ClassVar[bool] = True
    method: ClassVar[str]

    def __init__(self, runner: DraftRunner, width: int, depth: int, threshold: float = 0.0) -> None:
        self.runner, self.shape = runner, TreeShape(width, depth, threshold)
        self.module: AutoregressiveModule = runner.module

    @classmethod
    def create(cls, config: SpeculativeConfig, runner: DraftRunner | None) -> Self:
        """See `protos.draft_module.LearnedProposer`."""
        runner = on_a_worker(runner, cls.method)
        shape = TreeShape.of(config)
        return cls(runner, shape.width, min(shape.depth, runner.module.max_tokens), shape.threshold)

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Return a chain of `row.max_chain` tokens for each row, or a tree of `row.k` nodes."""
        return self._chains(Chains(rows, self.shape.depth)) if self.shape.width == 1 else self._trees(rows)

    def _chains(self, chains: Chains) -> list[Draft]:
        """Draft one token per step until every row's chain is complete, or stopped early."""
        states_RX = self.runner.catch_up(chains.rows)
        for step in range(chains.steps):
            logits_RV, features_RX = self.module.predict(states_RX, step)
            ids_R = self.runner.sample(chains.active, logits_RV, step)
            kept = chains.add(ids_R, self.runner.goes_on(chains.active))
            if not chains.active:
                break
            states_RX = self.runner.extend(chains.active, ids_R[kept], step, features_RX[kept])
        return chains.drafts()

    def _trees(self, rows: Seq[DraftRow]) -> list[Draft]:
        return DynamicTree(self.runner, rows, self.module.predict, self.shape).draft(self.runner.catch_up(rows))
