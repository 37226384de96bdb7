"""The answers of an engine, and how each of their tokens was chosen."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import msgspec

from protos.messages import Step, TokenOutput

Origin = Literal["accepted", "correction", "bonus", "plain"]
"""How a token was chosen: an accepted draft token; the target's replacement of a rejected one; the target's token after
a fully accepted draft; the target's token in a round without a draft."""

Place = Literal["prompt", "guess", "draft", "correction", "bonus", "plain", "any"]
"""What a position follows, as in the JSON report: the prompt; an accepted draft token of the same round; a fully
accepted draft of the same round; or, first in its round, a correction, a bonus token, or a round without a draft. "any"
where these are not told apart."""

PLACES: dict[Place, str] = {
    "prompt": "prompt",
    "guess": "accepted draft token",
    "draft": "whole draft",
    "correction": "correction",
    "bonus": "bonus token",
    "plain": "no draft",
    "any": "any token",
}
ORIGINS: dict[Origin, str] = {
    "accepted": "an accepted draft token",
    "correction": "a correction",
    "bonus": "a bonus token",
    "plain": "a token of a round without a draft",
}


@dataclass(frozen=True)
class Answer:
    """One request's output.

    `finish_reason` may be an error message. `has_tree` is True if some draft was a tree. `num_steps` are those of the
    target that gave its tokens.
    """

    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    finish_reason: str
    has_tree: bool = False
    num_steps: int = 0


def origins_of(num_tokens: int, step: Step | None) -> list[Origin]:
    """Return how the tokens of one step were chosen."""
    if step is None or not step.proposed:
        return ["plain"] * num_tokens
    last: Origin = "bonus" if step.accepted == step.depth else "correction"
    accepted: list[Origin] = ["accepted"] * min(step.accepted, num_tokens)
    return [*accepted, *[last] * (num_tokens - len(accepted))]


def places_of(origins: Seq[Origin]) -> list[Place]:
    """Return what the position of each token follows.

    This is known before the token is drawn: a token after the last accepted draft token of a whole draft is a bonus.
    """
    places: list[Place] = ["prompt"] * min(1, len(origins))
    for before, origin in pairwise(origins):
        if before == "accepted":
            places.append("draft" if origin == "bonus" else "guess")
        else:
            places.append(before)
    return places


@dataclass
class AnswerBuilder:
    """Collects an answer step by step."""

    token_ids: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    has_tree: bool = False
    num_steps: int = 0

    def add(self, output: TokenOutput) -> None:
        """Append the tokens of one step."""
        self.token_ids += output.token_ids
        self.origins += origins_of(len(output.token_ids), output.step)
        self.num_steps += bool(output.token_ids)
        if output.step is not None and output.step.proposed != output.step.depth:
            self.has_tree = True

    def build(self, finish_reason: str) -> Answer:
        """Return the whole answer."""
        return Answer(tuple(self.token_ids), tuple(self.origins), finish_reason, self.has_tree, self.num_steps)


class DraftCounts(msgspec.Struct, frozen=True):
    """Draft tokens of an engine so far."""

    proposed: int
    accepted: int

    @property
    def rejected(self) -> int:
        """Draft tokens that were scored and not accepted."""
        return self.proposed - self.accepted
