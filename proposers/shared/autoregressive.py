"""What EAGLE, EAGLE-3 and MTP share: states that are fed back in place of the target's features.

The module's states behind a token say which tokens may follow and what is fed beside them. A chain follows the one
token that the target would choose by them; a tree several (`proposers.shared.dynamic_tree`).
"""

from collections.abc import Sequence as Seq
from typing import ClassVar, Protocol, Self

import torch

from proposers.shared.chains import Chains
from proposers.shared.dynamic_tree import Tree, TreeShape
from protos.config.engine import SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.draft_module import DraftRunner, Module, on_a_worker


class AutoregressiveModule(Module, Protocol):
    """A module whose states are fed back.

    Attributes:
        most: tokens it can guess one behind another.
    """

    most: int

    def behind(self, states_NX: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what states `[N, X]` behind *step* drafted tokens say.

        Returns:
            fp32 logits over the target's vocabulary `[N, V]`, and what is fed beside a token chosen by them `[N, Y]`.
        """
        ...


class AutoregressiveProposer:
    """Drafts a chain, or a tree where `width` is more than 1, with a module that is fed its own states.

    Args:
        runner: runs a `AutoregressiveModule` module.
        width: most children of a node, and nodes of a level that get any.
        depth: levels of a tree, and the longest chain.
    """

    on_worker: ClassVar[bool] = True
    method: ClassVar[str]

    def __init__(self, runner: DraftRunner, width: int, depth: int) -> None:
        self.runner, self.shape = runner, TreeShape(width, depth)
        self.module: AutoregressiveModule = runner.module

    @classmethod
    def create(cls, config: SpeculativeConfig, runner: DraftRunner | None) -> Self:
        """See `protos.draft_module.LearnedProposer`."""
        runner = on_a_worker(runner, cls.method)
        shape = TreeShape.of(config)
        return cls(runner, shape.width, min(shape.depth, runner.module.most))

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Return a chain of `row.k` tokens for each row, or a tree of `row.k` nodes."""
        return self._chains(Chains(rows, self.shape.depth)) if self.shape.width == 1 else self._trees(rows)

    def _chains(self, chains: Chains) -> list[Draft]:
        states_RX = self.runner.catch_up(chains.rows)
        for step in range(chains.steps):
            logits_RV, features_RX = self.module.behind(states_RX, step)
            ids_R = self.runner.sample(chains.active(step), logits_RV, step)
            chains.add(ids_R)
            going = chains.active(step + 1)
            if going:
                states_RX = self.runner.extend(going, ids_R[: len(going)], step, features_RX[: len(going)])
        return chains.drafts()

    def _trees(self, rows: Seq[DraftRow]) -> list[Draft]:
        return Tree(self.runner, rows, self.module.behind, self.shape).grow(self.runner.catch_up(rows))
