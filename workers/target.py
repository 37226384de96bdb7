"""The target worker: one forward over all rows of a round, then sampling and acceptance."""

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch

from protos.draft import Draft
from protos.layers import Needs
from protos.messages import NewSequence, Row, TokenLogprobs, Verdict, with_tree
from workers.attention.batch import Batch, Ints, TreeMask, TreeMasks
from workers.features import Features, kept
from workers.model.runner import ModelRunner
from workers.recurrent.kept_states import KeptStates
from workers.sampling.logprobs import token_logprobs
from workers.sampling.sampler import Sampler
from workers.slots import SlotTable
from workers.verification.acceptance import AcceptanceRule, AcceptedTokens, SampleAndMatch, Scored
from workers.verification.draft_probs import NO_DRAFT_PROBS, DraftProbsBySlot
from workers.verification.probes import ProbedBySlot, accept_with_probes, with_probed


@dataclass(frozen=True)
class Scoring:
    """The positions that a round scores. Row r feeds its known tokens and its draft, and scores `counts_R[r]` of them.

    Attributes:
        batch: the tokens that are fed.
        counts_R: `1 + k` for rows that sample, else 0.
        wanted_N: flat token index of every scored position, row after row.
        slots_N, index_N: the slot, and the position of the token that is sampled there.
    """

    batch: Batch
    counts_R: Ints
    wanted_N: Ints

    @property
    def slots_N(self) -> Ints:  # noqa: D102
        return self.batch.slots_T[self.wanted_N]

    @property
    def index_N(self) -> Ints:  # noqa: D102
        return self.batch.positions_T[self.wanted_N] + 1

    @classmethod
    def of(cls, rows: Seq[Row], drafts: Seq[Draft], tokens_SL: Ints) -> "Scoring":
        """Lay out *rows* with their *drafts*, whose ids are in `tokens_SL` already."""
        table = np.array(
            [
                (row.slot, row.start, row.length, len(draft), row.samples)
                for row, draft in zip(rows, drafts, strict=True)
            ],
            np.int64,
        )
        slots_R, starts_R, known_R, drafted_R, samples_R = np.ascontiguousarray(table.T)
        lengths_R = known_R + drafted_R
        tree_masks = _tree_masks(rows, drafts, starts_R + lengths_R, lengths_R)
        batch = Batch.from_history(tokens_SL, slots_R, starts_R, lengths_R, tree_masks=tree_masks)
        kept_states = _kept_states(rows)
        if kept_states is not None:
            batch = replace(batch, kept_states=kept_states)
        counts_R = (drafted_R + 1) * samples_R
        first_R = batch.offsets_R + known_R - 1 - (np.cumsum(counts_R) - counts_R)
        wanted_N = np.arange(int(counts_R.sum())) + np.repeat(first_R, counts_R)
        return cls(batch, counts_R, wanted_N)


def _kept_states(rows: Seq[Row]) -> KeptStates | None:
    """Return the recurrent states of the prefix cache that *rows* name."""
    if all(row.state_from < 0 and not row.states_to for row in rows):
        return None
    rows_N = np.repeat(np.arange(len(rows)), [len(row.states_to) // 2 for row in rows])
    pairs_N2 = np.array([number for row in rows for number in row.states_to], np.int64).reshape(-1, 2)
    return KeptStates(np.array([row.state_from for row in rows]), rows_N, pairs_N2[:, 0], pairs_N2[:, 1])


def _tree_masks(rows: Seq[Row], drafts: Seq[Draft], ends_R: Ints, lengths_R: Ints) -> TreeMasks | None:
    """Return the attention masks of draft trees; None where every draft is a chain."""
    if all(draft.is_chain for draft in drafts):
        return None
    return TreeMasks.of([_tree_mask(row, draft) for row, draft in zip(rows, drafts, strict=True)], ends_R, lengths_R)


def _tree_mask(row: Row, draft: Draft) -> TreeMask | None:
    if draft.is_chain:
        return None
    return TreeMask(row.known_len, [row.known_len - 1 + depth for depth in draft.depths()], draft.ancestor_masks())


class TargetWorker:
    """Owns the target's runner, its sampler and the acceptance rule.

    Args:
        runner: of the target's forward.
        slots: the sequences of the round's rows.
        sampler: samples a token at each scored position.
        needs: the tokens whose features a draft is fed.
        rule: of acceptance; sample and match if None.

    Attributes:
        forward_s: seconds of the last forward; on a GPU, those in which it was launched.
        verify_s: seconds of sampling and acceptance after it.
        has_forwarded: whether the round's forward has been run, or launched. What follows it concerns no other rank.
    """

    def __init__(
        self,
        runner: ModelRunner,
        slots: SlotTable,
        sampler: Sampler,
        needs: Needs = "none",
        rule: AcceptanceRule | None = None,
    ) -> None:
        self.runner, self.slots, self.sampler, self.needs = runner, slots, sampler, needs
        self._rule: AcceptanceRule = rule or SampleAndMatch(sampler)
        self.forward_s = self.verify_s = 0.0
        self.has_forwarded = False
        self._offsets_R: Ints = np.empty(0, np.int64)
        self._states_TF: torch.Tensor | None = None

    def move(self, moves: Seq[int]) -> None:
        """Move KV entries as a plan demands, before its forward: see `RoundPlan.moves`."""
        if moves:
            self.runner.cache.move(np.array(moves, np.int64).reshape(-1, 2))

    def expect(self, new: Seq[NewSequence]) -> None:
        """Prepare for new sequences. Called on the rank that samples."""
        self.sampler.expect(new)

    def as_chains(self, drafts: Seq[Draft]) -> Seq[Draft]:
        """Return *drafts*, or for a target with recurrent layers the chains that they begin with."""
        if not self.runner.loaded.recurrent:
            return drafts
        return [draft if draft.is_chain else draft.straight_prefix() for draft in drafts]

    def prune(self, rows: Seq[Row], drafts: Seq[Draft]) -> Seq[Draft]:
        """Return *drafts* without tokens that could never be accepted."""
        return self._rule.prune(rows, drafts)

    def forward_only(self, rows: Seq[Row], drafts: Seq[Draft]) -> None:
        """Run the forward of a round, as ranks other than 0 do: rank 0 samples and accepts."""
        scoring, prompt_P = self._lay_out(rows, drafts)
        self.runner.forward(scoring.batch, np.concatenate((scoring.wanted_N, prompt_P)))

    def _lay_out(self, rows: Seq[Row], drafts: Seq[Draft]) -> tuple[Scoring, Ints]:
        """Write drafts into the slots; return the scored positions and those whose prompt logprobs are requested."""
        for row, draft in zip(rows, drafts, strict=True):
            if draft.tokens:
                self.slots.write_draft(row.slot, draft.tokens)
        scoring = Scoring.of(rows, drafts, self.slots.tokens)
        return scoring, self._prompt_positions(rows, scoring.batch)

    def score(self, rows: Seq[Row], drafts: Seq[Draft], probs: DraftProbsBySlot = NO_DRAFT_PROBS) -> list[Verdict]:
        """Return one verdict for each row that samples or owes prompt log-probabilities, in order.

        *probs* are the distributions that draft tokens were sampled from, which some acceptance rules need.
        """
        began = time.monotonic()
        scoring, prompt_P = self._lay_out(rows, drafts)
        self.sampler.begin(rows, drafts)
        logits_XV = self._forward(scoring.batch, np.concatenate((scoring.wanted_N, prompt_P)))
        self.forward_s, self.has_forwarded = time.monotonic() - began, True
        logits_NV = logits_XV[: len(scoring.wanted_N)]
        scored = Scored(
            rows,
            drafts,
            scoring.counts_R,
            logits_NV,
            scoring.slots_N,
            scoring.index_N,
            scoring.batch.tree_masks is not None,
            probs,
        )
        accepted, probed = self._accept(scored)
        verdicts = self._verdicts(rows, drafts, scoring, accepted, logits_NV)
        if probed:
            verdicts = [with_probed(verdict, probed) for verdict in verdicts]
        if len(prompt_P):
            self._add_prompt_logprobs(verdicts, rows, scoring.batch, prompt_P, logits_XV[len(scoring.wanted_N) :])
        self.verify_s = time.monotonic() - began - self.forward_s
        return [verdict for verdict in verdicts if verdict is not None]

    def _forward(self, batch: Batch, wanted_X: Ints) -> torch.Tensor:
        """Return the logits at the wanted tokens, `[X, V]`; keep the features, if there are any."""
        logits_XV, states_TF = self.runner.run(batch, wanted_X)
        if states_TF is not None:
            self._offsets_R, self._states_TF = batch.offsets_R, states_TF
        return logits_XV

    def _accept(self, scored: Scored) -> tuple[list[AcceptedTokens], ProbedBySlot]:
        """Return what the rule accepts, and the tokens after probes by slot."""
        if scored.has_trees and any(draft.probes for draft in scored.drafts):
            return accept_with_probes(self._rule, scored, self.slots)
        return self._rule.accept(scored), {}

    @property
    def samples_and_matches(self) -> bool:
        """Whether tokens are accepted by the rule "coupled"."""
        return type(self._rule) is SampleAndMatch

    def keep_features(self, offsets_R: Ints, states_TF: torch.Tensor | None) -> None:
        """Keep the features of a round that was scored elsewhere; None if the draft has them already."""
        self._offsets_R, self._states_TF = offsets_R, states_TF

    def kept_features(self, rows: Seq[Row], verdicts: Seq[Verdict]) -> Features:
        """Return the features of the tokens that were kept in the round just scored, as far as the draft needs them."""
        table_M4, fed_N = kept(self.needs, rows, verdicts, self._offsets_R, self.slots.generation)
        if self._states_TF is None:
            return Features(table_M4[:0], torch.empty(0, 0))
        with torch.inference_mode():
            at_N = torch.from_numpy(fed_N).to(self._states_TF.device)
            return Features(table_M4, self._states_TF.index_select(0, at_N))

    def _verdicts(
        self,
        rows: Seq[Row],
        drafts: Seq[Draft],
        scoring: Scoring,
        accepted: Seq[AcceptedTokens],
        logits_NV: torch.Tensor,
    ) -> list[Verdict | None]:
        """Return the verdict of each row; None for rows that do not sample."""
        verdicts: list[Verdict | None] = []
        at, remaining = 0, iter(accepted)
        for row, draft, count in zip(rows, drafts, scoring.counts_R.tolist(), strict=True):
            verdicts.append(self._verdict(row.slot, draft, next(remaining), logits_NV, at) if count else None)
            at += count
        return verdicts

    def _verdict(self, slot: int, draft: Draft, accepted: AcceptedTokens, logits_NV: torch.Tensor, at: int) -> Verdict:
        """Return the verdict of one row that samples; its logits begin *at* this position."""
        path, emitted = accepted
        if self.sampler.skips(slot):
            return Verdict(slot)
        if emitted[0] == -1:
            return Verdict(slot, failed=self.sampler.failure_reason(slot, logits_NV[at : at + 1 + len(draft)]))
        if emitted[-1] == -1:
            # No token is allowed after the last accepted one. As without a draft, that one may end the sequence; if it
            # does not, the next round fails the row.
            path, emitted = path[:-1], emitted[:-1]
        logprobs = self._logprobs(slot, logits_NV, at, path, emitted)
        return with_tree(Verdict(slot, emitted, len(draft.tokens), path, logprobs), draft)

    def _logprobs(
        self, slot: int, logits_NV: torch.Tensor, at: int, path: Seq[int], emitted: list[int]
    ) -> list[TokenLogprobs] | None:
        top = self.slots.sampling[slot].logprobs
        if top is None:
            return None
        scored = torch.tensor([at, *(at + node + 1 for node in path)], device=logits_NV.device)
        return token_logprobs(logits_NV[scored], emitted, top)

    def _prompt_positions(self, rows: Seq[Row], batch: Batch) -> Ints:
        """Return the flat indices of fed prompt tokens after which prompt log-probabilities are requested."""
        sampling, prompt_len = self.slots.sampling, self.slots.prompt_len
        requested = [
            r
            for r, row in enumerate(rows)
            if sampling[row.slot].prompt_logprobs is not None and row.start + 1 < prompt_len[row.slot]
        ]
        if not requested:
            return np.empty(0, np.int64)
        rows_T = np.repeat(np.arange(len(rows)), batch.lengths_R)
        inside_T = batch.positions_T + 1 < prompt_len[batch.slots_T]
        return np.flatnonzero(np.isin(rows_T, requested) & inside_T)

    def _add_prompt_logprobs(
        self, verdicts: list[Verdict | None], rows: Seq[Row], batch: Batch, prompt_P: Ints, logits_PV: torch.Tensor
    ) -> None:
        """Give each requested row's verdict the log-probabilities of the prompt tokens that follow those fed."""
        slots_P, following_P = batch.slots_T[prompt_P], batch.positions_T[prompt_P] + 1
        for r, row in enumerate(rows):
            here = np.flatnonzero(slots_P == row.slot)
            if not len(here):
                continue
            tokens = self.slots.tokens[row.slot, following_P[here]].tolist()
            top = self.slots.sampling[row.slot].prompt_logprobs or 0
            found = token_logprobs(logits_PV[here[0] : here[-1] + 1], tokens, top)  # a row's tokens are contiguous
            verdict = verdicts[r] or Verdict(row.slot)
            verdicts[r] = msgspec.structs.replace(verdict, prompt_logprobs=found)
