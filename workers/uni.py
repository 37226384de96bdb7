"""`UniExecutor`: target, draft and sampler in one process; the round of DESIGN section 4 without a wire."""

from collections.abc import Sequence as Seq

from protos.drafts import NO_DRAFT
from protos.interfaces import InOneProcess
from protos.messages import Draft, RoundPlan, Row, Verdict, WorkerInfo
from workers.draft_side import DraftSide
from workers.slots import SlotTable
from workers.target import TargetWorker


class UniExecutor(InOneProcess):
    """Runs rounds in this process. Built by `workers.build`."""

    def __init__(self, info: WorkerInfo, slots: SlotTable, target: TargetWorker,
                 draft: DraftSide | None = None) -> None:
        self.info, self.slots, self.target, self.draft = info, slots, target, draft

    def start(self) -> WorkerInfo:
        """Return what the controller needs to know; everything is loaded already."""
        return self.info

    def run(self, plan: RoundPlan) -> list[Verdict]:
        """Propose, score, verify."""
        self.slots.apply(plan)
        self.target.move(plan.moves)
        drafts = self._propose(plan.rows)
        verdicts = self.target.score(plan.rows, drafts)
        if self.draft is not None:
            self.draft.learn(plan, self.target, verdicts)
        return verdicts

    def shutdown(self) -> None:
        """Nothing outlives this object."""

    def _propose(self, rows: Seq[Row]) -> list[Draft]:
        """Take the drafts that ride in the plan; ask the draft worker for the others that are wanted."""
        drafts = [row.draft or NO_DRAFT for row in rows]
        wanting = [r for r, row in enumerate(rows) if row.k and row.draft is None]
        if wanting and self.draft is not None:
            for r, draft in zip(wanting, self.draft.ask([rows[r] for r in wanting]), strict=True):
                drafts[r] = draft
        return drafts
