"""Whole rounds on the device: the draft's loop, the target's forward, sampling and acceptance.

One copy brings everything to the device, one brings the result back, and the host waits once. Rounds that this cannot
run take the ordinary path: prompts, trees, logits processors, grammars, log-probabilities, and more rows than are
captured.
"""

import logging
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from protos.draft import NO_DRAFT, Draft
from protos.messages import RoundPlan, Row, Verdict, with_tree
from protos.worker_messages import RoundDone
from workers.attention.batch import Ints
from workers.gpu.chains import DeviceChains
from workers.gpu.choosing import chooser_for
from workers.gpu.graphs import GraphSet
from workers.gpu.inputs import Buffers, RoundRows
from workers.gpu.sizes import Chooser, Size, StepKey, padded
from workers.gpu.target_step import TargetStep
from workers.sampling.sampler import NOT_A_NUMBER

if TYPE_CHECKING:
    from workers.target import TargetWorker

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CapturedSteps:
    """The graphs of one engine, and their buffers.

    Attributes:
        buffers: of all of them.
        steps: the target's steps.
        targets: their graphs.
        loops: graphs of the loops of a draft model in the same process; none without one.
    """

    buffers: Buffers
    steps: Mapping[Size, TargetStep]
    targets: GraphSet[StepKey]
    loops: GraphSet[StepKey]


class DeviceRounds:
    """Runs rounds of an engine whose target is in one process. See `workers.target_rank.WholeRounds`.

    Args:
        worker: of the target.
        chains: of a draft model in this process; None if there is none.
        captured: what is launched.
    """

    def __init__(self, worker: "TargetWorker", chains: DeviceChains | None, captured: CapturedSteps) -> None:
        self._worker, self._chains, self._captured = worker, chains, captured
        self._rows = sorted({size.rows for size in captured.buffers.inputs})
        self._most_drafted = max((size.queries for size in captured.buffers.inputs), default=1) - 1

    def run(self, plan: RoundPlan, unsettled: Seq[int]) -> RoundDone | None:
        """See `WholeRounds`."""
        slots_R = self._slots(plan)
        if slots_R is None or any(row.draft is not None and row.k for row in plan.rows):
            return None
        if not unsettled:
            return self._score(plan, slots_R, [NO_DRAFT] * len(plan.rows))
        if self._chains is None or max(row.k for row in plan.rows) > self._most_drafted:
            return None
        return self._draft_and_score(plan, slots_R, self._chains)

    def score(self, plan: RoundPlan, drafts: Seq[Draft]) -> RoundDone | None:
        """See `WholeRounds`."""
        slots_R = self._slots(plan)
        if slots_R is None or any(len(draft) > self._most_drafted or draft.probes for draft in drafts):
            return None
        return self._score(plan, slots_R, drafts)

    def _slots(self, plan: RoundPlan) -> Ints | None:
        """Return the slots of the rows; None if the round takes the ordinary path."""
        if not plan.decodes or padded(len(plan.rows), self._rows) is None:
            return None
        slots_R = np.array([row.slot for row in plan.rows], np.int64)
        return None if self._worker.sampler.needs_host(slots_R) else slots_R

    def _score(self, plan: RoundPlan, slots_R: Ints, drafts: Seq[Draft]) -> RoundDone | None:
        """Score drafts that the host has."""
        began = time.monotonic()
        drafted_R = np.array([len(draft) for draft in drafts], np.int64)
        size, chooser = self._key(slots_R, is_drafting=bool(drafted_R.any()))
        if (size, chooser) not in self._captured.targets:
            return None
        for row, draft in zip(plan.rows, drafts, strict=True):
            if draft.tokens:
                self._worker.slots.write_draft(row.slot, draft.tokens)
        trees = {r: draft for r, draft in enumerate(drafts) if not draft.is_chain}
        self._send(size, slots_R, drafted_R, np.zeros_like(drafted_R), trees)
        lines = self._launch(size, chooser, len(slots_R)).tolist()
        verdicts = _verdicts(plan.rows, drafted_R, lines, size.queries)
        for r, tree in trees.items():
            verdicts[r] = _tree_verdict(plan.rows[r].slot, tree, lines[r], size.queries)
        return self._done(plan.round, verdicts, 0.0, began)

    def _draft_and_score(self, plan: RoundPlan, slots_R: Ints, chains: DeviceChains) -> RoundDone | None:
        """Draft on the device, and score what was drafted."""
        if self._key(slots_R, is_drafting=True) not in self._captured.loops:
            return None
        began = time.monotonic()
        drafted_R, has_previous_R = self._prepared(chains, plan.rows)
        size, chooser = self._key(slots_R, is_drafting=bool(drafted_R.any()))
        if (size, chooser) not in self._captured.targets:
            return None
        self._send(size, slots_R, drafted_R, has_previous_R, {})
        if size.queries > 1:
            self._captured.loops.launch((size, chooser))
        drafted_s = time.monotonic() - began
        lines = self._launch(size, chooser, len(slots_R)).tolist()
        chains.finish(slots_R, drafted_R, [line[size.queries + 1 :] for line in lines])
        return self._done(plan.round, _verdicts(plan.rows, drafted_R, lines, size.queries), drafted_s, began)

    def _prepared(self, chains: DeviceChains, rows: Seq[Row]) -> tuple[Ints, Ints]:
        """Return the lengths of chains, and where the token before the newest is fed. Failures cost draft tokens."""
        try:
            return chains.prepare(rows)
        except torch.OutOfMemoryError as shortage:
            chains.run_out(shortage)
            return np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        except Exception:
            logger.exception("the draft failed; these rows go on without draft tokens")
            return np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)

    def _key(self, slots_R: Ints, *, is_drafting: bool) -> StepKey:
        rows = padded(len(slots_R), self._rows)
        assert rows is not None, "checked before"
        queries = 1 + (self._most_drafted if is_drafting else 0)
        return Size(rows, queries), chooser_for(self._worker.sampler.limits(slots_R))

    def _send(
        self, size: Size, slots_R: Ints, drafted_R: Ints, has_previous_R: Ints, trees: Mapping[int, Draft]
    ) -> None:
        sampler = self._worker.sampler
        rows = RoundRows(slots_R, drafted_R, sampler.seeds(slots_R), sampler.limits(slots_R), has_previous_R, trees)
        self._captured.buffers.inputs[size].send(rows)

    def _launch(self, size: Size, chooser: Chooser, count: int) -> Ints:
        """Run the target's step; return the lines of its result for *count* rows."""
        self._captured.targets.launch((size, chooser))
        states_TF = self._captured.steps[size].states_TF
        if states_TF is not None:
            self._worker.keep(np.arange(count) * size.queries, states_TF)
        return self._captured.buffers.results.receive(size.rows * 2 * size.queries).reshape(size.rows, -1)[:count]

    def _done(self, number: int, verdicts: list[Verdict], drafted_s: float, began: float) -> RoundDone:
        return RoundDone(number, verdicts, drafted_s, time.monotonic() - began - drafted_s, 0.0)


def _verdicts(rows: Seq[Row], drafted_R: Ints, lines: Seq[list[int]], queries: int) -> list[Verdict]:
    """Return the verdict of each row's chain from its line of the result, see `TargetStep`."""
    return [
        _verdict(row.slot, drafted, range(line[queries].bit_length()) if line[queries] >= 0 else range(64), line)
        for row, drafted, line in zip(rows, drafted_R.tolist(), lines, strict=True)
    ]


def _tree_verdict(slot: int, tree: Draft, line: list[int], queries: int) -> Verdict:
    parents, path = tree.node_parents(), list[int]()
    for node, parent in enumerate(parents):
        # Of equal siblings only the first is on the path.
        if line[queries] >> node & 1 and parent == (path[-1] if path else -1):
            path.append(node)
    return with_tree(_verdict(slot, len(tree), path, line), tree)


def _verdict(slot: int, drafted: int, path: Seq[int], line: list[int]) -> Verdict:
    emitted = [line[0], *(line[node + 1] for node in path)]
    if emitted[0] == -1:
        return Verdict(slot, failed=NOT_A_NUMBER)
    if emitted[-1] == -1:  # after the last accepted token, which may end the sequence; else the next round fails
        path, emitted = path[:-1], emitted[:-1]
    return Verdict(slot, emitted, drafted, list(path))
