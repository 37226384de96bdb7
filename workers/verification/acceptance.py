"""Acceptance of draft tokens: how many of each draft a round keeps, and the token that the target samples after them.

`SampleAndMatch` is the default rule, "coupled": the target's sampler samples a token at every scored position, with
noise that does not depend on the draft, and draft tokens equal to the sampled ones are accepted. So the emitted tokens
are the target's own, whatever the draft; the draft only decides how many of them one round yields.

`workers.verification.rejection` has the rules of rejection sampling, and `Synthetic` is for load tests.
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

import numpy as np
import torch

from protos.draft import Draft
from protos.messages import Row
from workers.sampling.noise import ACCEPT, row_keys, stream_seeds, uniform
from workers.sampling.sample import Floats, Ints
from workers.sampling.sampler import Sampler
from workers.verification.draft_probs import NO_DRAFT_PROBS, DraftProbsBySlot
from workers.verification.tree_sampler import TreeSampler, tree_path


class Scored(NamedTuple):
    """A round after the target's forward.

    Attributes:
        rows, drafts: all of them; the draft tokens are in the slot table, after the known tokens.
        counts_R: int64; how many positions of each row were scored: the root and the draft's nodes, or none.
        logits_NV: float32, at every scored position, row after row.
        slots_N, index_N: int64; slot of each, and position in prompt + output of the token sampled there.
        has_trees: whether any draft is a tree.
        draft_probs: the distributions that drafts were sampled from, by slot.
    """

    rows: Seq[Row]
    drafts: Seq[Draft]
    counts_R: Ints
    logits_NV: torch.Tensor
    slots_N: Ints
    index_N: Ints
    has_trees: bool
    draft_probs: DraftProbsBySlot = NO_DRAFT_PROBS


class AcceptedTokens(NamedTuple):
    """What a round yields for one row that samples.

    Attributes:
        path: the accepted nodes, root to leaf; for a chain 0 .. accepted - 1.
        emitted: their tokens, and the target's own next token; -1 where none could be sampled.
    """

    path: list[int]
    emitted: list[int]


class AcceptanceRule(Protocol):
    """A rule of acceptance."""

    def prune(self, rows: Seq[Row], drafts: Seq[Draft]) -> Seq[Draft]:
        """Return *drafts* without tokens that a grammar forbids, where the rule allows leaving them out."""
        ...

    def accept(self, scored: Scored) -> list[AcceptedTokens]:
        """Return what the round yields for each row that samples, in order."""
        ...

    def next_tokens(self, scored: Scored, at_M: Ints) -> list[int]:
        """Return the target's next token at some of the scored positions, for lookahead; -1 where there is none."""
        ...


class SampleAndMatch:
    """The rule "coupled": accept draft tokens equal to those that the target's sampler samples."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def prune(self, rows: Seq[Row], drafts: Seq[Draft]) -> Seq[Draft]:
        """See `AcceptanceRule`."""
        return self._sampler.prune(rows, drafts)

    def accept(self, scored: Scored) -> list[AcceptedTokens]:
        """See `AcceptanceRule`."""
        sampled_N, at = self._sample(scored), 0
        accepted: list[AcceptedTokens] = []
        for draft, count in zip(scored.drafts, scored.counts_R.tolist(), strict=True):
            if count:
                sampled = sampled_N[at : at + count]
                path = accept(draft, sampled)
                accepted.append(AcceptedTokens(path, emitted(draft, path, sampled)))
                at += count
        return accepted

    def next_tokens(self, scored: Scored, at_M: Ints) -> list[int]:
        """See `AcceptanceRule`."""
        logits_MV = scored.logits_NV[torch.from_numpy(at_M).to(scored.logits_NV.device)]
        tokens_M: list[int] = self._sampler.sample(logits_MV, scored.slots_N[at_M], scored.index_N[at_M]).tolist()
        return tokens_M

    def _sample(self, scored: Scored) -> list[int]:
        """Return the target's token at every scored position; -1 where there is none, or off a tree's path."""
        if scored.has_trees:
            tree_sampler = TreeSampler(self._sampler, scored.logits_NV, scored.slots_N, scored.index_N)
            return tree_sampler.sample(scored.drafts, scored.counts_R)
        sampled_N: list[int] = self._sampler.sample(scored.logits_NV, scored.slots_N, scored.index_N).tolist()
        return sampled_N


def accept(draft: Draft, sampled: Seq[int]) -> list[int]:
    """Return the accepted nodes of *draft*, root to leaf: as long as there is a node equal to the target's token.

    Args:
        draft: nodes in topological order.
        sampled: the target's tokens, `len(draft) + 1` of them: `sampled[0]` after the root, `sampled[1 + i]` after
            node i; -1 where there is none. The row emits `sampled[0]` and `sampled[1 + i]` for every i on the path.
    """
    if not draft.is_chain:
        return tree_path(draft, sampled)
    for count, (token, target_token) in enumerate(zip(draft.tokens, sampled, strict=False)):
        if token != target_token:
            return list(range(count))
    return list(range(len(draft)))


def emitted(draft: Draft, path: list[int], sampled: list[int]) -> list[int]:
    """Return the target's tokens after the root and after the nodes on *path*; for *sampled* see `accept`."""
    return sampled[: len(path) + 1] if draft.is_chain else [sampled[0], *(sampled[node + 1] for node in path)]


class Synthetic:
    """The rule "synthetic": accepts as many draft tokens as configured, whatever they are. CHANGES THE ANSWER.

    Args:
        sampler: samples the token after them.
        rates: how often the draft token at each depth is accepted, with all before it; descending.
    """

    def __init__(self, sampler: Sampler, rates: Seq[float]) -> None:
        self._sampler, self._rates_K = sampler, np.array(rates)

    def prune(self, rows: Seq[Row], drafts: Seq[Draft]) -> Seq[Draft]:
        """See `AcceptanceRule`."""
        return self._sampler.prune(rows, drafts)

    def accept(self, scored: Scored) -> list[AcceptedTokens]:
        """See `AcceptanceRule`."""
        sampling_R = np.flatnonzero(scored.counts_R)
        first_R = (np.cumsum(scored.counts_R) - scored.counts_R)[sampling_R]
        slots_R, known_R = scored.slots_N[first_R], scored.index_N[first_R]
        drafts = [scored.drafts[r] for r in sampling_R.tolist()]
        counts_R = (thresholds(self._sampler, slots_R, known_R, 1) < self._rates_K).sum(1)
        paths = [first_path(draft, count) for draft, count in zip(drafts, counts_R.tolist(), strict=True)]
        for draft, path, slot in zip(drafts, paths, slots_R.tolist(), strict=True):
            self._sampler.slots.write_draft(slot, [draft.tokens[node] for node in path])
        ends_R = first_R + np.array([path[-1] + 1 if path else 0 for path in paths], np.int64)
        next_R = self._sampler.sample(
            scored.logits_NV[torch.from_numpy(ends_R)], slots_R, known_R + np.array([len(path) for path in paths])
        ).tolist()
        return [
            AcceptedTokens(path, [*(draft.tokens[node] for node in path), token])
            for draft, path, token in zip(drafts, paths, next_R, strict=True)
        ]

    def next_tokens(self, scored: Scored, at_M: Ints) -> list[int]:
        """See `AcceptanceRule`: none."""
        return [-1] * len(at_M)


def first_path(draft: Draft, count: int) -> list[int]:
    """Return *count* nodes from the root down, or as many as there are, each the first child."""
    path: list[int] = []
    for node, parent in enumerate(draft.node_parents()):
        if len(path) < count and parent == (path[-1] if path else -1):
            path.append(node)
    return path


def thresholds(sampler: Sampler, slots_R: Ints, known_R: Ints, count: int) -> Floats:
    """Return the numbers that acceptance probabilities are compared with, uniform between 0 and 1, `[R, count]`.

    They come from a noise stream of their own, and differ from round to round, which `known_R` identifies.
    """
    keys_R = row_keys(stream_seeds(sampler.seeds(slots_R), ACCEPT, known_R), known_R)
    return uniform(keys_R[:, None], np.arange(count))
