"""A target that samples what a log says: the verdicts of rounds without the target's forward, or with it.

Under the default acceptance rule a draft token is accepted if it equals the token that the target samples there. The
log has those tokens, so acceptance is known without running the target.
"""

import time
from collections.abc import Sequence as Seq

from cluster.simulate.requests import output_of
from protos.config.engine import EngineConfig
from protos.draft import NO_DRAFT, Draft
from protos.interfaces import ALWAYS_UP, DraftService
from protos.messages import NewSequence, RoundPlan, Row, Verdict, WorkerInfo
from protos.stats import PhaseTimes
from workers.draft.engine import DraftEngine
from workers.sampling.sample import Ints
from workers.sampling.sampler import Sampler
from workers.target import with_tree
from workers.verification.acceptance import AcceptedTokens, SampleAndMatch, Scored, accept

NO_TOKEN = -1
AFTER_END = 0
"""Stands for the target's tokens after the end of a logged answer; they are never committed."""


def match(draft: Draft, output: Seq[int], start: int) -> AcceptedTokens:
    """Return what a round yields whose first new token is `output[start]`."""
    depths = [0, *draft.depths()]
    following = [output[start + depth] if start + depth < len(output) else NO_TOKEN for depth in depths]
    path = accept(draft, following)
    emitted = [following[0], *(following[node + 1] for node in path)]
    return AcceptedTokens(path, [AFTER_END if token == NO_TOKEN else token for token in emitted])


class RecordedRule(SampleAndMatch):
    """An acceptance rule for a target that runs: its next tokens are those of the log, whatever its logits are."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(sampler)
        self._slots = sampler.slots

    def accept(self, scored: Scored) -> list[AcceptedTokens]:
        """See `AcceptanceRule`."""
        firsts: Ints = scored.counts_R.cumsum() - scored.counts_R
        accepted = []
        for draft, count, first in zip(scored.drafts, scored.counts_R.tolist(), firsts.tolist(), strict=True):
            if count:
                slot = int(scored.slots_N[first])
                start = int(scored.index_N[first] - self._slots.prompt_len[slot])
                accepted.append(match(draft, output_of(self._slots.sampling[slot]), start))
        return accepted


class RecordedTarget:
    """An `Executor` without a target: drafts are made as in an engine of one process, and verified against the log.

    Args:
        config: of the engine, whose shape of drafts is settled.
        info: describes the target.
        draft: what runs on a draft worker; None where all proposers run in the controller.
    """

    drafting: DraftService = ALWAYS_UP

    def __init__(self, config: EngineConfig, info: WorkerInfo, draft: DraftEngine | None) -> None:
        self.info, self.draft = info, draft
        self._propose_s = 0.0
        self._joined: list[NewSequence | None] = [None] * config.scheduler.max_num_seqs

    @property
    def times(self) -> PhaseTimes:
        """See `Executor`: only drafting takes time."""
        return PhaseTimes(propose_s=self._propose_s)

    def start(self) -> WorkerInfo:
        """See `Executor`. Everything is loaded already."""
        return self.info

    def run(self, plan: RoundPlan) -> list[Verdict]:
        """See `Executor`."""
        for new in plan.new:
            self._joined[new.slot] = new
        drafts = self._drafts(plan)
        return [self._verdict(row, draft) for row, draft in zip(plan.rows, drafts, strict=True) if row.samples]

    def _drafts(self, plan: RoundPlan) -> list[Draft]:
        if self.draft is None:
            return [row.draft or NO_DRAFT for row in plan.rows]
        self.draft.worker.slots.apply(plan)
        wanting = [row for row in plan.rows if row.k and row.draft is None]
        began = time.monotonic()
        found = iter(self.draft.propose(plan, wanting).drafts if wanting else ())
        self._propose_s += time.monotonic() - began
        return [next(found) if row.k and row.draft is None else row.draft or NO_DRAFT for row in plan.rows]

    def _verdict(self, row: Row, draft: Draft) -> Verdict:
        joined = self._joined[row.slot]
        assert joined is not None, "a row's sequence has joined"
        path, emitted = match(draft, output_of(joined.sampling), row.known_len - joined.prompt_len)
        return with_tree(Verdict(row.slot, emitted, len(draft), path), draft)

    def poll(self) -> None:
        """See `Executor`."""

    def rebuild(self, for_s: float) -> bool:
        """See `Executor`."""
        return True

    def shutdown(self) -> None:
        """See `Executor`."""
