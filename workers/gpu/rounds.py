"""Whole rounds on the device: the draft's loop, the target's forward, sampling and acceptance.

One copy brings everything to the device, one brings the result back, and the host waits once. Rounds that this cannot
run take the ordinary path: prompts, masks and bias of logits, grammars, log-probabilities, and more rows than are
captured. Where a plan says that its rows continue, the round after it is launched before the host waits.
"""

import logging
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from protos.draft import NO_DRAFT, Draft
from protos.messages import RoundPlan, Row, Verdict
from protos.worker_messages import RoundDone
from workers.attention.batch import Ints
from workers.device import DeviceTimer
from workers.gpu.ahead import RoundAhead
from workers.gpu.choosing import SAMPLER_KINDS, sampler_kind
from workers.gpu.drafts.drafting import DeviceDrafts
from workers.gpu.graphs import GraphSet
from workers.gpu.inputs import Buffers
from workers.gpu.round_rows import DraftPlan, RoundRows
from workers.gpu.sizes import LINE, SamplerKind, Size, StepKey, padded
from workers.gpu.staging import SentResult
from workers.gpu.target_step import TargetStep
from workers.gpu.verdicts import verdicts_of
from workers.sampling.sample import SamplingLimits

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
        moves: graphs that move K and V of the target, by size; none where something else does.
    """

    buffers: Buffers
    steps: Mapping[Size, TargetStep]
    targets: GraphSet[StepKey]
    loops: GraphSet[StepKey]
    moves: GraphSet[Size]


class DeviceRounds:
    """Runs rounds of a target rank. See `workers.target_rank.GraphedRounds`.

    What decides whether a round runs here, and at which size, is the same on all ranks: the plan, the slots, the drafts
    that rank 0 has broadcast, and which graphs there are.

    Args:
        worker: of the target.
        drafts: of a draft in this process that graphs run; None if there is none, and for several ranks.
        captured: what is launched.
    """

    def __init__(self, worker: "TargetWorker", drafts: DeviceDrafts | None, captured: CapturedSteps) -> None:
        self._worker, self._drafts, self._captured = worker, drafts, captured
        self._group = worker.runner.loaded.group
        self._loop_timer = DeviceTimer()
        self._area = None if drafts is None else drafts.area
        self._row_sizes = sorted({size.rows for size in captured.buffers.inputs})
        self._most_drafted = max((size.queries for size in captured.buffers.inputs), default=1) - 1
        self._ahead: RoundAhead | None = None
        self._received_at = 0.0  # from then on the device ran the next round, if there was one

    @property
    def rows_ahead(self) -> int:
        """The most rows of a round that may be launched ahead."""
        keys = [(size, kind) for size in self._captured.steps for kind in SAMPLER_KINDS if size.queries == 1]
        return max((key[0].rows for key in keys if key in self._captured.targets), default=0)

    @property
    def moves_entries(self) -> bool:
        """See `GraphedRounds`."""
        return len(self._captured.moves) > 0

    def run(self, plan: RoundPlan, undecided: Seq[int]) -> RoundDone | None:
        """See `GraphedRounds`."""
        done = self._take_ahead(plan)
        if done is not None:
            return done
        slots_R = self._slots(plan)
        if slots_R is None or any(row.draft is not None and row.k for row in plan.rows):
            return None
        if not undecided:
            return self._score(plan, slots_R, [NO_DRAFT] * len(plan.rows))
        if self._drafts is None or max(row.k for row in plan.rows) > self._most_drafted:
            return None
        return self._draft_and_score(plan, slots_R, self._drafts)

    def score(self, plan: RoundPlan, drafts: Seq[Draft]) -> RoundDone | None:
        """See `GraphedRounds`."""
        slots_R = self._slots(plan)
        if slots_R is None or any(len(draft) > self._most_drafted or draft.probes for draft in drafts):
            return None
        return self._score(plan, slots_R, drafts)

    def _take_ahead(self, plan: RoundPlan) -> RoundDone | None:
        """Return the result of the round that was launched ahead; None if there is none, or *plan* is another."""
        ahead = self._ahead
        if ahead is None:
            return None
        slots_R, began = np.array([row.slot for row in plan.rows], np.int64), self._received_at
        rows_R = ahead.rows_of(plan, slots_R, self._worker.slots)
        if rows_R is None:
            ahead.sent.receive(self._group)  # the copy of its input may have to be waited for
            self._ahead = None
            return None
        if plan.continues:
            self._run_ahead(slots_R, rows_R)
        done = RoundDone(plan.round, [])
        if not self._group.rank:
            lines_RX = self._lines(ahead.sent, ahead.size)[rows_R]
            done = self._done(plan, verdicts_of(plan.rows, np.zeros_like(rows_R), {}, lines_RX), 0.0, began)
        if self._ahead is ahead:  # else the next one is running
            self._ahead = None
        return done

    def _run_ahead(self, slots_R: Ints, rows_R: Ints) -> None:
        """Launch the round after the one that is running, in which the sequences of `slots_R` have these rows.

        Those whose blocks have no place for another token end now.
        """
        has_place_R = self._worker.slots.room(slots_R) > 0
        slots_R, rows_R = slots_R[has_place_R], rows_R[has_place_R]
        limits = self._worker.sampler.limits(slots_R)
        if not len(slots_R) or (key := self._key(limits, is_drafting=False)) not in self._captured.targets:
            return
        size, kind = key
        if self._area is not None:
            self._area.save(slots_R)
        rows = self._rows(slots_R, limits, DraftPlan.of_drafts(np.zeros_like(rows_R)), {})
        self._send(size, replace(rows, follows_R=rows_R * LINE))
        self._launch(size, kind, len(slots_R))
        self._ahead = RoundAhead.of(size, slots_R, self._worker.slots, self._send_back(size))

    def _slots(self, plan: RoundPlan) -> Ints | None:
        """Return the slots of the rows; None if the round takes the ordinary path."""
        if not plan.decodes or padded(len(plan.rows), self._row_sizes) is None:
            return None
        slots_R = np.array([row.slot for row in plan.rows], np.int64)
        needs_host = self._worker.sampler.needs_host(slots_R, is_counted=self._captured.buffers.is_counted)
        return None if needs_host else slots_R

    def _score(self, plan: RoundPlan, slots_R: Ints, drafts: Seq[Draft]) -> RoundDone | None:
        """Score drafts that the host has."""
        began = time.monotonic()
        drafted_R = np.array([len(draft) for draft in drafts], np.int64)
        limits = self._worker.sampler.limits(slots_R)
        size, kind = self._key(limits, is_drafting=bool(drafted_R.any()))
        if (size, kind) not in self._captured.targets:
            return None
        for row, draft in zip(plan.rows, drafts, strict=True):
            if draft.tokens:
                self._worker.slots.write_draft(row.slot, draft.tokens)
        trees = {r: draft for r, draft in enumerate(drafts) if not draft.is_chain}
        if self._area is not None:
            self._area.save(slots_R)
        self._send(size, self._rows(slots_R, limits, DraftPlan.of_drafts(drafted_R), trees), plan.moves)
        self._launch(size, kind, len(slots_R))
        sent = self._send_back(size)
        if plan.continues and size.queries == 1:
            self._run_ahead(slots_R, np.arange(len(slots_R)))
        if self._group.rank:
            return RoundDone(plan.round, [])
        lines_RX = self._lines(sent, size)[: len(slots_R)]
        return self._done(plan, verdicts_of(plan.rows, drafted_R, trees, lines_RX), 0.0, began)

    def _draft_and_score(self, plan: RoundPlan, slots_R: Ints, device: DeviceDrafts) -> RoundDone | None:
        """Draft on the device, and score what was drafted."""
        limits = self._worker.sampler.limits(slots_R)
        if self._key(limits, is_drafting=True) not in self._captured.loops:
            return None
        began = time.monotonic()
        planned = self._prepared(device, plan.rows, slots_R)
        size, kind = self._key(limits, is_drafting=bool(planned.drafted_R.any()))
        if (size, kind) not in self._captured.targets:
            return None
        if self._area is not None:
            self._area.save(slots_R[planned.drafted_R == 0])
        self._send(size, self._rows(slots_R, limits, planned, {}), plan.moves)
        prepared_s = time.monotonic() - began
        self._loop_timer.begin()
        if size.queries > 1:
            self._captured.loops.launch((size, kind))
        self._loop_timer.end()
        self._launch(size, kind, len(slots_R))
        lines_RX = self._lines(self._send_back(size), size)[: len(slots_R)]
        drafted_s = prepared_s + self._loop_timer.seconds  # a launch returns before the loop has run
        drafted_RX = lines_RX[:, size.queries + 1 :]
        drafted_R = device.record(slots_R, planned, drafted_RX)
        trees = device.trees(planned, drafted_RX)
        return self._done(plan, verdicts_of(plan.rows, drafted_R, trees, lines_RX), drafted_s, began)

    def _prepared(self, device: DeviceDrafts, rows: Seq[Row], slots_R: Ints) -> DraftPlan:
        """Return what the draft does. Failures cost draft tokens."""
        try:
            return device.prepare(rows, slots_R)
        except torch.OutOfMemoryError as shortage:
            device.run_out(shortage)
        except Exception:
            logger.exception("the draft failed; these rows go on without draft tokens")
        return DraftPlan.of_drafts(np.zeros(len(rows), np.int64))

    def _key(self, limits: SamplingLimits, *, is_drafting: bool) -> StepKey:
        rows = padded(len(limits.temperature), self._row_sizes)
        assert rows is not None, "checked before"
        queries = 1 + (self._most_drafted if is_drafting else 0)
        return Size(rows, queries), sampler_kind(limits)

    def _rows(self, slots_R: Ints, limits: SamplingLimits, planned: DraftPlan, trees: Mapping[int, Draft]) -> RoundRows:
        sampler = self._worker.sampler
        return RoundRows(slots_R, sampler.seeds(slots_R), limits, sampler.penalties(slots_R), planned, trees)

    def _send(self, size: Size, rows: RoundRows, moves: Seq[int] = ()) -> None:
        """Send the round's input, and move K and V by `RoundPlan.moves`."""
        if self._group.rank:
            self._group.check(self._captured.buffers.results.before)  # its input is written over
        inputs, moves = self._captured.buffers.inputs[size], moves if self.moves_entries else ()
        moves_M2 = np.array(moves, np.int64).reshape(-1, 2)
        if len(moves_M2) > inputs.most_moves or size not in self._captured.moves:
            self._worker.move(moves)
            moves_M2 = moves_M2[:0]
        inputs.send(replace(rows, moves_M2=moves_M2) if len(moves_M2) else rows)
        if len(moves_M2):
            self._captured.moves.launch(size)

    def _launch(self, size: Size, kind: SamplerKind, count: int) -> None:
        """Run the target's step for *count* rows."""
        self._captured.targets.launch((size, kind))
        if self._worker.needs != "none":
            self._worker.keep_features(np.arange(count) * size.queries, self._captured.steps[size].states_of.get(kind))

    def _send_back(self, size: Size) -> SentResult:
        """Send the result of the round that was launched to the host; other ranks than 0 have none."""
        return self._captured.buffers.results.send(0 if self._group.rank else size.rows * LINE * size.queries)

    def _lines(self, sent: SentResult, size: Size) -> Ints:
        """Wait for the lines of a result, one for each row. They are valid until the next round."""
        numbers, self._received_at = sent.receive(self._group), time.monotonic()
        return numbers.reshape(size.rows, -1)

    def _done(self, plan: RoundPlan, verdicts: list[Verdict], drafted_s: float, began: float) -> RoundDone:
        if self._area is not None and plan.speculates:
            self._area.note(plan.rows, verdicts)
        return RoundDone(plan.round, verdicts, drafted_s, time.monotonic() - began - drafted_s, 0.0)
