"""Early stop: a draft ends where its own confidence is low (DISCO, Mamou et al. 2024, arXiv 2405.04304).

A chain gets no further token after one whose confidence is below the threshold, as with
`assistant_confidence_threshold` of `transformers`; that token itself stays. The confidence of a draft token is the
probability that the draft gives it, before penalties: for greedy requests at temperature 1, for others at their own.
Under "coupled" the target uses the noise that sampled the draft token, so there it is the probability given that noise,
as in `workers.sampling.sample.candidates`. It tells much better which tokens survive: a token with a small probability
was sampled because its noise is large, and that the target shares.

**Exactness.** Under the rule "coupled" every emitted token is sampled by the target, so drafts may end anywhere. Under
"standard" and "block" the length L of a chain may depend on its tokens if it is a stopping time: whether token i + 1 is
drawn depends only on what was known before, tokens 1 to i included, and every token that was drawn is verified.

- "standard": let tokens 1 to i be accepted. What is emitted next has the distribution p after them in either case:
  where L = i it is sampled from p, and where L > i token i + 1 is drawn from q, with noise that the decision did not
  depend on, and accepted or replaced, which gives p. After a rejection the round ends. By induction over i the emitted
  text has the target's distribution.
- "block": given drawn tokens 1 to i, at least i are accepted with probability P_i, and what follows them then has the
  distribution p. Where L = i, that is the rule for the last token. Where L > i, token i + 1 is v with probability q(v)
  and, by induction from the end, then kept with P_(i+1) = min(1, P_i p(v) / q(v)): min(q(v), P_i p(v)) together. With
  Z = sum of (P_i p - q)+, the rest has the probability 1 - sum of min(q, P_i p) = Z + 1 - P_i. Of it the rule accepts
  exactly i tokens with probability Z / (Z + 1 - P_i), and samples the next from (P_i p - q)+ / Z. So v follows with
  min(q(v), P_i p(v)) + (P_i p(v) - q(v))+ = P_i p(v). The rule reads p and q of the next token only: it does not
  depend on what L will be.

Were a token left out for its own confidence, both would fail: tokens of low probability would be drawn, but seldom
verified. What earlier rounds showed may be used, because every round draws new noise.
`tests/workers/verification/test_early_stop.py` proves all of this by enumeration.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import torch

from protos.config.engine import PROBABILISTIC_RULES, SpeculativeConfig
from workers.draft.survival import LearntStop
from workers.sampling.sample import MIN_TEMPERATURE, Floats, Ints, Logits
from workers.sampling.sampler import Sampler

ConfidenceOf = Callable[[torch.Tensor, torch.Tensor, Ints, Ints], torch.Tensor]
"""Maps logits `[R, V]`, the tokens sampled from them, their slots and their positions to confidences, float `[R]`.

NaN, which is below every threshold, where the logits are NaN.
"""


class StopRule(Protocol):
    """Decides by the confidences of tokens which chains go on."""

    def begin(self) -> None:
        """Begin a round."""
        ...

    def take(self, slots_R: Ints, ids_R: Ints, confidence_R: Floats) -> None:
        """Take the newest token of each row."""
        ...

    def goes_on(self, slots: Seq[int]) -> list[bool]:
        """Return whether the chain of each slot should have another token."""
        ...


class FixedStop:
    """Goes on while the newest token has at least this confidence.

    Args:
        threshold: least confidence.
        num_slots: S.
    """

    def __init__(self, threshold: float, num_slots: int) -> None:
        self._threshold = threshold
        self._newest_S: Floats = np.ones(num_slots)

    def begin(self) -> None:
        """See `StopRule`: there is nothing to do."""

    def take(self, slots_R: Ints, ids_R: Ints, confidence_R: Floats) -> None:
        """See `StopRule`."""
        self._newest_S[slots_R] = confidence_R

    def goes_on(self, slots: Seq[int]) -> list[bool]:
        """See `StopRule`."""
        found: list[bool] = (self._newest_S[slots] >= self._threshold).tolist()
        return found


class EarlyStop:
    """Computes the confidences of sampled tokens, for a rule.

    Args:
        rule: decides which chains go on.
        confidence_of: of sampled tokens.
    """

    def __init__(self, rule: StopRule, confidence_of: ConfidenceOf) -> None:
        self.rule, self._confidence_of = rule, confidence_of

    def begin(self, least_survival: float) -> None:
        """Begin a round, in which draft tokens pay that are accepted with probability *least_survival*."""
        if isinstance(self.rule, LearntStop):
            self.rule.least = least_survival
        self.rule.begin()

    def watch(self, logits_RV: torch.Tensor, ids_R: torch.Tensor, slots_R: Ints, index_R: Ints) -> Ints:
        """Take the tokens that were just sampled from these logits, for these positions; return them on the host.

        They come to the host together with their confidences, in one transfer.
        """
        own_R = self._confidence_of(logits_RV, ids_R, slots_R, index_R)
        both_2R = torch.stack((ids_R.double(), own_R.double())).cpu().numpy()
        ids: Ints = both_2R[0].astype(np.int64)
        self.rule.take(slots_R, ids, both_2R[1])
        return ids

    def goes_on(self, slots: Seq[int]) -> list[bool]:
        """Return whether the chain of each slot should have another token."""
        return self.rule.goes_on(slots)


def by_probability(logits_RV: torch.Tensor, ids_R: torch.Tensor, temperature_R: Logits) -> torch.Tensor:
    """Return the probability of each id, float32 `[R]`."""
    if (temperature_R >= MIN_TEMPERATURE).any():
        scale_R = torch.from_numpy(np.where(temperature_R >= MIN_TEMPERATURE, temperature_R, np.float32(1)))
        logits_RV = logits_RV / scale_R.to(logits_RV.device)[:, None]
    own_R = logits_RV.gather(1, ids_R[:, None])[:, 0]
    return (own_R - logits_RV.logsumexp(1)).exp()


def make_early_stop(speculative: SpeculativeConfig, sampler: Sampler) -> EarlyStop | None:
    """Return the early stop that is configured; None where drafts have the length that was asked for."""

    def by_draft(logits_RV: torch.Tensor, ids_R: torch.Tensor, slots_R: Ints, _index_R: Ints) -> torch.Tensor:
        return by_probability(logits_RV, ids_R, sampler.limits(slots_R).temperature)

    def by_draft_and_noise(logits_RV: torch.Tensor, _ids_R: torch.Tensor, slots_R: Ints, index_R: Ints) -> torch.Tensor:
        return sampler.candidates(logits_RV, slots_R, index_R, 1)[1][:, 0].exp()

    threshold = speculative.assistant_confidence_threshold
    if threshold is None:
        return None
    is_independent = speculative.rejection_sample_method in PROBABILISTIC_RULES
    confidence_of = by_draft if is_independent else by_draft_and_noise
    rule = LearntStop(sampler.slots) if threshold == "auto" else FixedStop(threshold, len(sampler.slots.known_len))
    return EarlyStop(rule, confidence_of)
