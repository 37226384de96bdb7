"""Acceptance in rounds whose drafts have probes, which only lookahead decoding makes (`proposers.lookahead`).

A probe is a node that is scored but never accepted: the proposer reads the target's token after it. Acceptance rules
get the drafts without their probes; the tokens after the probes are sampled once the rule has accepted.
"""

from collections.abc import Sequence as Seq

import msgspec
import numpy as np
import torch

from protos.draft import Draft
from protos.messages import Verdict
from workers.sampling.sample import Ints
from workers.slots import SlotTable
from workers.verification.acceptance import AcceptanceRule, AcceptedTokens, Scored

ProbedBySlot = dict[int, list[int]]


def accept_with_probes(
    rule: AcceptanceRule, scored: Scored, slots: SlotTable
) -> tuple[list[AcceptedTokens], ProbedBySlot]:
    """Return what `AcceptanceRule.accept` returns for the drafts without probes, and the tokens after probes by slot.

    The latter are sampled after the accepted tokens were written into *slots*, so that penalties count these; -1 where
    there is no token.
    """
    nodes = [draft.acceptable_nodes() for draft in scored.drafts]
    accepted = [
        AcceptedTokens([own[node] for node in found.path], found.emitted)
        for own, found in zip(
            (own for own, count in zip(nodes, scored.counts_R, strict=True) if count),
            rule.accept(_without_probes(scored, nodes)),
            strict=True,
        )
    ]
    first_R = (np.cumsum(scored.counts_R) - scored.counts_R)[scored.counts_R > 0]
    sampling = [r for r, count in enumerate(scored.counts_R) if count]
    probed: ProbedBySlot = {}
    for r, first, found in zip(sampling, first_R, accepted, strict=True):
        probes = np.flatnonzero(scored.drafts[r].probes)
        if len(probes):
            slots.write_draft(scored.rows[r].slot, [token for token in found.emitted if token >= 0])
            probed[scored.rows[r].slot] = rule.next_tokens(scored, first + 1 + probes)
    return accepted, probed


def with_probed(verdict: Verdict | None, probed: ProbedBySlot) -> Verdict | None:
    """Return a row's verdict with the tokens after its probes."""
    if verdict is None or verdict.failed or verdict.slot not in probed:
        return verdict
    return msgspec.structs.replace(verdict, probed=probed[verdict.slot])


def subtree(draft: Draft, nodes: Seq[int]) -> Draft:
    """Return the draft that consists of some *nodes*, whose parents are among them."""
    if len(nodes) == len(draft):
        return draft
    place = {-1: -1} | {node: i for i, node in enumerate(nodes)}
    parents = draft.node_parents()
    return Draft(tuple(draft.tokens[node] for node in nodes), tuple(place[parents[node]] for node in nodes))


def _without_probes(scored: Scored, nodes_R: Seq[Seq[int]]) -> Scored:
    """Return the round as if only *nodes* of each draft had been scored."""
    first_R = np.cumsum(scored.counts_R) - scored.counts_R
    parts: list[Ints] = [
        first + np.array([0, *(1 + node for node in nodes)], np.int64)
        for first, count, nodes in zip(first_R, scored.counts_R, nodes_R, strict=True)
        if count
    ]
    at_N = np.concatenate(parts)
    return scored._replace(
        drafts=[subtree(draft, nodes) for draft, nodes in zip(scored.drafts, nodes_R, strict=True)],
        counts_R=np.where(scored.counts_R > 0, [1 + len(nodes) for nodes in nodes_R], 0),
        logits_NV=scored.logits_NV[torch.from_numpy(at_N).to(scored.logits_NV.device)],
        slots_N=scored.slots_N[at_N],
        index_N=scored.index_N[at_N],
    )
