"""Chains of a draft model that is alone in its process: one graph, one copy each way, and one wait a round."""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from protos.config.engine import SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.draft_module import DraftRunner
from protos.errors import ConfigError
from protos.interfaces import Proposer
from workers.attention.batch import Ints
from workers.gpu.chains import bring_level, record
from workers.gpu.choosing import chooser_for
from workers.gpu.graphs import GraphSet
from workers.gpu.inputs import Buffers, RoundRows
from workers.gpu.sizes import Size, StepKey, padded

if TYPE_CHECKING:
    from workers.draft.engine import DraftEngine


class GraphedChains:
    """Drafts with graphs what they can, and the rest with the proposer of *engine*. See `Proposer`.

    Rows with penalties or other logits processors are the rest, and rounds of more rows than are captured.

    Args:
        engine: of a draft for which there is a `loop_runner`.
        loops: graphs that draft, and write the tokens into the results.
        buffers: of the graphs.
    """

    on_worker: ClassVar[bool] = True

    def __init__(self, engine: "DraftEngine", loops: GraphSet[StepKey], buffers: Buffers) -> None:
        self._worker, self._ordinary = engine.worker, engine.proposer
        self._loops, self._buffers = loops, buffers
        self._rows = sorted({size.rows for size in buffers.inputs})
        self._queries = max(size.queries for size in buffers.inputs)

    @classmethod
    def create(cls, config: SpeculativeConfig, runner: DraftRunner | None) -> Self:
        """Raise: it is made of a draft that is loaded, see `workers.gpu.build.graph_chains`."""
        raise ConfigError(f"{cls.__name__} is made for a draft that is loaded, not from a configuration")

    @property
    def ordinary(self) -> Proposer:
        """What drafts the rest."""
        return self._ordinary

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """See `Proposer`."""
        slots_R = np.array([row.slot for row in rows], np.int64)
        lengths_R = np.array([row.length for row in rows], np.int64)
        key = self._key(slots_R, lengths_R)
        if key is None or key not in self._loops:
            return self._ordinary.propose(rows)
        lines = self._draft(key, slots_R, lengths_R).tolist()
        drafts = [line[1 : 1 + length] for line, length in zip(lines, lengths_R.tolist(), strict=True)]
        record(self._worker.cache, slots_R, lengths_R, drafts)
        return [Draft(tuple(tokens)) for tokens in drafts]

    def _key(self, slots_R: Ints, lengths_R: Ints) -> StepKey | None:
        """Return the key of the graph for these rows; None if there can be none."""
        sampler, num_rows = self._worker.sampler, padded(len(slots_R), self._rows)
        if num_rows is None or lengths_R.max(initial=0) >= self._queries or sampler.needs_host(slots_R):
            return None
        return Size(num_rows, self._queries), chooser_for(sampler.limits(slots_R))

    def _draft(self, key: StepKey, slots_R: Ints, lengths_R: Ints) -> Ints:
        """Return each row's newest token and its draft, `[R, Q]`."""
        sampler, size = self._worker.sampler, key[0]
        has_previous_R = bring_level(self._worker.cache, slots_R, lengths_R)
        rows = RoundRows(slots_R, lengths_R, sampler.seeds(slots_R), sampler.limits(slots_R), has_previous_R)
        self._buffers.inputs[size].send(rows)
        self._loops.launch(key)
        return self._buffers.results.receive(size.rows * size.queries).reshape(size)[: len(slots_R)]
