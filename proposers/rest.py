"""REST: draft the continuations of the last tokens in a collection of texts.

He et al. 2024, "REST: Retrieval-Based Speculative Decoding". The longest suffix of the text, of 16 tokens down to 2, is
looked up in a datastore (`slipstream build-datastore`); its continuations there are merged into a tree whose nodes are
weighted by frequency, and the best of them are drafted.
"""

from collections.abc import Sequence as Seq
from itertools import islice
from pathlib import Path
from typing import ClassVar, Self

from proposers.shared.continuations import NO_SCORED_DRAFT, Continuations, Merge, chain, min_score, tree
from proposers.shared.datastore import DEPTH, Datastore
from protos.config.engine import SpeculativeConfig
from protos.draft import NO_DRAFT, Draft, DraftRow
from protos.draft_module import DraftRunner
from protos.errors import ConfigError

SHORTEST = 2
LONGEST = 10
"""Most tokens taken from each place."""
MIN_PROBABILITY = 0.05
"""Less likely nodes are not drafted."""


class RestProposer:
    """Looks up the last tokens in a datastore; has no state per sequence."""

    on_worker: ClassVar[bool] = False

    def __init__(self, store: Datastore, merge: Merge, min_score: float) -> None:
        self._store, self._merge, self._min_score = store, merge, min_score

    @classmethod
    def create(cls, config: SpeculativeConfig, runner: DraftRunner | None) -> Self:
        """Return a proposer of trees, or of chains with that `draft_shape`, for the datastore of *config*.

        Raises:
            ConfigError: there is no datastore, or it cannot be read.
        """
        if config.datastore is None:
            raise ConfigError("method 'rest' needs a datastore: the file that `slipstream build-datastore` wrote")
        merge = chain if config.draft_shape == "chain" else tree
        return cls(Datastore(Path(config.datastore)), merge, min_score(config, "rest"))

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Return one draft per row, of at most `row.k` nodes; empty if the last two tokens do not occur."""
        found = [
            one if one.length >= SHORTEST else one._replace(places=[])
            for one in self._store.longest([row.token_ids[-DEPTH:] for row in rows])
        ]
        texts = iter(self._store.after([place for one in found for place in one.places], LONGEST))
        return [self._draft(row, list(islice(texts, len(one.places)))) for row, one in zip(rows, found, strict=True)]

    def _draft(self, row: DraftRow, texts: Continuations) -> Draft:
        reached = [text[: row.depth] for text in texts]
        found = self._merge(reached, len(texts), row.k, MIN_PROBABILITY) if texts else NO_SCORED_DRAFT
        return found.draft if found.score >= self._min_score else NO_DRAFT
