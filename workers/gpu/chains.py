"""Keeps a draft model's cache in step with chains that are drafted on the device.

What the host has to know before a round is which rows can draft, and how many tokens their caches lack; after it, which
tokens were fed. The draft tokens themselves come to the host with the round's result.
"""

from collections.abc import Sequence as Seq

import numpy as np

from proposers.draft_model import DraftModelProposer
from protos.draft import DraftRow
from protos.messages import Row
from workers.attention.batch import Ints
from workers.draft.engine import DraftEngine
from workers.draft.target_cache import TargetCache
from workers.model.runner import ModelRunner

MOST_FED = 2
"""Known tokens that the loop feeds: the newest, and the last of a draft that was accepted in full."""


class DeviceChains:
    """The chains of a draft model in this process.

    Args:
        engine: of the draft.
        runner: of the draft model.
    """

    def __init__(self, engine: DraftEngine, runner: ModelRunner) -> None:
        self.runner, self._worker = runner, engine.worker

    @classmethod
    def of(cls, engine: DraftEngine | None) -> "DeviceChains | None":
        """Return the chains of *engine*; None if it drafts anything else, or with other noise than the target's."""
        if engine is None or not isinstance(engine.proposer, DraftModelProposer):
            return None
        worker, runner = engine.worker, engine.worker.forward
        is_plain = engine.proposer.shape.width == 1 and worker.draft_sampler is None and worker.early_stop is None
        if not is_plain or type(runner) is not ModelRunner or runner.kv_window is not None:
            return None
        return None if isinstance(worker.cache, TargetCache) else cls(engine, runner)

    def prepare(self, rows: Seq[Row]) -> tuple[Ints, Ints]:
        """Return how many tokens each row's chain has, 0 where it cannot draft, and `RoundRows.has_previous_R`.

        Rows whose cache lacks more than the loop feeds catch up first, as far as one round may.
        """
        asked = [DraftRow(row.slot, row.k, depth=row.depth, room=self._worker.slots.room(row.slot)) for row in rows]
        wanting = [r for r, row in enumerate(asked) if row.length]
        ready = [wanting[i] for i in self._worker.within_budget([asked[r] for r in wanting])]
        lengths_R = np.zeros(len(rows), np.int64)
        lengths_R[ready] = [asked[r].length for r in ready]
        slots_R = np.array([row.slot for row in rows], np.int64)
        cache = self._worker.cache
        far = slots_R[(lengths_R > 0) & (cache.ends(slots_R) - cache.held[slots_R] > MOST_FED)]
        if len(far):
            cache.feed(far, cache.held[far], cache.ends(far) - MOST_FED)
        has_previous_R: Ints = (cache.ends(slots_R) - cache.held[slots_R] == MOST_FED).astype(np.int64)
        return lengths_R, has_previous_R

    def finish(self, slots_R: Ints, lengths_R: Ints, drafts: Seq[list[int]]) -> None:
        """Record what was fed: of each draft all tokens but the last."""
        rows = np.flatnonzero(lengths_R)
        if len(rows):
            fed = [drafts[r][: length - 1] for r, length in zip(rows.tolist(), lengths_R[rows].tolist(), strict=True)]
            self._worker.cache.record_chains(slots_R[rows], fed)
