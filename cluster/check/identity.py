"""Whether two engines said the same, and where they did not, whether a floating-point tie explains it.

DESIGN section 5: the same ids, except after a shown tie. Other batch shapes sum in another order, which moves fp32
logits by about 1e-6; where the target's two best candidates are nearer to each other than an `Allowance` says, either
may come out, and what follows differs. Anything else is a violation.
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

OTHER_NOISE = {-1: "with the noise of the position before", 1: "with the noise of the position behind"}
WITHOUT_NOISE = "without noise"
SHARE_THAT_EXPLAINS = 0.75  # of the violations; what fits all by chance fits far fewer


@dataclass(frozen=True)
class Allowance:
    """What counts as a floating-point tie, and how many may be.

    Attributes:
        gap: a token that lies less than this behind the best (in logits over temperature, plus noise) ties with it.
        logit_gap: so does one that lies less than this behind in logits, whatever the temperature makes of it.
        per_thousand: of a thousand sequences so many may differ by ties (one always may); None: any number.
        tolerance: how far, relatively, probabilities at temperature 1 may be off.
    """

    gap: float
    logit_gap: float
    per_thousand: float | None
    tolerance: float

    def gap_at(self, temperature: float) -> float:
        """Return the gap below which tokens tie at *temperature*, in logits over it."""
        return max(self.gap, self.logit_gap / (temperature if temperature >= MIN_TEMPERATURE else 1.0))

    def tolerance_at(self, temperature: float) -> float:
        """Return how far, relatively, probabilities at *temperature* may be off."""
        return min(0.5, self.tolerance / temperature)

    def most_ties(self, num_sequences: int) -> int | None:
        """Return how many of so many sequences may differ by ties; None: any number."""
        if self.per_thousand is None:
            return None
        return max(1, int(num_sequences * self.per_thousand / 1000)) if self.gap else 0


# Half precision: on the demo target, rounding moves the gaps between the five likeliest tokens by up to 0.088 in bf16
# and 0.013 in fp16 (0.016 and 0.002 on average); the rounding of two runs may differ by twice that.
ALLOWANCES = {
    "float32": Allowance(1e-4, 0.0, 2, 0.0),
    "bfloat16": Allowance(1e-4, 0.2, None, 0.05),
    "float16": Allowance(1e-4, 0.03, None, 0.01),
}
NONE_ALLOWED = Allowance(0.0, 0.0, 0, 0.0)


@dataclass(frozen=True)
class Asked:
    """One sequence that both engines were asked for. `temperature` 0 is greedy; `seed` counts where it is not."""

    part: Part
    prompt: int
    token_ids: tuple[int, ...]
    temperature: float
    seed: int


@dataclass(frozen=True)
class Difference:
    """Where two answers to one request part: at output token number `position`.

    `with_token` and `without_token` are -1 where the answer had ended. `origin` is where the engine that speculates
    has its token from.
    """

    asked: Asked
    position: int
    with_token: int
    without_token: int
    origin: Origin | None
    context: tuple[int, ...]


class Finding(msgspec.Struct, frozen=True):
    """A difference, and what the target without speculation says about it.

    `gap` is how far its two best candidates are apart; `behind` how far the worse of the two tokens lies behind the
    best (both in logits over temperature, plus the request's noise where it samples). `probability` and `rank` are
    those of the token with speculation, by the target's law. `chosen_with` names other ways to choose, among those
    that are tried, by which that token would have been the target's choice.
    """

    part: Part
    prompt: int
    position: int
    with_token: int
    without_token: int
    origin: str
    gap: float
    behind: float
    probability: float
    rank: int
    chosen_with: tuple[str, ...]
    is_tie: bool


class IdentityVerdict(msgspec.Struct, frozen=True):
    """Whether all sequences of one part are identical, but for as many ties as may be (`most_ties`; None: any number).

    `why` says in words what the violations have in common; empty where there are none.
    """

    part: Part
    sequences: int
    tokens: int
    identical: int
    ties: int
    violations: int
    most_ties: int | None
    findings: tuple[Finding, ...]
    why: str

    @property
    def passed(self) -> bool:
        """Whether nothing but a permitted number of ties was found."""
        return not self.violations and (self.most_ties is None or self.ties <= self.most_ties)


def differences(asked: Seq[Asked], with_: Seq[Answer], without: Seq[Answer]) -> list[Difference]:
    """Return the first difference of each pair of answers that differ."""
    found = (_first(*each) for each in zip(asked, with_, without, strict=True))
    return [difference for difference in found if difference is not None]


def _first(asked: Asked, with_: Answer, without: Answer) -> Difference | None:
    ours, theirs = with_.token_ids, without.token_ids
    if ours == theirs and with_.ended == without.ended:
        return None
    shorter = min(len(ours), len(theirs))
    at = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
    return Difference(
        asked,
        at,
        ours[at] if at < len(ours) else -1,
        theirs[at] if at < len(theirs) else -1,
        with_.origins[at] if at < len(ours) else None,
        (*asked.token_ids, *theirs[:at]),
    )


def scores(logprobs_V: Floats, asked: Asked, index: int) -> Floats:
    """Return what the target takes the greatest of: log-probabilities over temperature, plus noise where it samples.

    Args:
        logprobs_V: float64, of the raw logits; unlike logits they are off by one constant, which changes nothing.
        asked: whose seed and temperature.
        index: position in prompt + output, whose noise is added.
    """
    if asked.temperature < MIN_TEMPERATURE:
        return logprobs_V
    key = torch.from_numpy(row_keys(np.array([signed(asked.seed)]), np.array([index])))
    noise_V = gumbel(key, torch.arange(len(logprobs_V))).numpy()
    scaled_V: Floats = logprobs_V / asked.temperature + noise_V
    return scaled_V


def explain(difference: Difference, logprobs_V: Floats, allowance: Allowance) -> Finding:
    """Return what the target's *logprobs_V* (float64, behind `difference.context`) say about *difference*."""
    asked, index = difference.asked, len(difference.context)
    score_V = scores(logprobs_V, asked, index)
    second, best = (float(score) for score in np.partition(score_V, -2)[-2:])
    ours, theirs = difference.with_token, difference.without_token
    both_there = ours >= 0 and theirs >= 0
    behind = best - float(min(score_V[ours], score_V[theirs])) if both_there else float("inf")
    law_V = np.exp(logprobs_V / (asked.temperature if asked.temperature >= MIN_TEMPERATURE else 1.0))
    return Finding(
        asked.part,
        asked.prompt,
        difference.position,
        ours,
        theirs,
        "the answer ended early" if difference.origin is None else ORIGINS[difference.origin],
        best - second,
        behind,
        probability=float(law_V[ours] / law_V.sum()) if ours >= 0 else 0.0,
        rank=1 + int((logprobs_V > logprobs_V[ours]).sum()) if ours >= 0 else 0,
        chosen_with=_chosen_with(ours, logprobs_V, asked, index),
        is_tie=both_there and behind < allowance.gap_at(asked.temperature),
    )


def _chosen_with(token: int, logprobs_V: Floats, asked: Asked, index: int) -> tuple[str, ...]:
    if asked.temperature < MIN_TEMPERATURE:
        return ()
    ways = {name: scores(logprobs_V, asked, index + off) for off, name in OTHER_NOISE.items() if index + off >= 0}
    ways[WITHOUT_NOISE] = logprobs_V
    return tuple(name for name, score_V in ways.items() if int(score_V.argmax()) == token)


def judge(part: Part, with_: Seq[Answer], findings: Seq[Finding], allowance: Allowance) -> IdentityVerdict:
    """Return the verdict over one part: *with_* are all answers with speculation, *findings* those that differ."""
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
        _why(wrong),
    )


def _why(wrong: Seq[Finding]) -> str:
    """Say what violations have in common."""
    if not wrong:
        return ""
    origin, same = Counter(finding.origin for finding in wrong).most_common(1)[0]
    text = f"no tie: {same} of {len(wrong)} first differences are {origin}{MEANING.get(origin, '')}"
    ways = Counter(way for finding in wrong for way in finding.chosen_with if way != WITHOUT_NOISE)
    way, count = ways.most_common(1)[0] if ways else ("", 0)
    if count >= SHARE_THAT_EXPLAINS * len(wrong):
        text += f"; {count} of {len(wrong)} are what the target chooses {way}: an index is off by one"
    return text


MEANING = {
    ORIGINS["guess"]: ": guesses were accepted that are not the target's choice",
    ORIGINS["correction"]: ": what stands for a rejected guess is not the target's choice",
    ORIGINS["bonus"]: ": what follows a draft accepted whole is not the target's choice",
    ORIGINS["plain"]: ": what the engine says without a draft differs from the engine without speculation",
}
"""What it means that tokens of this origin are wrong."""
