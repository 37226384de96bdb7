"""Prompt lookup: what followed these n tokens the last time is likely to follow them again.

Saxena 2023, "Prompt Lookup Decoding"; vLLM's `ngram` with `prompt_lookup_min` and `prompt_lookup_max`. A request that
brings a prediction of its answer (OpenAI's `prediction`) is looked up in that first.
"""

from typing import ClassVar, Self

from proposers.shared.ngram_index import Places
from proposers.shared.sequence_index import IndexedSequence, SequenceIndex
from protos.config.engine import SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.draft_module import DraftRunner


class NgramProposer(SequenceIndex):
    """Looks the last n tokens up in the sequence itself, longest n first, most recent match first.

    A guess is confident, in a cascade, where there is a match of at least the minimum length.
    """

    on_worker: ClassVar[bool] = False

    def __init__(self, min_n: int, max_n: int) -> None:
        super().__init__()
        self.min_n, self.max_n = min_n, max_n

    @classmethod
    def create(cls, config: SpeculativeConfig, runner: DraftRunner | None) -> Self:
        """Return a proposer that matches `prompt_lookup_min` to `prompt_lookup_max` tokens."""
        return cls(config.prompt_lookup_min, config.prompt_lookup_max)

    def index(self) -> Places:
        """See `SequenceIndex`. One size of gram for each n: no match need be lengthened."""
        return Places(range(self.max_n, self.min_n - 1, -1), self.max_n, most=1)

    def guess(self, row: DraftRow, followed: IndexedSequence) -> Draft:
        """Return the tokens that followed the match, at most `row.k`; none without a match."""
        tokens = followed.tokens
        predicted = followed.predicted(row.k)
        if predicted or not followed.is_indexed:
            return Draft(tuple(predicted))
        ends = followed.places.longest(tokens, tokens[-self.max_n :]).ends
        return Draft(tuple(tokens[ends[0] : ends[0] + row.k])) if ends else Draft(())
