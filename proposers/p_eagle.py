"""P-EAGLE: an EAGLE-3 head that predicts all draft tokens in one forward.

The first draft token is EAGLE-3's. The input for each of the others is a mask token and a learned state, projected by
`fc`, in place of the target's.
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
    sees_later = is_masked = False
    reads_states = "logits"

    def __init__(
        self, spec: format_of.ParallelEagleSpec, tensors: dict[str, torch.Tensor], weights: DraftWeights
    ) -> None:
        mask_F = tensors.pop("mask_hidden").to(weights.device, weights.dtype)
        super().__init__(spec, tensors, weights)
        self.mask_token_id = spec.mask_token_id
        self._masked_H = self.take_in(mask_F)

    def mask_features(self, count: int) -> torch.Tensor:
        """Return the learned state, projected by `fc`, for each position."""
        return self._masked_H.expand(count, -1)

    def logits(self, states_NH: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits `[N, V]` for states before the last norm."""
        return self.predict(states_NH, 0)[0]


class ParallelEagleProposer(ParallelProposer):
    """Drafts with a P-EAGLE head."""

    method: ClassVar[str] = "p_eagle"
    features_of = Eagle3Proposer.features_of

    @classmethod
    def build(cls, config: SpeculativeConfig, weights: DraftWeights) -> ParallelEagleModule:
        """See `protos.draft_module.LearnedProposer`."""
        return ParallelEagleModule(*stored(format_of, weights), weights)
