"""An exactly solvable language: 4 tokens, outputs of 4, 256 joint outcomes; distributions depend on all text before."""

import zlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
from msgspec import structs

from protos.messages import Sampling
from tests.support.exactness.distribution import distribution
from tests.support.exactness.engine import Shape, Table, TableModel, World, run_rows, tree_distribution
from tests.support.exactness.faults import Lives, live
from tests.support.exactness.statistics import Finding, Ints, Probs, compare, joint

VOCAB, LENGTH = 4, 4
PROMPT = (2, 0, 3, 1, 1)
BATCH = 2000
CHAIN = Shape(3)

SAMPLINGS = {
    "plain": Sampling(seed=0),
    "penalties": Sampling(
        seed=0,
        temperature=0.9,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        logit_bias={2: 0.3},
    ),
    "limits": Sampling(seed=0, temperature=1.2, top_k=3, top_p=0.9, bad_words=((1, 2),)),
}
Skill = Literal["good", "bad", "certain"]


def _rows() -> Table:
    """Return 61 distributions: most random, some peaked, some with a token of probability 0, some with ties."""
    dice = np.random.default_rng(11)
    rows = dice.normal(0, 1.2, (61, VOCAB))
    rows[::7] *= 3
    rows[3::9, 1] = -np.inf
    rows[5::11] = np.round(rows[5::11])
    return rows.astype(np.float32)


ROWS = _rows()
TARGET = TableModel(ROWS)
DRAFTS: dict[Skill, TableModel] = {
    "good": TableModel((ROWS + np.random.default_rng(12).normal(0, 0.6, ROWS.shape)).astype(np.float32)),
    "bad": TableModel(np.random.default_rng(13).normal(0, 1.2, ROWS.shape).astype(np.float32)),
    "certain": TableModel(np.where(np.arange(VOCAB) == 1, np.float32(0), np.float32(-np.inf)) + 0 * ROWS.clip(-9)),
}


@dataclass(frozen=True)
class Texts:
    """One cell: an acceptance rule, a draft shape and the sampling."""

    rule: str
    shape: Shape = CHAIN
    sampling: str = "plain"
    skill: Skill = "good"

    def __str__(self) -> str:
        return f"{self.rule}, {self.shape}, {self.sampling}, {self.skill} draft"

    @property
    def world(self) -> World:
        """The engine."""
        return World(TARGET, DRAFTS[self.skill], self.rule, self.shape)

    def distribution(self) -> Probs:
        """Return the distribution of all texts, `[256]`."""
        asked = SAMPLINGS[self.sampling]

        def after(output: tuple[int, ...]) -> Probs:
            return distribution(asked, TARGET.after((*PROMPT, *output)), output, PROMPT)

        return joint(tree_distribution(after, VOCAB, LENGTH))

    def samplings(self, first: int, count: int) -> list[Sampling]:
        """Return the sampling with *count* seeds of this cell alone."""
        base = zlib.crc32(str(self).encode()) << 24
        return [structs.replace(SAMPLINGS[self.sampling], seed=base + first + i) for i in range(count)]

    def check(self, count: int, world: World | None = None) -> tuple[Finding, float]:
        """Return the test results of *count* texts from rounds alone, and the share of draft tokens accepted."""
        counts, proposed, accepted = np.zeros(VOCAB**LENGTH, np.int64), 0, 0
        for first in range(0, count, BATCH):
            emitted = run_rows(world or self.world, self.samplings(first, min(BATCH, count - first)), PROMPT, LENGTH)
            counts += tally(emitted.tokens_NL)
            proposed, accepted = proposed + emitted.proposed, accepted + emitted.accepted
        return compare(counts[None], self.distribution()[None]), accepted / max(1, proposed)

    def check_lives(self, count: int, seed: int = 1) -> tuple[Finding, Lives]:
        """Return the test results of *count* requests under faults, and the counts of faults."""
        lives = live(self.world, self.samplings(0, count), PROMPT, LENGTH, seed)
        return compare(tally(lives.tokens_NL)[None], self.distribution()[None]), lives


def tally(tokens_NL: Ints) -> Ints:
    """Return the counts of texts, `[V^L]`."""
    places_L = VOCAB ** np.arange(LENGTH - 1, -1, -1)
    return np.bincount(tokens_NL @ places_L, minlength=VOCAB**LENGTH)
