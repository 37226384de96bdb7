"""One rank of the target group: its part of every round.

A worker process of a group of T ranks and an engine in one process run the same code. In one process the group has
one member and the draft is local; `UniExecutor` adapts such a rank to the `Executor` protocol.
"""

import time
from collections.abc import Generator, Iterator
from collections.abc import Sequence as Seq
from typing import Protocol

import torch
from msgspec import structs

from protos.draft import NO_DRAFT, Draft
from protos.errors import StepOutOfMemoryError, TargetOutOfMemoryError
from protos.interfaces import ALWAYS_UP, DraftService
from protos.messages import RoundPlan, Row, StepCosts, Verdict, WorkerInfo
from protos.stats import PhaseTimes
from protos.worker_messages import RoundDone
from workers.distributed.groups import Group, first_line
from workers.draft.wire import broadcast_drafts
from workers.target import TargetWorker
from workers.threads import ThreadCount
from workers.verification.draft_probs import ProposedDrafts


class DraftSource(Protocol):
    """Where rank 0 gets drafts from: a draft in this process, or one on a worker of its own."""

    def propose(self, plan: RoundPlan, rows: Seq[Row]) -> ProposedDrafts:
        """Return one draft for each row of *rows*, which are those of *plan* that want one."""
        ...

    def feed_back(self, plan: RoundPlan, target: TargetWorker, verdicts: Seq[Verdict], seconds: float) -> None:
        """Update the draft after a round that *target* scored and verified in *seconds*."""
        ...

    def skip(self, plan: RoundPlan) -> None:
        """Take note that a round has no result, and is planned anew."""
        ...


class GraphedRounds(Protocol):
    """Runs rounds whole as CUDA graphs, without the host between forward and verdicts: see `workers.gpu.rounds`.

    With `moves_entries`, a round that it runs begins with `RoundPlan.moves`. All ranks decide alike which rounds it
    runs; results of other ranks than 0 are empty.
    """

    @property
    def moves_entries(self) -> bool: ...  # noqa: D102

    def run(self, plan: RoundPlan, undecided: Seq[int]) -> RoundDone | None:
        """Draft for the rows *undecided*, which `TargetRank` would ask its source for, and score; None if it cannot."""
        ...

    def score(self, plan: RoundPlan, drafts: Seq[Draft]) -> RoundDone | None:
        """Score the drafts of all rows; None if it cannot."""
        ...


class TargetRank:
    """Runs rounds: propose, score, verify.

    Args:
        tp: the group of all ranks. They agree on the drafts, and the model's forward exchanges tensors over it.
        worker: this rank's share of the model.
        source: of rank 0's drafts; None if no worker drafts.
        graphed: asked first to run a round; None: the ordinary path runs all.
    """

    def __init__(
        self,
        tp: Group,
        worker: TargetWorker,
        source: DraftSource | None = None,
        graphed: GraphedRounds | None = None,
    ) -> None:
        self.worker = worker
        self.source = source
        self._graphed = graphed
        self._tp = tp
        self._holds_state = False  # in a round: whether the caches hold what they held before it, its moves done
        self.round = -1

    def run(self, plan: RoundPlan) -> RoundDone | None:
        """Run one round; return its result on rank 0, None on the others, which only run their part of the forward.

        Raises:
            StepOutOfMemoryError: the round counts as never run. A `TargetOutOfMemoryError` if other ranks wait for this
                one's tensors: the group is of no more use.
        """
        shortage = ""
        try:
            return self._run(plan)
        except torch.OutOfMemoryError as error:
            shortage = f"target rank {self._tp.rank}: {first_line(error)}"
        self.round = plan.round
        raise self._out_of_memory(plan, shortage)  # outside of the handler, whose error keeps tensors alive

    def _out_of_memory(self, plan: RoundPlan, shortage: str) -> StepOutOfMemoryError:
        if self._tp.size > 1 and not self.worker.has_forwarded:
            return TargetOutOfMemoryError(shortage)
        if self.source is not None:
            self.source.skip(plan)
        return StepOutOfMemoryError(shortage, keeps_state=self._holds_state and not self.worker.runner.loaded.recurrent)

    def _run(self, plan: RoundPlan) -> RoundDone | None:
        self._holds_state = self.worker.has_forwarded = False
        if self._tp.rank:
            self._tp.check()  # of the last round, whose results were not read here
        self.worker.slots.apply(plan)
        if self._tp.rank == 0:
            self.worker.expect(plan.new)
        if self._graphed is None or not self._graphed.moves_entries:
            self.worker.move(plan.moves)
            self._holds_state = True
        else:
            self._holds_state = not plan.moves
        undecided = [r for r, row in enumerate(plan.rows) if self._is_undecided(row)]
        done = None if self._graphed is None else self._graphed.run(plan, undecided)
        if done is None:
            done = self._run_in_parts(plan, undecided)
        self.round = plan.round
        return None if self._tp.rank else done

    def _run_in_parts(self, plan: RoundPlan, undecided: list[int]) -> RoundDone | None:
        """Propose first, then score and verify."""
        began = time.monotonic()
        proposed = self._propose(plan, undecided)
        wait_s = time.monotonic() - began if undecided else 0.0
        done = None if self._graphed is None else self._graphed.score(plan, proposed.drafts)
        if done is not None:
            return structs.replace(done, wait_s=wait_s, draft_missed=proposed.missed)
        if self._graphed is not None and self._graphed.moves_entries:
            self.worker.move(plan.moves)
            self._holds_state = True
        if self._tp.rank:
            self.worker.forward_only(plan.rows, proposed.drafts)
            return None
        verdicts = self.worker.score(plan.rows, proposed.drafts, proposed.probs)
        if self._tp.size > 1:
            self._tp.check()
        return RoundDone(
            plan.round, verdicts, wait_s, self.worker.forward_s, self.worker.verify_s, draft_missed=proposed.missed
        )

    def feed_back(self, plan: RoundPlan, done: RoundDone) -> None:
        """Pass the results of a round to the draft. Called after they were sent to the controller."""
        if self.source is not None:
            self.source.feed_back(plan, self.worker, done.verdicts, done.score_s + done.verify_s)

    def close(self) -> None:
        """Leave the group."""
        self._tp.close()

    def _propose(self, plan: RoundPlan, undecided: list[int]) -> ProposedDrafts:
        """Return the drafts of all rows. Those of the rows *undecided* are rank 0's on every rank.

        So all ranks agree on the shape of the forward.
        """
        drafts = list(self.worker.as_chains([row.draft or NO_DRAFT for row in plan.rows]))
        if not undecided:
            return ProposedDrafts(drafts)
        rows = [plan.rows[r] for r in undecided]
        proposed = ProposedDrafts([NO_DRAFT] * len(rows)) if self._tp.rank else self._from_source(plan, rows)
        if self._tp.size > 1:
            proposed = proposed._replace(drafts=broadcast_drafts(self._tp.cpu_group, rows, proposed.drafts))
        for r, draft in zip(undecided, proposed.drafts, strict=True):
            drafts[r] = draft
        return proposed._replace(drafts=drafts)

    def _is_undecided(self, row: Row) -> bool:
        """Whether the plan leaves the row's draft to rank 0: the source proposes it, or a grammar may shorten it."""
        return row.k > 0 and (row.draft is None or bool(self.worker.slots.constrained[row.slot]))

    def _from_source(self, plan: RoundPlan, rows: list[Row]) -> ProposedDrafts:
        """Return the drafts of *rows* without tokens that a grammar forbids."""
        wanting = [row for row in rows if row.draft is None]
        proposed = ProposedDrafts([NO_DRAFT] * len(wanting))
        if wanting and self.source is not None:
            proposed = self.source.propose(plan, wanting)
        new = iter(proposed.drafts)
        drafts = [next(new) if row.draft is None else row.draft for row in rows]
        return proposed._replace(drafts=self.worker.prune(rows, self.worker.as_chains(drafts)))


class UniExecutor:
    """An `Executor` without other processes: there is none to wait for, to lose or to rebuild.

    Args:
        info: of the engine.
        rank: runs the rounds.
        threads: revises the number of threads between rounds; None leaves it as it is.
        later: advanced between rounds; swaps in compiled forwards, and yields the costs of steps when they are known.
    """

    lacks = ""

    def __init__(
        self,
        info: WorkerInfo,
        rank: TargetRank,
        threads: ThreadCount | None = None,
        later: Iterator[StepCosts | None] | None = None,
    ) -> None:
        self.info, self.rank, self._threads, self._later = info, rank, threads, later
        self._propose_s = self._score_s = self._verify_s = 0.0

    @property
    def drafting(self) -> DraftService:
        """See `Executor`."""
        return ALWAYS_UP

    @property
    def times(self) -> PhaseTimes:
        """See `Executor`."""
        return PhaseTimes(propose_s=self._propose_s, score_s=self._score_s, verify_s=self._verify_s)

    def start(self) -> WorkerInfo:
        """See `Executor`. Everything is loaded already."""
        return self.info

    def run(self, plan: RoundPlan) -> list[Verdict]:
        """See `Executor`. Nothing but memory can be lacking."""
        if self._threads is not None and time.monotonic() >= self._threads.due:
            self._threads.revise()
        done = self.rank.run(plan)
        assert done is not None, "a group of one has a result"
        self.rank.feed_back(plan, done)
        self._add(done)
        return list(done.verdicts)

    def poll(self) -> StepCosts | None:
        """See `Executor`."""
        return None if self._later is None else next(self._later, None)

    def rebuild(self, for_s: float) -> WorkerInfo | None:
        """See `Executor`."""
        return self.info

    def shutdown(self) -> None:
        """See `Executor`."""
        if isinstance(self._later, Generator):
            self._later.close()  # ends the compiling processes
        self.rank.close()

    def _add(self, done: RoundDone) -> None:
        self._propose_s += done.wait_s
        self._score_s += done.score_s
        self._verify_s += done.verify_s
