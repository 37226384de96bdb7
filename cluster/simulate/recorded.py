"""A target that samples what a log says: the verdicts of rounds without the target's forward, or with it.

Under the default acceptance rule a draft token is accepted if it equals the token that the target samples there. The
log has those tokens, so acceptance is known without running the target.
"""

import time
from collections.abc import Sequence as Seq

import numpy as np
import torch

from cluster.simulate.requests import RecordedSampling, output_of
from protos.config.engine import EngineConfig
from protos.draft import NO_DRAFT, Draft
from protos.interfaces import ALWAYS_UP, DraftService
from protos.messages import NewSequence, RoundPlan, Row, Sampling, Verdict, WorkerInfo, with_tree
from protos.stats import PhaseTimes
from workers.draft.engine import DraftEngine
from workers.draft.sampling import DraftPositions, DraftSampler
from workers.sampling.sample import Ints, SamplingLimits, distribution, top_distribution
from workers.sampling.sampler import Sampler
from workers.verification.acceptance import AcceptedTokens, SampleAndMatch, Scored, accept
from workers.verification.draft_probs import DraftProbs

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


def outcome(draft: Draft, sampling: Sampling, start: int) -> AcceptedTokens:
    """Return what a round yields for the request with *sampling*: what matches, or what its odds have drawn."""
    assert isinstance(sampling, RecordedSampling), "made by `cluster.simulate.replay`"
    if sampling.odds is not None:
        draft = draft.first(sampling.odds.num_accepted(draft, start, sampling))
    return match(draft, output_of(sampling), start)


class LoggedDraftSampler(DraftSampler):
    """Drafts the logged tokens of requests with odds, which are told the draft's distributions; others as before.

    Args:
        sampler: has the requests' parameters.
        before: what samples draft tokens of other requests; None: *sampler* does.
        size: most ids that are drafted from, as the acceptance rule has it; None: all.
    """

    def __init__(self, sampler: Sampler, before: DraftSampler | None, size: int | None) -> None:
        super().__init__(sampler, samples=True)
        self._before, self._size = before, size

    def sample(self, logits_NV: torch.Tensor, positions: DraftPositions) -> torch.Tensor:
        """See `DraftSampler`."""
        ids_N = self._as_before(logits_NV, positions)
        slots, limits = self._sampler.slots, self._sampler.limits(positions.slots_N)
        for n, (slot, index) in enumerate(zip(positions.slots_N.tolist(), positions.index_N.tolist(), strict=True)):
            sampling = slots.sampling[slot]
            if isinstance(sampling, RecordedSampling) and sampling.odds is not None:
                logits_1V = logits_NV[n : n + 1]
                q_V = self._distribution(logits_1V, limits.at(np.array([n]))).numpy()
                raw_V = logits_1V[0].softmax(0, dtype=torch.float64).cpu().numpy()
                place, depth = index - int(slots.prompt_len[slot]), index - int(slots.known_len[slot])
                token = sampling.odds.feed(q_V, raw_V, place, depth, sampling)
                ids_N[n] = ids_N[n] if token is None else token
        return ids_N

    def draft_probs(self, slots: Seq[int], drafts: Seq[Draft]) -> dict[int, DraftProbs]:
        """See `DraftSampler`: the odds have what the rule would read."""
        return {}

    def _as_before(self, logits_NV: torch.Tensor, positions: DraftPositions) -> torch.Tensor:
        if self._before is None:
            return self._sampler.sample(logits_NV, positions.slots_N, positions.index_N)
        return self._before.sample(logits_NV, positions)

    def _distribution(self, logits_1V: torch.Tensor, limits: SamplingLimits) -> torch.Tensor:
        """Return the distribution that the draft samples from, float64 `[V]`."""
        if self._size is None:
            return distribution(logits_1V, limits)[0].cpu()
        ids_1L, q_1L = top_distribution(logits_1V, limits, self._size)
        return torch.zeros(logits_1V.shape[1], dtype=torch.float64).index_put(
            (ids_1L[0].cpu(),), q_1L[0].double().cpu()
        )


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
                accepted.append(outcome(draft, self._slots.sampling[slot], start))
        return accepted


class RecordedTarget:
    """An `Executor` without a target: drafts are made as in an engine of one process, and verified against the log.

    Args:
        config: of the engine, whose shape of drafts is settled.
        info: describes the target.
        draft: what runs on a draft worker; None where all proposers run in the controller.
    """

    drafting: DraftService = ALWAYS_UP
    lacks = ""

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
        path, emitted = outcome(draft, joined.sampling, row.known_len - joined.prompt_len)
        return with_tree(Verdict(row.slot, emitted, len(draft), path), draft)

    def poll(self) -> None:
        """See `Executor`."""

    def rebuild(self, for_s: float) -> WorkerInfo | None:
        """See `Executor`."""
        return self.info

    def shutdown(self) -> None:
        """See `Executor`."""
