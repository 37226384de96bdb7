"""The rules "standard" and "block": rejection sampling with the functions of `workers.verification.rejection_math`.

A sampled draft comes with the distributions q of its tokens (`workers.verification.draft_probs`); for one that was not
sampled, q are point masses. If distributions are missing or invalid, the row continues without a draft: whether a draft
arrives never depends on its tokens.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import torch

from protos.draft import NO_DRAFT, Draft
from protos.messages import Row
from workers.sampling.noise import gumbel, row_keys
from workers.sampling.sample import MIN_TEMPERATURE, Floats, Ints
from workers.sampling.sampler import Sampler
from workers.verification import rejection_math as rules
from workers.verification.acceptance import AcceptedTokens, Scored, thresholds
from workers.verification.draft_probs import (
    ChainTable,
    DraftProbs,
    NodeChildren,
    are_valid,
    deterministic_children,
    sampled_children,
)
from workers.verification.rejection_math_trees import ROOT, block_tree, end_of_path, first_accepted, standard_node

CACHED, ELEMENTS = 1 << 17, 1 << 24
"""Probabilities computed at a time: on the host so that they stay in its cache, on a device to bound memory."""
Rule = Literal["standard", "block"]


@dataclass
class _VerifiedRow:
    """One row that samples: the draft that is verified, and the result.

    Attributes:
        first: its first scored position.
        slot, known: the sequence, and its number of known tokens.
        draft: empty if it cannot be verified.
        probs: the distributions it was sampled from; None if it was not sampled.
        path: the accepted nodes.
        scale, ids_L, residual_L: the residual after them, as in `rules.AcceptedChains`; p without ids.
    """

    first: int
    slot: int
    known: int
    draft: Draft
    probs: DraftProbs | None
    path: list[int] = field(default_factory=list)
    scale: float = 1.0
    ids_L: Ints | None = None
    residual_L: Floats | None = None

    @property
    def end(self) -> int:
        """The last accepted node."""
        return self.path[-1] if self.path else ROOT

    @cached_property
    def children(self) -> dict[int, NodeChildren]:
        """Of a tree, the children of each node that has any."""
        return deterministic_children(self.draft) if self.probs is None else sampled_children(self.draft, self.probs)


class RejectionSampler:
    """Accepts draft tokens by rejection sampling.

    Args:
        sampler: the target's; its distribution is p.
        rule: how drafts are verified.
        samples_drafts: whether the draft worker samples its tokens, and sends their distributions.
    """

    def __init__(self, sampler: Sampler, rule: Rule, *, samples_drafts: bool) -> None:
        self._sampler, self._rule, self._samples_drafts = sampler, rule, samples_drafts

    def prune(self, rows: Seq[Row], drafts: Seq[Draft]) -> Seq[Draft]:
        """See `AcceptanceRule`. Sampled drafts are not pruned: leaving out tokens for what they are would bias them."""
        unsampled = [NO_DRAFT if self._is_sampled(row) else draft for row, draft in zip(rows, drafts, strict=True)]
        pruned = self._sampler.prune(rows, unsampled)
        return [
            draft if self._is_sampled(row) else shorter
            for row, draft, shorter in zip(rows, drafts, pruned, strict=True)
        ]

    def accept(self, scored: Scored) -> list[AcceptedTokens]:
        """See `AcceptanceRule`."""
        rows = self._rows(scored)
        chains = [row for row in rows if row.draft.is_chain and row.draft.tokens]
        trees = [row for row in rows if not row.draft.is_chain]
        for some, verify in ((chains, self._verify_chains), (trees, self._verify_trees)):
            if some:
                verify(scored, some, self._thresholds(some))
        return [
            AcceptedTokens(row.path, [*(row.draft.tokens[node] for node in row.path), token])
            for row, token in zip(rows, self._next_tokens(scored, rows), strict=True)
        ]

    def next_tokens(self, scored: Scored, at_M: Ints) -> list[int]:
        """See `AcceptanceRule`. The most likely tokens, which do not depend on noise that later rounds will use."""
        p_MV = self._distribution(scored, at_M)
        tokens_M: list[int] = torch.where(p_MV.amax(1) > 0, p_MV.argmax(1), -1).tolist()
        return tokens_M

    def _thresholds(self, rows: Seq[_VerifiedRow]) -> Floats:
        return thresholds(
            self._sampler,
            np.array([row.slot for row in rows]),
            np.array([row.known for row in rows]),
            max(len(row.draft) for row in rows),
        )

    def _is_sampled(self, row: Row) -> bool:
        is_random = self._sampler.slots.sampling[row.slot].temperature >= MIN_TEMPERATURE
        return self._samples_drafts and row.draft is None and is_random

    def _rows(self, scored: Scored) -> list[_VerifiedRow]:
        """Return the rows that sample; sampled drafts without valid distributions are left out."""
        found, first = [], 0
        for row, draft, count in zip(scored.rows, scored.drafts, scored.counts_R.tolist(), strict=True):
            if count:
                probs = scored.draft_probs.get(row.slot) if draft.tokens and self._is_sampled(row) else None
                verified = draft if probs is not None or not self._is_sampled(row) else NO_DRAFT
                found.append(_VerifiedRow(first, row.slot, int(scored.index_N[first]), verified, probs))
                first += count
        sampled = [(row, row.probs) for row in found if row.probs is not None]
        valid = are_valid([row.draft for row, _ in sampled], [probs for _, probs in sampled], self._sampler.vocab_size)
        for (verified_row, _), is_valid in zip(sampled, valid, strict=True):
            verified_row.draft = verified_row.draft if is_valid else NO_DRAFT
        return found

    # Chains.

    def _verify_chains(self, scored: Scored, rows: Seq[_VerifiedRow], u_RK: Floats) -> None:
        """Verify all chains at once."""
        table = ChainTable.of([row.draft for row in rows], [row.probs for row in rows])
        place_RK = np.array([row.first for row in rows])[:, None] + np.arange(u_RK.shape[1])
        is_token_RK = table.is_id_RKL.any(2)
        p_RKL = np.zeros_like(table.q_RKL)
        p_RKL[is_token_RK] = self._probabilities(scored, place_RK[is_token_RK], table.ids_RKL[is_token_RK])
        chains = rules.ChainBatch(table.counts_R, p_RKL * table.is_id_RKL, table.q_RKL, table.drawn_RK)
        accepted = (rules.standard if self._rule == "standard" else rules.block)(chains, u_RK)
        for r, (row, count) in enumerate(zip(rows, accepted.counts_R.tolist(), strict=True)):
            row.path = list(range(count))
            if count < len(row.draft):
                is_id_L = table.is_id_RKL[r, count]
                row.ids_L = table.ids_RKL[r, count, is_id_L]
                row.scale, row.residual_L = float(accepted.scale_R[r]), accepted.residual_RL[r, is_id_L]

    # Trees.

    def _verify_trees(self, scored: Scored, rows: Seq[_VerifiedRow], u_RN: Floats) -> None:
        verify = self._verify_down if self._rule == "standard" else self._verify_up
        verify(scored, rows, u_RN)
        for row in rows:
            self._write_path(row, row.path)

    def _verify_down(self, scored: Scored, rows: Seq[_VerifiedRow], u_RN: Floats) -> None:
        """Descend all trees together, a level at a time, from the root as long as a child is accepted."""
        active = [(row, u_N) for row, u_N in zip(rows, u_RN, strict=True) if ROOT in row.children]
        while active:
            p_WL = self._probabilities_after(scored, [(row, row.end) for row, _ in active])
            active = [(row, u_N) for (row, u_N), p_L in zip(active, p_WL, strict=True) if self._descend(row, p_L, u_N)]

    def _descend(self, row: _VerifiedRow, p_L: Floats, u_N: Floats) -> bool:
        """Accept a child of the path's end, if any; return whether the new end has children."""
        found = row.children[row.end]
        residuals = standard_node(p_L[: len(found.ids_L)], found.children)
        accepted = first_accepted(residuals, u_N[list(found.children.nodes)])
        if accepted is None:
            row.ids_L = found.ids_L
            row.scale, row.residual_L = float(residuals.scales_J[-1]), residuals.residuals_JL[-1]
            return False
        row.path.append(found.children.nodes[accepted])
        self._write_path(row, row.path)
        return row.end in row.children

    def _verify_up(self, scored: Scored, rows: Seq[_VerifiedRow], u_RN: Floats) -> None:
        """Compute p after all inner nodes, one of each tree at a time, and verify as `block_tree` does."""
        p: list[dict[int, Floats]] = [{} for _ in rows]
        for place in range(max((len(row.children) for row in rows), default=0)):
            some = [(i, row, [*row.children][place]) for i, row in enumerate(rows) if place < len(row.children)]
            for _, row, node in some:
                self._write_path(row, _path_to(row.draft, node))
            p_XL = self._probabilities_after(scored, [(row, node) for _, row, node in some])
            for (i, row, node), p_L in zip(some, p_XL, strict=True):
                p[i][node] = p_L[: len(row.children[node].ids_L)]
        for row, p_of, u_N in zip(rows, p, u_RN, strict=True):
            candidates = block_tree(p_of, {node: found.children for node, found in row.children.items()})
            end = end_of_path(candidates, u_N)
            row.path = _path_to(row.draft, end.node)
            if end.residual_L is not None:
                row.ids_L = row.children[end.node].ids_L
                row.scale, row.residual_L = end.scale, end.residual_L

    def _write_path(self, row: _VerifiedRow, path: Seq[int]) -> None:
        """Write the tokens of *path* into the row's history, which the sampler reads."""
        self._sampler.slots.write_draft(row.slot, [row.draft.tokens[node] for node in path])

    # Distributions and tokens.

    def _probabilities_after(self, scored: Scored, nodes: Seq[tuple[_VerifiedRow, int]]) -> Floats:
        """Return p after nodes of trees at the ids of their children's distributions, `[M, L]`, and padding."""
        ids = [row.children[node].ids_L for row, node in nodes]
        ids_ML = np.zeros((len(ids), max(map(len, ids))), np.int64)
        for line, own in zip(ids_ML, ids, strict=True):
            line[: len(own)] = own
        return self._probabilities(scored, np.array([row.first + 1 + node for row, node in nodes]), ids_ML)

    def _probabilities(self, scored: Scored, at_M: Ints, ids_ML: Ints) -> Floats:
        """Return p of some ids at some of the scored positions, `[M, L]`."""
        p_ML = torch.cat(
            [
                self._distribution(scored, at_M[block]).gather(1, _on(ids_ML[block], scored))
                for block in self._blocks(scored, len(at_M))
            ]
        )
        found_ML: Floats = p_ML.cpu().numpy()
        return found_ML

    def _blocks(self, scored: Scored, num_rows: int) -> list[slice]:
        """Return slices of rows whose distributions are computed together."""
        elements = CACHED if scored.logits_NV.device.type == "cpu" else ELEMENTS
        count = max(1, elements // self._sampler.vocab_size)
        return [slice(first, first + count) for first in range(0, num_rows, count)]

    def _distribution(self, scored: Scored, at_M: Ints) -> torch.Tensor:
        logits_MV = scored.logits_NV[_on(at_M, scored)]
        return self._sampler.distribution(logits_MV, scored.slots_N[at_M], scored.index_N[at_M])

    def _next_tokens(self, scored: Scored, rows: Seq[_VerifiedRow]) -> list[int]:
        """Return the token after each path: from p if all draft tokens are accepted, else from the residual."""
        next_R = np.zeros(len(rows), np.int64)
        whole = [r for r, row in enumerate(rows) if row.residual_L is None]
        rest = [r for r, row in enumerate(rows) if row.residual_L is not None]
        for part, sample in ((whole, self._sample), (rest, self._sample_residuals)):
            if part:
                next_R[part] = sample(scored, [rows[r] for r in part]).cpu().numpy()
        found: list[int] = next_R.tolist()
        return found

    def _sample(self, scored: Scored, rows: Seq[_VerifiedRow]) -> torch.Tensor:
        at_R = _ends(rows)
        return self._sampler.sample(scored.logits_NV[_on(at_R, scored)], scored.slots_N[at_R], scored.index_N[at_R])

    def _sample_residuals(self, scored: Scored, rows: Seq[_VerifiedRow]) -> torch.Tensor:
        """Sample with the target's noise of the position, which acceptance has not used."""
        return torch.cat(
            [self._sample_residual_block(scored, rows[block]) for block in self._blocks(scored, len(rows))]
        )

    def _sample_residual_block(self, scored: Scored, rows: Seq[_VerifiedRow]) -> torch.Tensor:
        at_R = _ends(rows)
        p_RV = self._distribution(scored, at_R)
        ids = [row.ids_L for row in rows if row.ids_L is not None]
        at_M2 = np.stack((np.repeat(np.arange(len(ids)), [len(own) for own in ids]), np.concatenate(ids)), 1)
        residual_M = np.concatenate([row.residual_L for row in rows if row.residual_L is not None])
        residual_RV = rules.residual(
            p_RV, _on(np.array([row.scale for row in rows]), scored), _on(at_M2, scored), _on(residual_M, scored)
        )
        keys_R = row_keys(self._sampler.seeds(scored.slots_N[at_R]), scored.index_N[at_R])
        noise_RV = gumbel(_on(keys_R, scored)[:, None], torch.arange(p_RV.shape[1], device=p_RV.device))
        return rules.gumbel_argmax(residual_RV, noise_RV)


def _ends(rows: Seq[_VerifiedRow]) -> Ints:
    """Return the scored position at the end of each path."""
    return np.array([row.first + 1 + row.end for row in rows])


def _path_to(draft: Draft, node: int) -> list[int]:
    """Return the nodes from the root down to one, itself included."""
    parents, path = draft.node_parents(), list[int]()
    while node != ROOT:
        path.insert(0, node)
        node = parents[node]
    return path


def _on(values: Ints | Floats, scored: Scored) -> torch.Tensor:
    """Return *values* as a tensor on the device of the logits."""
    return torch.from_numpy(values).to(scored.logits_NV.device)
