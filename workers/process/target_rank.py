"""A target rank: runs its share of every round's forward; rank 0 gathers the drafts, samples and judges."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from protos.draft import NO_DRAFT, Draft
from protos.messages import RoundPlan, Row
from protos.worker_messages import FormPair, FromWorker, Plan, RoundDone, Stop, ToWorker
from workers.distributed.groups import Group
from workers.draft.channel import Arrival, DraftReceiver, Pairing
from workers.draft.draft_model import DraftEngine
from workers.draft.wire import agree, decode, laws_in
from workers.slots import SlotTable
from workers.target import TargetWorker
from workers.verification.draft_probs import NO_DRAFT_PROBS, DraftProbsBySlot


class GatheredDrafts(NamedTuple):
    """Drafts, what they were drawn from as far as that is told, and whether the draft missed its deadline."""

    drafts: Seq[Draft]
    laws: DraftProbsBySlot = NO_DRAFT_PROBS
    missed: bool = False


class TargetRank:
    """One rank of the target group. Rounds are the only thing it does; pairs form beside them.

    Args:
        send: tells the controller.
        tp: all ranks; they exchange the drafts, and the model's forward exchanges over it.
        worker: this rank's share of the model.
        pairing: rank 0's end of the pair with the draft.
        local: the draft in this process, if there is one.
        law_size: ids of a law at most that the draft elsewhere tells; 0 where it tells none.
    """

    def __init__(
        self,
        send: Callable[[FromWorker], None],
        tp: Group,
        worker: TargetWorker,
        pairing: Pairing[DraftReceiver],
        local: DraftEngine | None = None,
        *,
        law_size: int = 0,
    ) -> None:
        self._send, self._tp, self._worker = send, tp, worker
        self._slots: SlotTable = worker.slots
        self._pairing, self._local, self._law_size = pairing, local, law_size
        self._device = worker.runner.device
        self.round = -1

    def take(self, message: ToWorker) -> bool:
        """Do what the controller says; False when it is time to leave."""
        if isinstance(message, Plan):
            self._run(message.plan)
        elif isinstance(message, FormPair):
            self._pairing.form(message)
        return not isinstance(message, Stop)

    def close(self) -> None:
        """Leave all groups."""
        self._pairing.close()
        self._tp.close()

    def _run(self, plan: RoundPlan) -> None:
        self._slots.apply(plan)
        if self._tp.rank == 0:
            self._worker.expect(plan.new)
        self._worker.move(plan.moves)
        unsettled = [
            r for r, row in enumerate(plan.rows) if row.k and (row.draft is None or self._slots.constrained[row.slot])
        ]
        drafts = [row.draft or NO_DRAFT for row in plan.rows]
        waited, found = 0.0, GatheredDrafts(())
        if unsettled:
            began = time.monotonic()
            found = self._gather(plan, [plan.rows[r] for r in unsettled])
            for r, draft in zip(unsettled, found.drafts, strict=True):
                drafts[r] = draft
            waited = time.monotonic() - began
        if self._tp.rank == 0:
            self._judge(plan, found._replace(drafts=drafts), waited)
        else:
            self._worker.follow(plan.rows, drafts)
        self.round = plan.round

    def _judge(self, plan: RoundPlan, found: GatheredDrafts, waited: float) -> None:
        began = time.monotonic()
        verdicts = self._worker.score(plan.rows, found.drafts, found.laws)
        took, forward_s = time.monotonic() - began, self._worker.forward_s
        self._send(RoundDone(plan.round, verdicts, waited, forward_s, took - forward_s, found.missed))
        if self._local is not None:
            self._local.learn(plan, self._worker, verdicts)
        end = self._pairing.end(plan.epoch)
        if end is not None:
            end.scored(took)
            if end.features is not None:
                end.features.post(plan.round, self._worker.kept(plan.rows, verdicts))

    def _gather(self, plan: RoundPlan, rows: list[Row]) -> GatheredDrafts:
        """Return the drafts of *rows* as rank 0 has them.

        All ranks obey rank 0's one message, so that none can disagree on the shape of the forward.
        """
        found = self._found(plan, rows) if self._tp.rank == 0 else GatheredDrafts([NO_DRAFT] * len(rows))
        if self._tp.size > 1:
            found = found._replace(drafts=agree(self._tp, rows, found.drafts, self._device))
        return found

    def _found(self, plan: RoundPlan, rows: list[Row]) -> GatheredDrafts:
        """Return the drafts of *rows*, those in the plan and those that were waited for, as far as grammars allow."""
        wanting = [r for r, row in enumerate(rows) if row.draft is None]
        drafts, told = [row.draft or NO_DRAFT for row in rows], GatheredDrafts(())
        if wanting:
            told = self._drafts(plan, [rows[r] for r in wanting])
            for r, draft in zip(wanting, told.drafts, strict=True):
                drafts[r] = draft
        return told._replace(drafts=self._worker.prune(rows, drafts))

    def _drafts(self, plan: RoundPlan, rows: list[Row]) -> GatheredDrafts:
        if self._local is not None:
            drafts = self._local.ask(rows)
            return GatheredDrafts(drafts, self._local.laws(rows, drafts))
        end = self._pairing.end(plan.epoch)
        arrival = Arrival(None) if end is None else end.collect(plan.round, max(row.k for row in rows))
        if arrival.table is None:
            return GatheredDrafts([NO_DRAFT] * len(rows), missed=arrival.missed)
        drafts = decode(self._slots, rows, arrival.table, self._worker.sampler.vocab_size, self._law_size)
        return GatheredDrafts(drafts, laws_in(rows, drafts, arrival.table) if self._law_size else NO_DRAFT_PROBS)
