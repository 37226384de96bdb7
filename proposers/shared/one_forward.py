"""What PARD, P-EAGLE and DFlash share: all tokens of a draft come out of one forward, over masks that stand for them.

Each token is chosen by the target's own sampling all the same, one after the other, since penalties count those before.
"""

from collections.abc import Sequence as Seq
from typing import ClassVar, Protocol, Self

import torch

from proposers.shared.chains import Chains
from protos.config.engine import SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.draft_module import DraftRunner, Module, on_a_worker


class MaskedModule(Module, Protocol):
    """A module that guesses at masks.

    Attributes:
        mask_token_id: fed at masked places.
        lead: fed places more than guesses. -1: the first guess comes from behind the newest known token, which was fed
            already; 0 and 1: the newest known token leads the block, and its own place gives a guess, or none.
        most: guesses that it can make.
        sees_all: each place of a block sees the others.
    """

    mask_token_id: int
    lead: int
    most: int
    sees_all: bool

    def beside(self, count: int) -> torch.Tensor | None:
        """Return what is fed beside the tokens of *count* places, `[N, X]`; None where nothing is."""
        ...

    def logits(self, states_NX: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits, `[N, V]`."""
        ...


class ParallelProposer:
    """Drafts chains with a module that guesses all their tokens at once."""

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
        """Return a chain of `row.k` tokens for each row, of fewer where the module cannot guess so many."""
        chains = Chains(rows, self.module.most)
        states_RPX = self._states(chains)
        for step in range(chains.steps):
            active = chains.active(step)
            logits_RV = self.module.logits(states_RPX[: len(active), step])
            chains.add(self.runner.sample(active, logits_RV, step))
        return chains.drafts()

    def _states(self, chains: Chains) -> torch.Tensor:
        """Return what comes behind each guess's place, `[R, P, X]`; rows of fewer guesses are filled up at the end."""
        lead = self.module.lead
        counts = [min(row.k, chains.steps) + lead for row in chains.rows]
        if not sum(counts):
            return self.runner.catch_up(chains.rows).unsqueeze(1)
        newest_R = self.runner.newest(chains.rows)
        count_R = torch.tensor(counts, device=newest_R.device)
        row_N = torch.arange(len(counts), device=newest_R.device).repeat_interleave(count_R)
        offset_R = count_R.cumsum(0) - count_R
        tokens_N = torch.full_like(row_N, self.module.mask_token_id)
        if lead >= 0:
            tokens_N[offset_R] = newest_R
        behind_RX, block_NX = self.runner.block(
            chains.rows,
            row_N,
            tokens_N,
            self.module.beside(len(row_N)),
            sees_all=self.module.sees_all,
        )
        states_RPX = block_NX.new_zeros(len(counts), counts[0] + 1, block_NX.shape[1])
        states_RPX[:, 0] = behind_RX
        states_RPX[row_N, torch.arange(len(row_N), device=row_N.device) - offset_R[row_N] + 1] = block_NX
        return states_RPX[:, lead + 1 :]
