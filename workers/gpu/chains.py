"""Keeps a draft model's cache in step with chains that are drafted on the device.

What the host has to know before a round is which rows can draft, and how many tokens their caches lack; after it, which
tokens were fed. The draft tokens themselves come to the host with the round's result.
"""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
import torch

from proposers.draft_model import DraftModelProposer
from protos.draft import DraftRow
from protos.messages import Row
from workers.attention.batch import Ints
from workers.draft.cache import DraftCache
from workers.draft.target_cache import TargetCache
from workers.model.runner import ModelRunner

if TYPE_CHECKING:
    from workers.draft.engine import DraftEngine

MOST_FED = 2
"""Known tokens that the loop feeds: the newest, and the last of a draft that was accepted in full."""


def loop_runner(engine: "DraftEngine") -> ModelRunner | None:
    """Return the model that *engine* drafts chains with; None if it drafts otherwise, or with a noise of its own."""
    worker, runner = engine.worker, engine.worker.forward
    if not isinstance(engine.proposer, DraftModelProposer) or engine.proposer.shape.width > 1:
        return None
    if worker.draft_sampler is not None or worker.early_stop is not None or isinstance(worker.cache, TargetCache):
        return None
    return runner if type(runner) is ModelRunner and runner.kv_window is None and can_capture(runner) else None


def can_capture(runner: ModelRunner) -> bool:
    """Whether graphs can repeat forwards: recurrent layers and caches of another dtype are planned on the host."""
    return not runner.loaded.recurrent and runner.cache.dtype == runner.loaded.dtype


def bring_level(cache: DraftCache, slots_R: Ints, lengths_R: Ints) -> Ints:
    """Feed what the rows that draft lack, but for what the loop feeds; return `RoundRows.has_previous_R`."""
    far = slots_R[(lengths_R > 0) & (cache.ends(slots_R) - cache.held[slots_R] > MOST_FED)]
    if len(far):
        cache.feed(far, cache.held[far], cache.ends(far) - MOST_FED)
    has_previous_R: Ints = (cache.ends(slots_R) - cache.held[slots_R] == MOST_FED).astype(np.int64)
    return has_previous_R


def record(cache: DraftCache, slots_R: Ints, lengths_R: Ints, drafts: Seq[list[int]]) -> None:
    """Record what the loop fed: of each draft of `lengths_R` tokens all but the last."""
    rows = np.flatnonzero(lengths_R)
    if len(rows):
        fed = [drafts[r][: length - 1] for r, length in zip(rows.tolist(), lengths_R[rows].tolist(), strict=True)]
        cache.record_chains(slots_R[rows], fed)


class DeviceChains:
    """The chains of a draft model in the target's process.

    Args:
        engine: of the draft.
    """

    def __init__(self, engine: "DraftEngine") -> None:
        self._engine, self._worker = engine, engine.worker

    def prepare(self, rows: Seq[Row]) -> tuple[Ints, Ints]:
        """Return how many tokens each row's chain has, 0 where it cannot draft, and `RoundRows.has_previous_R`.

        Rows whose cache lacks more than the loop feeds catch up first, as far as one round may.
        """
        self._engine.begin()
        asked = [DraftRow(row.slot, row.k, depth=row.depth, room=self._worker.slots.room(row.slot)) for row in rows]
        wanting = [r for r, row in enumerate(asked) if row.length]
        ready = [wanting[i] for i in self._worker.within_budget([asked[r] for r in wanting])]
        lengths_R = np.zeros(len(rows), np.int64)
        lengths_R[ready] = [asked[r].length for r in ready]
        slots_R = np.array([row.slot for row in rows], np.int64)
        return lengths_R, bring_level(self._worker.cache, slots_R, lengths_R)

    def run_out(self, shortage: torch.OutOfMemoryError) -> None:
        """Have smaller rounds after `prepare` found too little memory."""
        self._engine.run_out(shortage)

    def finish(self, slots_R: Ints, lengths_R: Ints, drafts: Seq[list[int]]) -> None:
        """Record what was fed, once the drafts are on the host."""
        record(self._worker.cache, slots_R, lengths_R, drafts)
