"""Judging a round: how much of each draft is kept, and what the target says behind it.

`SampleAndMatch` is the default, the rule "coupled" (DESIGN section 5). `workers.verification.rejection` judges by p/q,
and `Synthetic` does not judge at all: for load tests.
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

import numpy as np
import torch

from protos.draft import Draft
from protos.messages import Row
from workers.sampling.grammar_sampler import GrammarSampler
from workers.sampling.noise import ACCEPT, row_keys, stream_seeds, uniform
from workers.sampling.sample import Floats, Ints
from workers.verification.draft_probs import NO_DRAFT_PROBS, DraftProbsBySlot
from workers.verification.tree_sampler import TreeSampler
from workers.verification.verify import accept


class Scored(NamedTuple):
    """A round whose forward is done.

    Attributes:
        rows, drafts: all of them; the drafts' ids stand in the slot table behind the known tokens.
        counts_R: int64; how many positions of each row were scored: the root and the draft's nodes, or none.
        logits_NV: float32, behind every scored position, row after row.
        slots_N, index_N: int64; slot of each, and position in prompt + output of the token that is chosen there.
        has_trees: whether a draft is no chain.
        laws: that drafts were drawn from, by slot; of those that somebody drew.
    """

    rows: Seq[Row]
    drafts: Seq[Draft]
    counts_R: Ints
    logits_NV: torch.Tensor
    slots_N: Ints
    index_N: Ints
    has_trees: bool
    laws: DraftProbsBySlot = NO_DRAFT_PROBS


class AcceptedTokens(NamedTuple):
    """What a round yields for one row that samples.

    Attributes:
        path: the nodes that are kept, root to leaf.
        emitted: their tokens, and the target's own behind them; -1 where none could be chosen.
        probed: what the target would say behind each probe.
    """

    path: list[int]
    emitted: list[int]
    probed: Seq[int] = ()


class AcceptanceRule(Protocol):
    """A rule of acceptance."""

    def prune(self, rows: Seq[Row], drafts: Seq[Draft]) -> Seq[Draft]:
        """Return *drafts* without what a grammar forbids, as far as that may be left out."""
        ...

    def judge(self, scored: Scored) -> list[AcceptedTokens]:
        """Return what the round yields for each row that samples, in order."""
        ...


class SampleAndMatch:
    """The rule "coupled": the target's sampler chooses behind every position; kept is what says the same."""

    def __init__(self, sampler: GrammarSampler) -> None:
        self._sampler = sampler

    def prune(self, rows: Seq[Row], drafts: Seq[Draft]) -> Seq[Draft]:
        """See `AcceptanceRule`: what is forbidden could never be accepted."""
        return self._sampler.prune(rows, drafts)

    def judge(self, scored: Scored) -> list[AcceptedTokens]:
        """See `AcceptanceRule`."""
        chosen_N, at = self._choose(scored), 0
        found: list[AcceptedTokens] = []
        for draft, count in zip(scored.drafts, scored.counts_R.tolist(), strict=True):
            if count:
                chosen = chosen_N[at : at + count]
                path = accept(draft, chosen)
                emitted = [chosen[0], *(chosen[node + 1] for node in path)]
                found.append(AcceptedTokens(path, emitted, _probed(draft, chosen) if draft.probes else ()))
                at += count
        return found

    def _choose(self, scored: Scored) -> list[int]:
        """Return what the target says behind every scored position; -1 where it cannot, or nobody will look."""
        if not scored.has_trees:
            chosen_N: list[int] = self._sampler.sample(scored.logits_NV, scored.slots_N, scored.index_N).tolist()
            return chosen_N
        walking = TreeSampler(self._sampler, scored.logits_NV, scored.slots_N, scored.index_N)
        return walking.choose(scored.drafts, scored.counts_R)


def _probed(draft: Draft, chosen: Seq[int]) -> list[int]:
    return [y for y, is_probe in zip(chosen[1:], draft.probes, strict=True) if is_probe]


class Synthetic:
    """The rule "synthetic": keeps as many guesses as it was told to, whatever the target says. CHANGES THE ANSWER.

    Args:
        sampler: chooses the token behind them.
        rates: how often the guess at each depth is kept, and all before it; falling.
    """

    def __init__(self, sampler: GrammarSampler, rates: Seq[float]) -> None:
        self._sampler, self._rates_K = sampler, np.array(rates)

    def prune(self, rows: Seq[Row], drafts: Seq[Draft]) -> Seq[Draft]:
        """See `AcceptanceRule`."""
        return self._sampler.prune(rows, drafts)

    def judge(self, scored: Scored) -> list[AcceptedTokens]:
        """See `AcceptanceRule`. Probes are answered by nobody: -1."""
        sampling_R = np.flatnonzero(scored.counts_R)
        first_R = (np.cumsum(scored.counts_R) - scored.counts_R)[sampling_R]
        slots_R, known_R = scored.slots_N[first_R], scored.index_N[first_R]
        drafts = [scored.drafts[r] for r in sampling_R.tolist()]
        kept_R = (thresholds(self._sampler, slots_R, known_R, 1) < self._rates_K).sum(1)
        paths = [_first_path(draft, count) for draft, count in zip(drafts, kept_R.tolist(), strict=True)]
        for draft, path, slot in zip(drafts, paths, slots_R.tolist(), strict=True):
            self._sampler.slots.write_draft(slot, [draft.tokens[node] for node in path])
        ends_R = first_R + np.array([path[-1] + 1 if path else 0 for path in paths], np.int64)
        own_R = self._sampler.sample(
            scored.logits_NV[torch.from_numpy(ends_R)], slots_R, known_R + np.array([len(path) for path in paths])
        ).tolist()
        return [
            AcceptedTokens(path, [*(draft.tokens[node] for node in path), own], [-1] * sum(draft.probes))
            for draft, path, own in zip(drafts, paths, own_R, strict=True)
        ]


def _first_path(draft: Draft, count: int) -> list[int]:
    """Return *count* nodes from the root down, or as many as there are, each the first child."""
    path: list[int] = []
    for node, parent in enumerate(draft.node_parents()):
        is_probe = bool(draft.probes and draft.probes[node])
        if len(path) < count and parent == (path[-1] if path else -1) and not is_probe:
            path.append(node)
    return path


def thresholds(sampler: GrammarSampler, slots_R: Ints, known_R: Ints, count: int) -> Floats:
    """Return the numbers that a round's guesses are judged by, uniform between 0 and 1, `[R, count]`.

    Nobody else sees them, and every round has new ones: those of sequences of *known* tokens.
    """
    keys_R = row_keys(stream_seeds(sampler.seeds(slots_R), ACCEPT, known_R), known_R)
    return uniform(keys_R[:, None], np.arange(count))
