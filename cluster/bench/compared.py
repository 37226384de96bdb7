"""What a comparison of ways of speculating found, by category: Spec-Bench's figures."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from cluster.bench.ratios import Floats, Indices, Ratio, bootstrap
from cluster.check.answers import DraftCounts
from cluster.check.identity import IdentityVerdict
from protos.config.engine import SpeculativeConfig


@dataclass(frozen=True)
class BlockFigures:
    """What an engine did for the questions of a block: generated tokens, steps of the target that gave them, seconds.

    A step counts once for each row of its batch.
    """

    tokens: int
    steps: int
    seconds: float

    def __add__(self, other: "BlockFigures") -> "BlockFigures":
        return BlockFigures(self.tokens + other.tokens, self.steps + other.steps, self.seconds + other.seconds)

    @property
    def tokens_per_second(self) -> float:
        """The rate over the whole block, prompts included."""
        return self.tokens / self.seconds


NOTHING = BlockFigures(0, 0, 0.0)


def accepted_tokens(figures: Seq[BlockFigures]) -> float:
    """Return Spec-Bench's mean accepted tokens: generated tokens per step of the target, 1 without speculation."""
    whole = sum(figures, NOTHING)
    return whole.tokens / whole.steps


@dataclass(frozen=True)
class ComparedMethod:
    """A method, and the engine without speculation, block by block.

    Attributes:
        name: of the method.
        speculative: its configuration.
        categories: of the blocks.
        plain, method: what the two engines did for each block.
        identity: whether the answers are the same; None if the acceptance rule does not promise that.
        counts: draft tokens, those of warming up included.
        draft_failures: rounds in which drafting failed.
        turns_left_out: turns that did not fit the context after the answers before them.
    """

    name: str
    speculative: SpeculativeConfig
    categories: tuple[str, ...]
    plain: tuple[BlockFigures, ...]
    method: tuple[BlockFigures, ...]
    identity: IdentityVerdict | None
    counts: DraftCounts
    draft_failures: int = 0
    turns_left_out: int = 0

    @property
    def names(self) -> list[str]:
        """Return the categories, each once."""
        return list(dict.fromkeys(self.categories))

    def of(self, category: str | None) -> tuple[list[BlockFigures], list[BlockFigures]]:
        """Return the figures without and with speculation of the blocks of *category*; of all for None."""
        picked = [i for i, name in enumerate(self.categories) if category in (None, name)]
        return [self.plain[i] for i in picked], [self.method[i] for i in picked]

    def speedup(self, category: str | None = None) -> Ratio:
        """Return tokens per second over those without speculation, all blocks together.

        The interval is over blocks. Where the answers are the same, this is the ratio of the times.
        """
        tokens_2B, seconds_2B = self._arrays(category)

        def ratio(picked: Indices) -> float:
            plain, method = tokens_2B[:, picked].sum(1) / seconds_2B[:, picked].sum(1)
            return float(method / plain)

        return bootstrap(ratio, tokens_2B.shape[1])

    def mean_speedup(self, category: str | None = None) -> float:
        """Return Spec-Bench's own figure: the mean of the blocks' tokens per second over that without speculation.

        Blocks of few seconds weigh more than in `speedup`.
        """
        tokens_2B, seconds_2B = self._arrays(category)
        plain, method = (tokens_2B / seconds_2B).mean(1)
        return float(method / plain)

    def _arrays(self, category: str | None) -> tuple[Floats, Floats]:
        """Return tokens and seconds without and with speculation, float64 `[2, B]`."""
        sides = self.of(category)
        tokens_2B = np.array([[each.tokens for each in side] for side in sides], float)
        return tokens_2B, np.array([[each.seconds for each in side] for side in sides])

    def accepted(self, category: str | None = None) -> float:
        """Return the mean accepted tokens of the method."""
        return accepted_tokens(self.of(category)[1])

    @property
    def passed(self) -> bool:
        """Whether all answers are those of the engine without speculation, but for ties."""
        return self.identity is None or self.identity.passed
