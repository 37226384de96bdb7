"""Compares the answers of two engines, and separates floating-point ties from violations.

Both engines must return the same ids, except after a tie. Another batch shape sums in another order, which moves fp32
logits by about 1e-6. If the target's two best candidates are closer than an `Allowance`, either may be chosen, and what
follows differs. Any other difference is a violation.
"""

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from cluster.check.answers import ORIGINS, Answer, Origin
from workers.sampling.noise import gumbel, row_keys, signed
from workers.sampling.sample import MIN_TEMPERATURE

Floats = npt.NDArray[np.float64]
Part = Literal["greedy", "seeded"]

OTHER_NOISE = {-1: "with the noise of the position before", 1: "with the noise of the position after"}
WITHOUT_NOISE = "without noise"
EXPLAINING_SHARE = 0.75
"""An off-by-one index is reported if it explains this share of the violations; by chance it explains far fewer."""


@dataclass(frozen=True)
class Allowance:
    """What counts as a floating-point tie, and how many ties are allowed.

    Attributes:
        gap: a token ties with the best one if it is less than this below it, in logits over temperature plus noise.
        logit_gap: it also ties if it is less than this below it in logits, whatever the temperature.
        per_thousand: sequences of a thousand that may differ by ties (one always may); None: any number.
        tolerance: relative error of probabilities at temperature 1.
    """

    gap: float
    logit_gap: float
    per_thousand: float | None
    tolerance: float

    def gap_at(self, temperature: float) -> float:
        """Return the gap below which tokens tie at *temperature*, in logits over it."""
        return max(self.gap, self.logit_gap / (temperature if temperature >= MIN_TEMPERATURE else 1.0))

    def tolerance_at(self, temperature: float) -> float:
        """Return the relative error of probabilities at *temperature*."""
        return min(0.5, self.tolerance / temperature)

    def most_ties(self, num_sequences: int) -> int | None:
        """Return how many of *num_sequences* sequences may differ by ties; None: any number."""
        if self.per_thousand is None:
            return None
        return max(1, int(num_sequences * self.per_thousand / 1000)) if self.gap else 0


# Measured on the demo target: rounding moves the gaps between the five likeliest tokens by up to 0.088 in bf16 and
# 0.013 in fp16 (0.016 and 0.002 on average). Two runs may differ by twice that.
ALLOWANCES = {
    "float32": Allowance(1e-4, 0.0, 2, 0.0),
    "bfloat16": Allowance(1e-4, 0.2, None, 0.05),
    "float16": Allowance(1e-4, 0.03, None, 0.01),
}
NO_TIES = Allowance(0.0, 0.0, 0, 0.0)


@dataclass(frozen=True)
class ComparedRequest:
    """One request to both engines. `temperature` 0 is greedy; else `seed` determines the noise."""

    part: Part
    prompt: int
    token_ids: tuple[int, ...]
    temperature: float
    seed: int


@dataclass(frozen=True)
class Difference:
    """The first output position at which two answers to one request differ.

    `with_token` and `without_token` are -1 if that answer had ended. `origin` is that of the token with speculation;
    `context` is the prompt and the output before the position.
    """

    request: ComparedRequest
    position: int
    with_token: int
    without_token: int
    origin: Origin | None
    context: tuple[int, ...]


class Finding(msgspec.Struct, frozen=True):
    """A difference, explained by the target's log-probabilities.

    Attributes:
        gap: between the target's two best candidates, in logits over temperature, plus noise for a sampled request.
        shortfall: of the worse of the two tokens below the best, in the same unit.
        probability, rank: of the token with speculation, under the target's distribution.
        chosen_with: variants of the noise with which that token would have been the target's choice.
    """

    part: Part
    prompt: int
    position: int
    with_token: int
    without_token: int
    origin: str
    gap: float
    shortfall: float = msgspec.field(name="behind")
    probability: float
    rank: int
    chosen_with: tuple[str, ...]
    is_tie: bool


class IdentityVerdict(msgspec.Struct, frozen=True):
    """The comparison of all sequences of one part. Up to `most_ties` ties are allowed; None: any number.

    `explanation` describes what the violations have in common; empty without violations.
    """

    part: Part
    sequences: int
    tokens: int
    identical: int
    ties: int
    violations: int
    most_ties: int | None
    findings: tuple[Finding, ...]
    explanation: str = msgspec.field(name="why")

    @property
    def passed(self) -> bool:
        """Whether nothing but an allowed number of ties was found."""
        return not self.violations and (self.most_ties is None or self.ties <= self.most_ties)


def differences(requests: Seq[ComparedRequest], with_: Seq[Answer], without: Seq[Answer]) -> list[Difference]:
    """Return the first difference of each pair of answers that differ."""
    found = (_first_difference(*each) for each in zip(requests, with_, without, strict=True))
    return [difference for difference in found if difference is not None]


def _first_difference(request: ComparedRequest, with_: Answer, without: Answer) -> Difference | None:
    ours, theirs = with_.token_ids, without.token_ids
    if ours == theirs and with_.finish_reason == without.finish_reason:
        return None
    shorter = min(len(ours), len(theirs))
    at = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
    return Difference(
        request,
        at,
        ours[at] if at < len(ours) else -1,
        theirs[at] if at < len(theirs) else -1,
        with_.origins[at] if at < len(ours) else None,
        (*request.token_ids, *theirs[:at]),
    )


def scores(logprobs_V: Floats, request: ComparedRequest, index: int) -> Floats:
    """Return the scores whose maximum the target chooses: log-probabilities over temperature, plus noise if sampled.

    Args:
        logprobs_V: float64, of the raw logits, from which they differ by a constant that does not matter here.
        request: gives seed and temperature.
        index: position in prompt + output, which determines the noise.
    """
    if request.temperature < MIN_TEMPERATURE:
        return logprobs_V
    key = torch.from_numpy(row_keys(np.array([signed(request.seed)]), np.array([index])))
    noise_V = gumbel(key, torch.arange(len(logprobs_V))).numpy()
    scaled_V: Floats = logprobs_V / request.temperature + noise_V
    return scaled_V


def explain(difference: Difference, logprobs_V: Floats, allowance: Allowance) -> Finding:
    """Return *difference* explained by the target's *logprobs_V* (float64, after `difference.context`)."""
    request, index = difference.request, len(difference.context)
    score_V = scores(logprobs_V, request, index)
    second, best = (float(score) for score in np.partition(score_V, -2)[-2:])
    ours, theirs = difference.with_token, difference.without_token
    neither_ended = ours >= 0 and theirs >= 0
    shortfall = best - float(min(score_V[ours], score_V[theirs])) if neither_ended else float("inf")
    probs_V = np.exp(logprobs_V / (request.temperature if request.temperature >= MIN_TEMPERATURE else 1.0))
    return Finding(
        request.part,
        request.prompt,
        difference.position,
        ours,
        theirs,
        "the answer ended early" if difference.origin is None else ORIGINS[difference.origin],
        best - second,
        shortfall,
        probability=float(probs_V[ours] / probs_V.sum()) if ours >= 0 else 0.0,
        rank=1 + int((logprobs_V > logprobs_V[ours]).sum()) if ours >= 0 else 0,
        chosen_with=_chosen_with(ours, logprobs_V, request, index),
        is_tie=neither_ended and shortfall < allowance.gap_at(request.temperature),
    )


def _chosen_with(token: int, logprobs_V: Floats, request: ComparedRequest, index: int) -> tuple[str, ...]:
    if request.temperature < MIN_TEMPERATURE:
        return ()
    variants = {name: scores(logprobs_V, request, index + off) for off, name in OTHER_NOISE.items() if index + off >= 0}
    variants[WITHOUT_NOISE] = logprobs_V
    return tuple(name for name, score_V in variants.items() if int(score_V.argmax()) == token)


def verdict_of(part: Part, with_: Seq[Answer], findings: Seq[Finding], allowance: Allowance) -> IdentityVerdict:
    """Return the verdict on one part, from all answers with speculation and the findings about those that differ."""
    wrong = [finding for finding in findings if not finding.is_tie]
    return IdentityVerdict(
        part,
        len(with_),
        sum(len(answer.token_ids) for answer in with_),
        len(with_) - len(findings),
        len(findings) - len(wrong),
        len(wrong),
        allowance.most_ties(len(with_)),
        tuple(findings),
        _explanation(wrong),
    )


def _explanation(wrong: Seq[Finding]) -> str:
    """Describe what violations have in common."""
    if not wrong:
        return ""
    origin, same = Counter(finding.origin for finding in wrong).most_common(1)[0]
    text = f"no tie: {same} of {len(wrong)} first differences are {origin}{MEANING.get(origin, '')}"
    variants = Counter(name for finding in wrong for name in finding.chosen_with if name != WITHOUT_NOISE)
    name, count = variants.most_common(1)[0] if variants else ("", 0)
    if count >= EXPLAINING_SHARE * len(wrong):
        text += f"; {count} of {len(wrong)} are what the target chooses {name}: an index is off by one"
    return text


MEANING = {
    ORIGINS["accepted"]: ": draft tokens were accepted that are not the target's choice",
    ORIGINS["correction"]: ": the replacement of a rejected draft token is not the target's choice",
    ORIGINS["bonus"]: ": the token after a fully accepted draft is not the target's choice",
    ORIGINS["plain"]: ": tokens of rounds without a draft differ from the engine without speculation",
}
"""What wrong tokens of an origin mean."""
