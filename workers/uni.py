"""`UniExecutor`: target, draft and sampler in one process; the round of DESIGN section 4 without a wire."""

import time
from collections.abc import Sequence as Seq

from protos.draft import NO_DRAFT, Draft
from protos.interfaces import InOneProcess
from protos.messages import RoundPlan, Row, Verdict, WorkerInfo
from protos.stats import PhaseTimes
from workers.draft.draft_model import DraftEngine
from workers.slots import SlotTable
from workers.target import TargetWorker
from workers.verification.draft_probs import NO_DRAFT_PROBS, DraftProbsBySlot


class UniExecutor(InOneProcess):
    """Runs rounds in this process. Built by `workers.build`."""

    def __init__(
        self, info: WorkerInfo, slots: SlotTable, target: TargetWorker, draft: DraftEngine | None = None
    ) -> None:
        self.info, self.slots, self.target, self.draft = info, slots, target, draft
        self._propose_s = self._score_s = self._verify_s = 0.0

    @property
    def times(self) -> PhaseTimes:
        """See `Executor`. In one process nobody waits for the other's wire."""
        return PhaseTimes(propose_s=self._propose_s, score_s=self._score_s, verify_s=self._verify_s)

    def start(self) -> WorkerInfo:
        """Return what the controller needs to know; everything is loaded already."""
        return self.info

    def run(self, plan: RoundPlan) -> list[Verdict]:
        """Propose, score, verify."""
        self.slots.apply(plan)
        self.target.expect(plan.new)
        self.target.move(plan.moves)
        drafts, laws = self._propose(plan.rows)
        began = time.monotonic()
        verdicts = self.target.score(plan.rows, drafts, laws)
        self._score_s += self.target.forward_s
        self._verify_s += time.monotonic() - began - self.target.forward_s
        if self.draft is not None:
            self.draft.learn(plan, self.target, verdicts)
        return verdicts

    def shutdown(self) -> None:
        """Nothing outlives this object."""

    def _propose(self, rows: Seq[Row]) -> tuple[Seq[Draft], DraftProbsBySlot]:
        """Take the drafts that ride in the plan; ask the draft worker for the others, and what they were drawn from."""
        drafts, laws = [row.draft or NO_DRAFT for row in rows], NO_DRAFT_PROBS
        wanting = [r for r, row in enumerate(rows) if row.k and row.draft is None]
        if wanting and self.draft is not None:
            began = time.monotonic()
            asking = [rows[r] for r in wanting]
            found = self.draft.ask(asking)
            for r, draft in zip(wanting, found, strict=True):
                drafts[r] = draft
            laws = self.draft.laws(asking, found)
            self._propose_s += time.monotonic() - began
        return self.target.prune(rows, drafts), laws
