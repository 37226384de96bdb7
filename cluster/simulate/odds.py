"""What drafts can expect of an answer that was sampled: how likely its tokens were drafted, as they were sampled.

The noise that drew an answer is often not known. But where the log has the target's most likely tokens with their
probabilities p, and the draft gives its own distribution q, the probability that the draft had the logged token x is
known, given x:

- `coupled`: 1 / sum over j of max(p_j, q_j p_x / q_x), from the probability that two samples with the same noise agree;
- `standard`: min(1, q_x / p_x).

So a learned draft is fed the logged tokens, whatever it would have drafted. How many of them count as accepted is drawn
with these probabilities; the product of them is what is expected at each depth.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protos.draft import Draft
from protos.messages import Sampling

Floats = npt.NDArray[np.float64]
COUPLED = "coupled"
LEAST = 1e-12
"""Stands for probabilities that are not known to be 0."""


@dataclass(frozen=True)
class ExpectedAcceptance:
    """Sums over the steps that had a draft: by depth, the probability that so many draft tokens are accepted."""

    num_steps: int
    survival: tuple[float, ...]

    @classmethod
    def total(cls, parts: Seq["ExpectedAcceptance"]) -> "ExpectedAcceptance":
        """Return the sum of *parts*."""
        survival_D = np.zeros(max((len(part.survival) for part in parts), default=0))
        for part in parts:
            survival_D[: len(part.survival)] += part.survival
        return cls(sum(part.num_steps for part in parts), tuple(survival_D.tolist()))

    @property
    def by_depth(self) -> tuple[float, ...]:
        """The expected share of drafts of which so many tokens are accepted, by depth."""
        return tuple(each / self.num_steps for each in self.survival) if self.num_steps else ()

    @property
    def length(self) -> float | None:
        """Expected tokens of a step that had a draft; None without any."""
        return 1 + sum(self.by_depth) if self.num_steps else None


def target_probs(
    logprobs: Mapping[int, float], vocab_size: int, sampling: Sampling, like_V: Floats | None = None
) -> Floats:
    """Return the distribution that a token was sampled from, float64 `[V]`.

    Args:
        logprobs: of the raw logits, by token id. The other ids share the mass that is left; none gets more than the
            least likely of these.
        vocab_size: V.
        sampling: temperature and limits.
        like_V: float64, a distribution by which they share it; None: alike.
    """
    import torch  # noqa: PLC0415 - when an engine is built, not before

    from workers.sampling.sample import SamplingLimits, distribution  # noqa: PLC0415

    ids, known = np.fromiter(logprobs, np.int64), np.fromiter(logprobs.values(), np.float64)
    share_V = np.ones(vocab_size) if like_V is None else like_V + LEAST
    share_V[ids] = 0.0
    left_V = share_V * max(1.0 - float(np.exp(known).sum()), LEAST) / max(float(share_V.sum()), LEAST)
    logits_V = np.minimum(np.log(np.maximum(left_V, LEAST)), known.min())
    logits_V[ids] = known
    logits_1V = torch.from_numpy(logits_V.astype(np.float32))[None]
    limits = SamplingLimits(
        np.array([sampling.temperature], np.float32),
        np.array([sampling.top_k if sampling.top_k < vocab_size else 0], np.int64),
        np.array([sampling.top_p], np.float64),
        np.array([sampling.min_p], np.float64),
    )
    probs_V: Floats = distribution(logits_1V, limits)[0].numpy()
    return probs_V


def share_drafted(rule: str, p_V: Floats, q_V: Floats, token: int) -> float:
    """Return the probability that *token* was drafted and accepted, given that it was emitted."""
    p, q = float(p_V[token]), float(q_V[token])
    if not q:
        return 0.0
    if rule != COUPLED:
        return min(1.0, q / p) if p else 1.0
    return min(1.0, 1.0 / float(np.maximum(p_V, q_V * (p / q)).sum()))


class Odds:
    """The odds of the draft tokens of one answer, and what they add up to.

    Args:
        output: the logged tokens.
        logprobs: for each of them, log-probabilities of the target's raw logits by token id.
        vocab_size: of the target.
        rule: the acceptance rule, "coupled" or "standard".
        seed: of what is drawn.
    """

    def __init__(
        self, output: Seq[int], logprobs: Seq[Mapping[int, float]], vocab_size: int, rule: str, seed: int
    ) -> None:
        self._output, self._logprobs, self._vocab_size, self._rule = output, logprobs, vocab_size, rule
        self._drawn = np.random.default_rng(seed)
        self._rates: list[float] = []
        self._num_steps, self._survival = 0, np.zeros(0)

    @property
    def expected(self) -> ExpectedAcceptance:
        """Of all drafts so far."""
        return ExpectedAcceptance(self._num_steps, tuple(self._survival.tolist()))

    def feed(self, q_V: Floats, raw_V: Floats, place: int, depth: int, sampling: Sampling) -> int | None:
        """Return the logged token in a *place* of the answer; None after the end.

        Args:
            q_V: what the draft samples from, float64.
            raw_V: the same at temperature 1 and without limits.
            place: index in the answer.
            depth: of the draft token, from 0 on.
            sampling: of the request.
        """
        self._rates = self._rates[:depth]
        if place >= len(self._output):
            self._rates.append(0.0)
            return None
        token = self._output[place]
        self._rates.append(share_drafted(self._rule, self._probs(place, sampling, raw_V), q_V, token))
        return token

    def num_accepted(self, draft: Draft, start: int, sampling: Sampling) -> int:
        """Return how many tokens of *draft*, a chain, count as accepted; `output[start]` is the first new one."""
        rates, self._rates = self._rates[: len(draft)], []
        if rates:
            survival, accepted = np.cumprod(rates).astype(np.float64), self._drawn.random(len(rates)) < rates
        else:
            survival, accepted = self._of_fixed(draft, start, sampling)
        if len(draft):
            self._add(survival)
        return int(np.cumprod(accepted).sum())

    def _of_fixed(self, draft: Draft, start: int, sampling: Sampling) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """As for a draft that does not depend on noise: whether its tokens are the logged ones is known."""
        logged = self._output[start : start + len(draft)]
        accepted_K = np.zeros(len(draft), np.bool_)
        accepted_K[: len(logged)] = [token == other for token, other in zip(draft.tokens, logged, strict=False)]
        survival_K = np.zeros(len(draft))
        for depth in range(min(len(logged), 1 + int(np.cumprod(accepted_K).sum()))):
            survival_K[depth] = self._probs(start + depth, sampling)[draft.tokens[depth]]
        return survival_K, accepted_K

    def _probs(self, place: int, sampling: Sampling, like_V: Floats | None = None) -> Floats:
        return target_probs(self._logprobs[place], self._vocab_size, sampling, like_V)

    def _add(self, survival_K: Floats) -> None:
        self._num_steps += 1
        if len(survival_K) > len(self._survival):
            self._survival = np.pad(self._survival, (0, len(survival_K) - len(self._survival)))
        self._survival[: len(survival_K)] += survival_K
