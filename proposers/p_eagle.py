"""P-EAGLE: an EAGLE-3 head that guesses all tokens in one forward.

The first guess is EAGLE-3's. Each of the others has a place of its own, made of a mask token and of what `fc` makes of
a learned state where the target's would be.
"""

from typing import ClassVar

import torch

from proposers.eagle3 import Eagle3Module, Eagle3Proposer
from proposers.formats import p_eagle as format_of
from proposers.shared.decoder import stored
from proposers.shared.one_forward import ParallelProposer
from protos.config.engine import SpeculativeConfig
from protos.draft_module import DraftWeights


class ParallelEagleModule(Eagle3Module):
    """See `protos.draft_module.Module` and `proposers.shared.one_forward.MaskedModule`; outputs states, `[1, T, H]`."""

    lead = -1
    sees_all = False

    def __init__(
        self, spec: format_of.ParallelEagleSpec, tensors: dict[str, torch.Tensor], parts: DraftWeights
    ) -> None:
        mask_F = tensors.pop("mask_hidden").to(parts.device, parts.dtype)
        super().__init__(spec, tensors, parts)
        self.mask_token_id = spec.mask_token_id
        self._masked_H = self.take_in(mask_F)

    def beside(self, count: int) -> torch.Tensor:
        """Return the learned state, behind `fc`, once for each place."""
        return self._masked_H.expand(count, -1)

    def logits(self, states_NH: torch.Tensor) -> torch.Tensor:
        """Return what the head says of states before the last norm, fp32 `[N, V]`."""
        return self.behind(states_NH, 0)[0]


class ParallelEagleProposer(ParallelProposer):
    """Drafts with a P-EAGLE head."""

    method: ClassVar[str] = "p_eagle"
    features_of = Eagle3Proposer.features_of

    @classmethod
    def build(cls, config: SpeculativeConfig, parts: DraftWeights) -> ParallelEagleModule:
        """See `protos.draft_module.LearnedProposer`."""
        return ParallelEagleModule(*stored(format_of, parts), parts)
