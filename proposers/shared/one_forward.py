"""Shared by PARD, P-EAGLE and DFlash: one forward over mask tokens gives the logits of all draft tokens.

The tokens are still sampled one after another, since penalties count those before.
"""

from collections.abc import Sequence as Seq
from typing import ClassVar, Protocol, Self

import torch

from proposers.shared.chains import Chains
from protos.config.engine import SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.draft_module import DraftRunner, Module, on_a_worker


class MaskedModule(Module, Protocol):
    """A module that predicts the tokens of masked positions.

    Attributes:
        mask_token_id: fed at masked positions.
        lead: number of fed positions minus number of draft tokens. -1: the first draft token is predicted by the newest
            known token, which was fed before; 0 and 1: the newest known token is the first of the block, and predicts
            a draft token (0) or none (1).
        max_tokens: most draft tokens; those of a whole block.
        sees_later: positions of a block attend to later ones in some layer, so that the whole block is fed.
        is_masked: layers decide which positions of a block attend to each other, and which ones before it they attend
            to; else all are causal.
    """

    mask_token_id: int
    lead: int
    max_tokens: int
    sees_later: bool
    is_masked: bool

    def mask_features(self, count: int) -> torch.Tensor | None:
        """Return the features fed with the tokens of *count* positions, `[N, X]`; None if there are none."""
        ...

    def logits(self, states_NX: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits, `[N, V]`."""
        ...


class ParallelProposer:
    """Drafts chains with a module that predicts all their tokens in one forward."""

    on_worker: ClassVar[bool] = True
    method: ClassVar[str]

    def __init__(self, runner: DraftRunner) -> None:
        self.runner = runner
        self.module: MaskedModule = runner.module

    @classmethod
    def create(cls, config: SpeculativeConfig, runner: DraftRunner | None) -> Self:
        """See `protos.draft_module.LearnedProposer`."""
        return cls(on_a_worker(runner, cls.method))

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Return a chain of `row.max_chain` tokens for each row, or of as many as the module can draft."""
        chains = Chains(rows, self.module.max_tokens)
        states_RPX = self._states(chains)
        for step in range(chains.steps):
            logits_RV = self.module.logits(states_RPX[: len(chains.active), step])
            chains.add(self.runner.sample(chains.active, logits_RV, step))
        return chains.drafts()

    def _states(self, chains: Chains) -> torch.Tensor:
        """Return the output for each draft token, `[R, P, X]`, padded at the end for rows with fewer predicted ones."""
        lead = self.module.lead
        counts = [self._num_predicted(row, chains.steps) + lead for row in chains.rows]
        if not sum(counts):
            return self.runner.catch_up(chains.rows).unsqueeze(1)
        newest_R = self.runner.newest(chains.rows)
        count_R = torch.tensor(counts, device=newest_R.device)
        row_N = torch.arange(len(counts), device=newest_R.device).repeat_interleave(count_R)
        offset_R = count_R.cumsum(0) - count_R
        tokens_N = torch.full_like(row_N, self.module.mask_token_id)
        if lead >= 0:
            tokens_N[offset_R] = newest_R
        known_RX, block_NX = self.runner.block(
            chains.rows,
            row_N,
            tokens_N,
            self.module.mask_features(len(row_N)),
            sees_all=self.module.is_masked,
        )
        states_RPX = block_NX.new_zeros(len(counts), max(counts) + 1, block_NX.shape[1])
        states_RPX[:, 0] = known_RX
        states_RPX[row_N, torch.arange(len(row_N), device=row_N.device) - offset_R[row_N] + 1] = block_NX
        return states_RPX[:, lead + 1 :]

    def _num_predicted(self, row: DraftRow, steps: int) -> int:
        """Return how many tokens the forward predicts for a row that drafts at most *steps*.

        If positions attend to later ones, it is the whole block, as in training: masks change what is predicted before
        them. A row whose blocks are too short for it gets fewer.
        """
        wanted = min(row.max_chain, steps)
        return max(wanted, min(self.module.max_tokens, row.room)) if self.module.sees_later else wanted
