"""What an engine answered, and where each token came from."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from protos.messages import Step, TokenOutput

Origin = Literal["guess", "correction", "bonus", "plain"]
"""An accepted guess; the target's own token for a rejected one; that behind a draft accepted whole; without a draft."""

Place = Literal["prompt", "guess", "draft", "correction", "bonus", "plain", "any"]
"""How a position was reached: behind the prompt; behind an accepted guess, in the same round; behind a draft accepted
whole, in the same round; first of a round, behind a correction, a bonus token, or a round without a draft; or nobody
asks."""

PLACES: dict[Place, str] = {
    "prompt": "prompt",
    "guess": "accepted guess",
    "draft": "whole draft",
    "correction": "correction",
    "bonus": "bonus token",
    "plain": "no draft",
    "any": "any token",
}
ORIGINS: dict[Origin, str] = {
    "guess": "an accepted guess",
    "correction": "a correction",
    "bonus": "a bonus token",
    "plain": "a token of a round without a draft",
}


@dataclass(frozen=True)
class Answer:
    """One request's output. `ended` is the finish reason, or what failed; `branched` says that a draft was a tree."""

    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    ended: str
    branched: bool = False


def origins_of(num_tokens: int, step: Step | None) -> list[Origin]:
    """Return where the tokens of one step came from."""
    if step is None or not step.proposed:
        return ["plain"] * num_tokens
    own: Origin = "bonus" if step.accepted == step.depth else "correction"
    guesses: list[Origin] = ["guess"] * min(step.accepted, num_tokens)
    return [*guesses, *[own] * (num_tokens - len(guesses))]


def places_of(origins: Seq[Origin]) -> list[Place]:
    """Return how the position of each token of an answer was reached.

    All of it was settled before the token was: a token behind an accepted guess is a bonus if the guess was its
    draft's last.
    """
    places: list[Place] = ["prompt"] * min(1, len(origins))
    for before, origin in pairwise(origins):
        if before == "guess":
            places.append("draft" if origin == "bonus" else "guess")
        else:
            places.append(before)
    return places


@dataclass
class Growing:
    """An answer while it comes."""

    token_ids: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    branched: bool = False

    def add(self, output: TokenOutput) -> None:
        """Take over what a step added."""
        self.token_ids += output.token_ids
        self.origins += origins_of(len(output.token_ids), output.step)
        if output.step is not None and output.step.proposed != output.step.depth:
            self.branched = True

    def done(self, ended: str) -> Answer:
        """Return the whole answer."""
        return Answer(tuple(self.token_ids), tuple(self.origins), ended, self.branched)
