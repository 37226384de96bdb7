"""`UniExecutor`: target, draft and sampler in one process; the round of DESIGN section 4 without a wire."""

import logging
from collections.abc import Sequence as Seq

from protos.drafts import NO_DRAFT, sane
from protos.interfaces import DraftRow, InOneProcess, Proposer
from protos.messages import Draft, RoundPlan, Row, Verdict, WorkerInfo
from workers.draft import DraftWorker
from workers.slots import SlotTable
from workers.target import TargetWorker

logger = logging.getLogger(__name__)


class UniExecutor(InOneProcess):
    """Runs rounds in this process. Built by `workers.build`."""

    def __init__(self, info: WorkerInfo, slots: SlotTable, target: TargetWorker, draft: DraftWorker | None = None,
                 proposer: Proposer | None = None) -> None:
        self.info, self.slots, self.target, self.draft, self.proposer = info, slots, target, draft, proposer

    def start(self) -> WorkerInfo:
        """Return what the controller needs to know; everything is loaded already."""
        return self.info

    def run(self, plan: RoundPlan) -> list[Verdict]:
        """Propose, score, verify."""
        self.slots.apply(plan)
        self.target.move(plan.moves)
        drafts = self._propose(plan.rows)
        return self.target.score(plan.rows, drafts)

    def shutdown(self) -> None:
        """Nothing outlives this object."""

    def _propose(self, rows: Seq[Row]) -> list[Draft]:
        """Take the drafts that ride in the plan; ask the draft worker for the others that are wanted."""
        drafts = [row.draft or NO_DRAFT for row in rows]
        wanting = [r for r, row in enumerate(rows) if row.k and row.draft is None]
        if wanting and self.draft is not None and self.proposer is not None:
            asked = [DraftRow(rows[r].slot, rows[r].k) for r in wanting]
            for r, draft in zip(wanting, ask(self.draft, self.proposer, asked), strict=True):
                drafts[r] = draft
        return drafts


def ask(worker: DraftWorker, proposer: Proposer, asked: list[DraftRow]) -> list[Draft]:
    """Return the worker's drafts. A draft that fails costs guesses, never a request."""
    try:
        drafts = worker.propose(proposer, asked)
        vocab_size = worker.sampler.vocab_size
        return [sane(draft, row.k, vocab_size) for draft, row in zip(drafts, asked, strict=True)]
    except Exception:
        logger.exception("the draft failed; these rows go on without guesses")
        return [NO_DRAFT] * len(asked)
