"""REST: what followed the same words in a collection of texts is likely to follow them again.

He et al. 2024, "REST: Retrieval-Based Speculative Decoding". The longest suffix of what was said that stands in a
datastore (`slipstream build-datastore`), of 16 tokens down to 2, is looked up there; what followed it in its places is
merged into a tree whose nodes are weighted by how often they occur, and the best of them are the draft.
"""

from collections.abc import Sequence as Seq
from itertools import islice
from pathlib import Path
from typing import ClassVar, Self

from proposers.shared.continuations import NO_GUESS, Texts, Vote, chain, confidence_of, tree
from proposers.shared.datastore import DEPTH, Datastore
from protos.config.engine import SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.draft_module import DraftRunner
from protos.errors import ConfigError

SHORTEST = 2
LONGEST = 10
"""Tokens that are taken from each place."""
LEAST = 0.05
"""Nodes less likely than this are not worth scoring."""


class RestProposer:
    """Looks the last tokens up in a datastore; keeps nothing of any sequence."""

    on_worker: ClassVar[bool] = False

    def __init__(self, store: Datastore, vote: Vote, confidence: float) -> None:
        self._store, self._vote, self._confidence = store, vote, confidence

    @classmethod
    def create(cls, config: SpeculativeConfig, runner: DraftRunner | None) -> Self:
        """Return a proposer for the datastore of *config*: of trees, or of chains where `draft_shape` says so.

        Raises:
            ConfigError: there is no datastore, or it cannot be read.
        """
        if config.datastore is None:
            raise ConfigError("method 'rest' needs a datastore: the file that `slipstream build-datastore` wrote")
        vote = chain if config.draft_shape == "chain" else tree
        return cls(Datastore(Path(config.datastore)), vote, confidence_of(config, "rest"))

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Return one draft a row, of at most `row.k` nodes; empty where its last two tokens never stand together."""
        found = [
            one if one.length >= SHORTEST else one._replace(places=[])
            for one in self._store.longest([row.token_ids[-DEPTH:] for row in rows])
        ]
        texts = iter(self._store.after([place for one in found for place in one.places], LONGEST))
        return [self._draft(row, list(islice(texts, len(one.places)))) for row, one in zip(rows, found, strict=True)]

    def _draft(self, row: DraftRow, texts: Texts) -> Draft:
        guess = self._vote(texts, row.k, LEAST) if texts else NO_GUESS
        return guess.draft if guess.score >= self._confidence else NO_GUESS.draft
