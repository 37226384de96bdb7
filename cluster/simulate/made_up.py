"""Drafts and acceptance that are made up, for rounds that are run only to measure what they cost."""

import random
from collections.abc import Sequence as Seq
from typing import ClassVar, Self

from protos.config.engine import EngineConfig, SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.draft_module import DraftRunner
from protos.interfaces import Executor
from protos.progress import ProgressCallback
from workers.build import build_uni
from workers.sampling.sampler import Sampler
from workers.verification.acceptance import AcceptedTokens, SampleAndMatch, Scored, first_path

TOKEN = 0
"""An id that every vocabulary has."""


class FixedDraft:
    """A proposer that drafts the same token as often as asked: costs nothing."""

    on_worker: ClassVar[bool] = False

    @classmethod
    def create(cls, config: SpeculativeConfig, runner: DraftRunner | None) -> Self:
        """See `Proposer`."""
        return cls()

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """See `Proposer`."""
        return [Draft((TOKEN,) * row.max_chain) for row in rows]


FIXED = f"{__name__}:{FixedDraft.__name__}"


class HalfAccepted(SampleAndMatch):
    """Samples at every position, as "coupled" does; then accepts any number of a draft's levels, equally often each.

    What is accepted costs time, too: a draft is fed all tokens since its last round.
    """

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(sampler)
        self._random = random.Random(0)

    def accept(self, scored: Scored) -> list[AcceptedTokens]:
        """See `AcceptanceRule`."""
        sampled_N, at = self._sample(scored), 0
        accepted = []
        for row, draft, count in zip(scored.rows, scored.drafts, scored.counts_R.tolist(), strict=True):
            if count:
                accepted.append(self._accept(row.slot, draft, sampled_N[at : at + count]))
                at += count
        return accepted

    def _accept(self, slot: int, draft: Draft, sampled: Seq[int]) -> AcceptedTokens:
        path = first_path(draft, len(draft))
        path = path[: self._random.randint(0, len(path))]
        tokens = [draft.tokens[node] for node in path]
        self._sampler.slots.write_draft(slot, tokens)
        following = sampled[path[-1] + 1 if path else 0]  # -1 off a tree's sampled path
        return AcceptedTokens(path, [*tokens, max(TOKEN, following)])


def make_executor(config: EngineConfig, report: ProgressCallback) -> Executor:
    """Load target and draft of *config* into this process, with half of the draft tokens accepted."""
    return build_uni(config, report, lambda _speculative, sampler: HalfAccepted(sampler))
