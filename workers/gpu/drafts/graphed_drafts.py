"""Drafts of a draft model that is alone in its process: one graph, one copy each way, and one wait a round."""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from protos.config.engine import SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.draft_module import DraftRunner
from protos.errors import ConfigError
from workers.attention.batch import Ints
from workers.gpu.choosing import sampler_kind
from workers.gpu.drafts.drafting import DeviceDrafts
from workers.gpu.graphs import GraphSet
from workers.gpu.inputs import Buffers
from workers.gpu.round_rows import DraftPlan, RoundRows
from workers.gpu.sizes import Size, StepKey, padded

if TYPE_CHECKING:
    from workers.draft.engine import DraftEngine


class GraphedDrafts:
    """Drafts with graphs what they can, and the rest with the proposer of *engine*. See `Proposer`.

    Rows with masks or bias of logits are the rest, and rounds of more rows than are captured.

    Args:
        engine: of a draft for which `workers.gpu.drafts.drafter.drafter_of` returns a drafter.
        drafts: of that draft.
        loops: graphs that draft, and write the drafts into the results.
        buffers: of the graphs.
    """

    on_worker: ClassVar[bool] = True

    def __init__(self, engine: "DraftEngine", drafts: DeviceDrafts, loops: GraphSet[StepKey], buffers: Buffers) -> None:
        self._worker, self._ordinary, self._drafts = engine.worker, engine.proposer, drafts
        self._loops, self._buffers = loops, buffers
        self._rows = sorted({size.rows for size in buffers.inputs})
        self._queries = max(size.queries for size in buffers.inputs)

    @classmethod
    def create(cls, config: SpeculativeConfig, runner: DraftRunner | None) -> Self:
        """Raise: it is made of a draft that is loaded, see `workers.gpu.build.graph_drafts`."""
        raise ConfigError(f"{cls.__name__} is made for a draft that is loaded, not from a configuration")

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """See `Proposer`."""
        slots_R = np.array([row.slot for row in rows], np.int64)
        key = self._key(slots_R, max((row.k for row in rows), default=0))
        if key is None or key not in self._loops:
            return self._ordinary.propose(rows)
        plan = self._drafts.plan(rows, slots_R)
        drafted_RX = self._draft(key, slots_R, plan)
        self._drafts.record(slots_R, plan, drafted_RX)
        return self._drafts.drafts(plan, drafted_RX)

    def _key(self, slots_R: Ints, most_drafted: int) -> StepKey | None:
        """Return the key of the graph for these rows; None if there can be none."""
        sampler, num_rows = self._worker.sampler, padded(len(slots_R), self._rows)
        if (
            num_rows is None
            or most_drafted >= self._queries
            or sampler.needs_host(slots_R, is_counted=self._buffers.is_counted)
        ):
            return None
        return Size(num_rows, self._queries), sampler_kind(sampler.limits(slots_R))

    def _draft(self, key: StepKey, slots_R: Ints, plan: DraftPlan) -> Ints:
        """Return what `write_drafts` wrote for each row, `[R, 2 * Q - 1]`."""
        sampler, size = self._worker.sampler, key[0]
        rows = RoundRows(slots_R, sampler.seeds(slots_R), sampler.limits(slots_R), sampler.penalties(slots_R), plan)
        self._buffers.inputs[size].send(rows)
        self._loops.launch(key)
        line = 2 * size.queries - 1
        return self._buffers.results.receive(size.rows * line).reshape(-1, line)[: len(slots_R)]
