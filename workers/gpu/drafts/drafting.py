"""Keeps a draft's cache in step with drafts that are made on the device.

What the host has to know before a round is which rows can draft, how many tokens their caches lack, and how large their
trees may be; after it, which tokens were fed. The draft itself comes to the host with the round's result.
"""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
import torch

from proposers.shared.dynamic_tree import TreeShape
from protos.draft import NO_DRAFT, Draft, DraftRow
from protos.messages import Row
from workers.attention.batch import Ints
from workers.gpu.drafts.features import FeatureArea
from workers.gpu.round_rows import DraftPlan

if TYPE_CHECKING:
    from workers.draft.engine import DraftEngine

CHAIN_KNOWN = 2
"""Known tokens that are fed for chains: the newest, and the last of a draft that was accepted in full."""


class DeviceDrafts:
    """Drafts that are made on the device: chains, or trees.

    Args:
        engine: of the draft.
        shape: of its trees; of chains, if its width is 1.
        most_drafted: the most draft tokens of a row.
        area: has the target's features; None for a draft that reads tokens alone.

    Attributes:
        area: as given.
        num_known: known tokens that a graph feeds at most; rows whose cache lacks more catch up before.
    """

    def __init__(self, engine: "DraftEngine", shape: TreeShape, most_drafted: int, area: FeatureArea | None) -> None:
        self._engine, self._worker, self._shape, self.area = engine, engine.worker, shape, area
        self._is_tree = shape.width > 1
        # Nodes of trees, and what was fed with a draft's own features, are not kept in the cache: what is accepted is
        # fed again, and the token sampled after it.
        self._is_fed_again = self._is_tree or area is not None
        self._has_cache = bool(engine.worker.forward.loaded.layers)
        self.num_known = 1 + min(shape.depth, most_drafted) if self._is_fed_again else CHAIN_KNOWN
        if not self._has_cache:
            self.num_known = 1

    def prepare(self, rows: Seq[Row], slots_R: Ints) -> DraftPlan:
        """Return what rows draft: nothing if they cannot. Rows that lack many tokens catch up first."""
        self._engine.begin()
        k_R, levels_R = _wanted(rows)
        wanting = np.flatnonzero(levels_R)
        ready = wanting[self._worker.within_budget(slots_R[wanting], levels_R[wanting])]
        is_ready_R = np.zeros(len(rows), np.bool_)
        is_ready_R[ready] = True
        return self._plan(slots_R, k_R * is_ready_R, levels_R * is_ready_R)

    def run_out(self, shortage: torch.OutOfMemoryError) -> None:
        """Have smaller rounds after `prepare` found too little memory."""
        self._engine.run_out(shortage)

    def plan(self, rows: Seq[DraftRow], slots_R: Ints) -> DraftPlan:
        """Return what rows draft that are ready to; feed what they lack, but for what the graph feeds."""
        return self._plan(slots_R, *_wanted(rows))

    def _plan(self, slots_R: Ints, k_R: Ints, levels_R: Ints) -> DraftPlan:
        levels_R = np.minimum(levels_R, self._shape.depth)
        drafted_R = np.where(levels_R > 0, k_R, 0) if self._is_tree else levels_R
        nothing_R = np.zeros_like(levels_R)
        lowest_R = self._worker.cache.lowest(slots_R)
        return DraftPlan(
            drafted_R,
            self._catch_up(slots_R, drafted_R) if self._has_cache else nothing_R,
            levels_R,
            self._shape.num_fed(levels_R, self._worker.slots.room(slots_R)) if self._is_tree else nothing_R,
            self._columns(slots_R, drafted_R),
            nothing_R if lowest_R is None else lowest_R,
        )

    def _catch_up(self, slots_R: Ints, drafted_R: Ints) -> Ints:
        """Feed rows that draft what the graph cannot; return `DraftPlan.lacking_R`."""
        cache = self._worker.cache
        far = slots_R[(drafted_R > 0) & (cache.ends(slots_R) - cache.held[slots_R] > self.num_known)]
        if len(far):
            cache.feed(far, cache.held[far], cache.ends(far) - self.num_known)
        lacking_R: Ints = np.clip(cache.ends(slots_R) - cache.held[slots_R] - 1, 0, self.num_known - 1)
        return lacking_R

    def _columns(self, slots_R: Ints, drafted_R: Ints) -> Ints:
        """Bring the features that are fed into their area; return `DraftPlan.columns_R`."""
        columns_R, rows = np.zeros_like(drafted_R), np.flatnonzero(drafted_R)
        if self.area is not None and len(rows):
            columns_R[rows] = self.area.stage(slots_R[rows])
        return columns_R

    def record(self, slots_R: Ints, plan: DraftPlan, drafted_RX: Ints) -> Ints:
        """Record what was fed for drafts; return the number of draft tokens of each row.

        Args:
            slots_R: of the rows.
            plan: of this round.
            drafted_RX: what `workers.gpu.target_step.write_drafts` wrote.
        """
        num_R: Ints = np.where(plan.drafted_R, drafted_RX[:, drafted_RX.shape[1] // 2], 0)
        rows = np.flatnonzero(plan.drafted_R)
        if len(rows) and self._has_cache:
            # Of a chain the last token is not fed.
            fed_R = np.zeros_like(num_R) if self._is_fed_again else np.maximum(num_R - 1, 0)
            self._worker.cache.record_chains(slots_R[rows], drafted_RX[rows], fed_R[rows])
        return num_R

    def trees(self, plan: DraftPlan, drafted_RX: Ints) -> dict[int, Draft]:
        """Return the drafts that are no chains, by row; arguments as for `record`."""
        drafts = self.drafts(plan, drafted_RX) if self._is_tree else ()
        return {r: draft for r, draft in enumerate(drafts) if not draft.is_chain}

    def drafts(self, plan: DraftPlan, drafted_RX: Ints) -> list[Draft]:
        """Return the drafts; arguments as for `record`."""
        wanted_R, lines = plan.drafted_R.tolist(), drafted_RX.tolist()
        return [self._draft(line) if wanted else NO_DRAFT for line, wanted in zip(lines, wanted_R, strict=True)]

    def _draft(self, line: list[int]) -> Draft:
        most = len(line) // 2
        count, tokens = line[most], tuple(line[: line[most]])
        if not self._is_tree:
            return Draft(tokens)
        return Draft(tokens, tuple(column - 1 for column in line[most + 1 : most + 1 + count])).first(count)


def _wanted(rows: Seq[Row] | Seq[DraftRow]) -> tuple[Ints, Ints]:
    """Return the most draft tokens of each row, and the most levels."""
    k_R = np.array([row.k for row in rows], np.int64)
    return k_R, np.minimum(k_R, np.array([row.depth for row in rows], np.int64))
