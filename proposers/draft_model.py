"""A smaller model of the same vocabulary drafts one token after another (Leviathan et al. 2023; Chen et al. 2023).

It samples with the target's own noise, so that its guesses stay right at any temperature (DESIGN section 5).
"""

from collections.abc import Sequence as Seq
from typing import ClassVar, Self

import torch

from proposers.chains import draft_chains
from protos.config import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from protos.errors import ConfigError
from protos.interfaces import DraftRow, Needs
from protos.learned import DraftRunner
from protos.messages import Draft


class DraftModelProposer:
    """Drafts a chain of k tokens a row with any causal language model."""

    needs: ClassVar[Needs] = "none"
    on_worker: ClassVar[bool] = True

    def __init__(self, runner: DraftRunner) -> None:
        self.runner = runner

    @classmethod
    def create(cls, config: SpeculativeConfig, runner: DraftRunner | None) -> Self:
        """Return a proposer for the draft model that *runner* runs."""
        if runner is None:
            raise ConfigError("method 'draft_model' runs on a draft worker, and there is none")
        return cls(runner)

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Return `row.k` tokens for each row."""
        return draft_chains(self.runner, rows, self._logits_behind, MAX_SPECULATIVE_TOKENS)

    def _logits_behind(self, rows: Seq[DraftRow], ids: torch.Tensor, step: int) -> torch.Tensor:
        return self.runner.extend(rows, ids, step - 1) if step else self.runner.catch_up(rows)
