"""Prompt lookup: draft the tokens that followed the last n tokens at their previous occurrence.

Saxena 2023, "Prompt Lookup Decoding"; vLLM's `ngram` with `prompt_lookup_min` and `prompt_lookup_max`.
"""

from typing import ClassVar, Self

from proposers.shared.ngram_index import Places
from proposers.shared.sequence_index import IndexedSequence, SequenceIndex
from protos.config.engine import SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.draft_module import DraftRunner


class NgramProposer(SequenceIndex):
    """Searches the sequence for its last n tokens, longest n first, most recent match first."""

    on_worker: ClassVar[bool] = False

    def __init__(self, min_n: int, max_n: int) -> None:
        super().__init__()
        self.min_n, self.max_n = min_n, max_n

    @classmethod
    def create(cls, config: SpeculativeConfig, runner: DraftRunner | None) -> Self:
        """Return a proposer that matches `prompt_lookup_min` to `prompt_lookup_max` tokens."""
        return cls(config.prompt_lookup_min, config.prompt_lookup_max)

    def index(self) -> Places:
        """See `SequenceIndex`. Has one n-gram size for each n, so that no match must be extended."""
        return Places(range(self.max_n, self.min_n - 1, -1), self.max_n, most=1)

    def draft(self, row: DraftRow, sequence: IndexedSequence) -> Draft:
        """Return the tokens after the match, at most `row.k`; none without a match."""
        tokens = sequence.tokens
        if not sequence.is_indexed:
            return Draft(())
        ends = sequence.places.longest(tokens, tokens[-self.max_n :]).ends
        return Draft(tuple(tokens[ends[0] : ends[0] + row.k])) if ends else Draft(())
