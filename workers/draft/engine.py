"""The draft engine: a loaded draft with its cache and its proposer, ready to draft.

It runs in a draft worker's process, or in the process of target rank 0. `workers.draft.load` loads its weights.
"""

import logging
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

import numpy as np
import torch

from proposers import registry
from protos.capacity import TokenBudget
from protos.config.engine import EngineConfig
from protos.draft import NO_DRAFT, Draft, DraftRow
from protos.interfaces import Proposer
from protos.messages import RoundPlan, Row, Verdict
from workers.distributed.groups import first_line
from workers.draft.early_stop import make_early_stop
from workers.draft.load import LoadedDraft, speculation_of
from workers.draft.sampling import make_draft_sampler
from workers.draft.worker import DraftWorker
from workers.features import Features
from workers.model.runner import ModelRunner
from workers.sampling.sampler import Sampler
from workers.slots import SlotTable
from workers.target import TargetWorker
from workers.verification.draft_probs import ProposedDrafts

logger = logging.getLogger(__name__)

NUM_TRIALS = 3
"""A proposal is timed this often; the fastest trial counts."""
SEVERAL_ROWS = 3
"""Rows of the trial that calls a module with several tokens."""


class DraftEngine:
    """Drafts for the rows of a round. A `DraftSource` of target rank 0 where it lives in the same process.

    Args:
        worker: runs the draft's module over its paged KV cache.
        proposer: calls the worker and makes drafts.
        width: number of features the target sends for each token; 0 where it sends none.

    Attributes:
        num_failures: rounds in a row in which the proposer raised an exception. Want of memory does not count.
        last_failure: the last of these exceptions.
    """

    def __init__(self, worker: DraftWorker, proposer: Proposer, width: int = 0) -> None:
        self.worker, self.proposer, self.width = worker, proposer, width
        self.num_failures = 0
        self.last_failure: Exception | None = None
        self._budget = TokenBudget(worker.max_catch_up, least=0)

    def propose(self, plan: RoundPlan, rows: Seq[Row]) -> ProposedDrafts:
        """Return a draft for each row of *rows*. A failure costs draft tokens, never a request."""
        self.worker.least_survival = plan.least_survival
        return self._proposed(rows, lambda drafted: self.worker.propose(self.proposer, drafted))

    def propose_ready(self, plan: RoundPlan, rows: Seq[Row]) -> ProposedDrafts:
        """As `propose`, but without waiting: rows whose cache lags too far get no draft and catch up later."""
        slots = [row.slot for row in plan.rows]
        self.worker.least_survival = plan.least_survival
        return self._proposed(rows, lambda drafted: self.worker.propose_at_once(self.proposer, slots, drafted))

    def _proposed(self, rows: Seq[Row], propose: Callable[[list[DraftRow]], list[Draft]]) -> ProposedDrafts:
        drafts = self._checked(self.asked(rows), propose)
        return ProposedDrafts(drafts, self.worker.draft_probs([row.slot for row in rows], drafts))

    def asked(self, rows: Seq[Row]) -> list[DraftRow]:
        """Return what the proposer is asked for *rows*."""
        rooms = self.worker.slots.room(np.array([row.slot for row in rows], np.int64)).tolist()
        return [DraftRow(row.slot, row.k, depth=row.depth, room=room) for row, room in zip(rows, rooms, strict=True)]

    def _checked(self, rows: list[DraftRow], propose: Callable[[list[DraftRow]], list[Draft]]) -> list[Draft]:
        """Return what *propose* returns, without tokens that are out of range; no drafts where it fails."""
        self.begin()
        try:
            vocab_size = self.worker.sampler.vocab_size
            drafts = [
                draft.valid_prefix(row.k, vocab_size).within(row.depth)
                for draft, row in zip(propose(rows), rows, strict=True)
            ]
        except torch.OutOfMemoryError as shortage:
            self.run_out(shortage)
            return [NO_DRAFT] * len(rows)
        except Exception as failure:
            # Without its traceback, whose frames keep tensors alive.
            self.num_failures, self.last_failure = self.num_failures + 1, failure.with_traceback(None)
            logger.exception("the draft failed; these rows go on without draft tokens")
            return [NO_DRAFT] * len(rows)
        self.num_failures = 0
        return drafts

    def begin(self) -> None:
        """Set how many tokens a round may feed: fewer for a while after one that ran out of memory."""
        if self._budget.is_reduced:
            self._budget.count_step(1)
        self.worker.max_catch_up = self._budget.limit

    def run_out(self, shortage: torch.OutOfMemoryError) -> None:
        """Halve the tokens that rounds may feed. With none left, the draft pauses for some rounds."""
        self._budget.shrink(self.worker.max_catch_up - self.worker.left)
        most = self._budget.limit
        logger.warning("the draft is out of memory: %s; it feeds at most %d tokens now", first_line(shortage), most)

    def catch_up_some(self, most: int) -> bool:
        """Feed at most *most* tokens that the draft lacks; return False when it lacks none, or has no memory."""
        worker = self.worker
        try:
            worker.left = worker.max_catch_up - min(most, self._budget.limit)
            return worker.catch_up_some(worker.max_catch_up - worker.left)
        except torch.OutOfMemoryError as shortage:
            self.run_out(shortage)
            return self._budget.limit > 0

    def skip(self, plan: RoundPlan) -> None:
        """See `DraftSource`. The cache counts what was fed, and features come with the round that is run."""

    def feed_back(self, plan: RoundPlan, target: TargetWorker, verdicts: Seq[Verdict], seconds: float) -> None:
        """Take the features of the round that *target* scored, if it speculates. Failures cost draft tokens."""
        if self.worker.needs == "none" or not plan.speculates:
            return
        try:
            features = target.kept_features(plan.rows, verdicts)
            if len(features.table_M4):
                self.worker.receive(features)
            self.worker.absorb([row.slot for row in plan.rows if not row.samples])
        except Exception:
            logger.exception("the draft failed to take the target's features; it goes on without them")

    def try_out(self, k: int) -> None:
        """Make trial proposals of *k* tokens that call the module with one token, and with several.

        There must be `SEVERAL_ROWS` slots.
        """
        self._try(1, 2, k)
        self._try(SEVERAL_ROWS, 4, k)
        self._clear()

    def measure(self, num_rows: int, k: int) -> Iterator[tuple[int, float]]:
        """Yield rows and seconds of a draft token, for 1, 2, 4 ... rows up to *num_rows* or all slots.

        Call before serving.
        """
        is_empty = True
        for found in self.worker.forward.measure(num_rows):
            is_empty = False
            yield found
        most = min(num_rows, len(self.worker.slots.known_len))
        for size in sorted({*(1 << power for power in range(most.bit_length())), most}) if is_empty else ():
            yield size, self._time(size, k) / k

    def _time(self, num_rows: int, k: int) -> float:
        """Return the seconds of a proposal of *k* tokens for each of *num_rows* dummy sequences."""
        took = min(self._try(num_rows, 2, k) for _ in range(NUM_TRIALS))
        self._clear()
        return took

    def _try(self, num_rows: int, known: int, k: int) -> float:
        """Return the seconds of a proposal of *k* tokens for each of *num_rows* dummy sequences of *known* tokens."""
        self._add_dummies(num_rows, known)
        rooms = self.worker.slots.room(np.arange(num_rows)).tolist()
        rows = [DraftRow(slot, k, room=room) for slot, room in enumerate(rooms)]
        started = time.perf_counter()
        self.worker.propose(self.proposer, rows)
        return time.perf_counter() - started

    def _clear(self) -> None:
        self.worker.forget()
        self.worker.slots.clear()

    def _add_dummies(self, num_rows: int, known: int) -> None:
        """Put a sequence into each slot, with as many blocks as it can have, all of them block 0."""
        slots = self.worker.slots
        self._clear()
        slots.known_len[:num_rows] = known
        slots.num_blocks[:num_rows] = slots.blocks.shape[1]
        if self.worker.needs != "none":
            fed = known - 1
            table_M4 = np.array([(slot, 0, 0, fed) for slot in range(num_rows)], np.int64)
            device, dtype = self.worker.forward.loaded.device, self.worker.forward.loaded.dtype
            self.worker.receive(Features(table_M4, torch.zeros(num_rows * fed, self.width, dtype=dtype, device=device)))


def make_engine(
    draft: LoadedDraft,
    config: EngineConfig,
    slots: SlotTable,
    sampler: Sampler,
    *,
    num_blocks: int,
    target: ModelRunner | None = None,
) -> DraftEngine:
    """Allocate the cache of a loaded draft, and make its proposer; *target* runs the target of this process."""
    speculative = speculation_of(config)
    worker = DraftWorker(
        draft.forward(slots, num_blocks, target),
        slots,
        sampler,
        config.scheduler.max_num_batched_tokens,
        needs=draft.spec.needs,
        shift=draft.shift,
        draft_sampler=make_draft_sampler(speculative, sampler),
        early_stop=make_early_stop(speculative, sampler),
    )
    return DraftEngine(worker, registry.create(speculative, worker), draft.width)
