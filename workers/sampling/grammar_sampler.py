"""Sampling where some rows have a grammar: what it forbids is masked before the ordinary sampler chooses."""

from collections.abc import Sequence as Seq

import numpy as np
import torch

from protos.draft import Draft
from protos.messages import NewSequence, Row
from workers.sampling.grammar_slots import Grammars
from workers.sampling.matcher import Bits
from workers.sampling.sample import Ints
from workers.sampling.sampler import Sampler, by_part

NOT_A_NUMBER = "the model's logits for this sequence are not numbers (NaN)"
NOTHING_LEFT = (
    "structured_outputs: no token is left to choose: the grammar forbids all that allowed_token_ids, bad_words, "
    "logit_bias and min_tokens allow"
)
WORD_BITS = 8


class GrammarSampler:
    """The target's sampler: `workers.sampling.sampler.Sampler`, with the grammars of the sequences that have one.

    Args:
        sampler: chooses; shared with a draft in the same process, which guesses without grammars.
        grammars: what is allowed.
    """

    def __init__(self, sampler: Sampler, grammars: Grammars) -> None:
        self.slots, self.vocab_size = sampler.slots, sampler.vocab_size
        self._sampler, self._grammars = sampler, grammars

    def expect(self, new: Seq[NewSequence]) -> None:
        """Prepare for the sequences that joined the slots."""
        self._grammars.expect(new)

    def prune(self, rows: Seq[Row], drafts: Seq[Draft]) -> Seq[Draft]:
        """Return *drafts* without what the grammars forbid, which could never be accepted."""
        if not any(draft.tokens and self.slots.constrained[row.slot] for row, draft in zip(rows, drafts, strict=True)):
            return drafts
        return self._grammars.prune(rows, drafts)

    def sample(self, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> torch.Tensor:
        """As `Sampler.sample`."""
        constrained_N = self.slots.constrained[slots_N]
        if not constrained_N.any():
            return self._sampler.sample(logits_NV, slots_N, index_N)
        return by_part(constrained_N, self._mask_and_sample, self._sampler.sample, (logits_NV, slots_N, index_N))

    def law(self, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> torch.Tensor:
        """As `Sampler.law`."""
        constrained_N = self.slots.constrained[slots_N]
        if constrained_N.any():
            at = np.flatnonzero(constrained_N)
            bits_M = self._grammars.allowed(slots_N[at].tolist(), index_N[at].tolist())
            at_M = torch.from_numpy(at).to(logits_NV.device)
            logits_NV = logits_NV[:, : self.vocab_size].clone()
            logits_NV[at_M] = masked(logits_NV[at_M], bits_M)
        return self._sampler.law(logits_NV, slots_N, index_N)

    def seeds(self, slots_N: Ints) -> Ints:
        """As `Sampler.seeds`."""
        return self._sampler.seeds(slots_N)

    def _mask_and_sample(self, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> torch.Tensor:
        bits_N = self._grammars.allowed(slots_N.tolist(), index_N.tolist())
        return self._sampler.sample(masked(logits_NV[:, : self.vocab_size], bits_N), slots_N, index_N)

    def why_none(self, slot: int, logits_MV: torch.Tensor) -> str:
        """Return why no token could be chosen for the sequence in *slot*, from the logits of its positions."""
        if not self.slots.constrained[slot]:
            return NOT_A_NUMBER
        return self._grammars.reason(slot) or (NOT_A_NUMBER if bool(logits_MV.isnan().any()) else NOTHING_LEFT)


def masked(logits_NV: torch.Tensor, bits_N: Seq[Bits]) -> torch.Tensor:
    """Return a copy of float32 logits, -inf for ids whose bit is not set; what is no number stays none."""
    bits_NB = np.stack(bits_N)
    allowed_NV = _unpacked(bits_NB, logits_NV.shape[1], logits_NV.device)
    return logits_NV + torch.where(allowed_NV, 0.0, -torch.inf)


def _unpacked(bits_NB: Bits, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Return bool `[N, V]` on *device*; the bits travel packed."""
    if device.type == "cpu":
        return torch.from_numpy(np.unpackbits(bits_NB, axis=1, count=vocab_size, bitorder="little")).bool()
    packed_NB = torch.from_numpy(bits_NB).to(device)
    places = torch.arange(WORD_BITS, dtype=torch.uint8, device=device)
    spread_NB8 = packed_NB[:, :, None] >> places & 1
    return spread_NB8.flatten(1)[:, :vocab_size].bool()
