"""The laws that a draft was drawn from: what a rule that judges by p/q has to know of it besides its tokens.

Children of one node are drawn from one law, one after another without replacement. So a draft has a law for each node
that has children, the root included, in the order in which their first children come; a chain has one for each guess.
Laws are short (`DRAFT_PROBS_SIZE`), and what was drawn was drawn from them as they are: so a rule is exact however
little they are like the draft's whole opinion.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from protos.draft import Draft
from workers.verification.rejection_math import Floats, Ints, normalised
from workers.verification.rejection_math_trees import Children, certain, without_elders

Flags = npt.NDArray[np.bool_]

DRAFT_PROBS_SIZE = 64
"""Ids of a law at most."""


@dataclass(frozen=True)
class DraftProbs:
    """The laws of one draft, M of them, as they were drawn from.

    Attributes:
        ids_ML: int64.
        q_ML: float32; 0 where there is nothing.
    """

    ids_ML: Ints
    q_ML: npt.NDArray[np.float32]


DraftProbsBySlot = Mapping[int, DraftProbs]
NO_DRAFT_PROBS: DraftProbsBySlot = {}


class ProposedDrafts(NamedTuple):
    """Drafts of some rows, in order.

    Attributes:
        drafts: one for each row.
        probs: the distributions that drafted tokens were drawn from, by slot, where the draft sends them.
        missed: whether a draft on another worker missed its deadline.
    """

    drafts: Seq[Draft]
    probs: DraftProbsBySlot = NO_DRAFT_PROBS
    missed: bool = False


@dataclass(frozen=True)
class Drawn:
    """What p/q rules judge of one node's children.

    Attributes:
        ids_L: int64, the ids that any of them could have been.
        children: the nodes, and the law of each.
    """

    ids_L: Ints
    children: Children


def families(draft: Draft) -> dict[int, list[int]]:
    """Return the children of each node that has any, -1 for the root, in the order of the first of them."""
    found: dict[int, list[int]] = {}
    for node, parent in enumerate(draft.node_parents()):
        found.setdefault(parent, []).append(node)
    return found


def sound(drafts: Seq[Draft], laws: Seq[DraftProbs], vocab_size: int) -> list[bool]:
    """Say of each draft whether these are laws, one for each of its families: of ids that there are, each once."""
    found = [_fits(draft, each) for draft, each in zip(drafts, laws, strict=True)]
    sizes = [each.ids_ML.shape[1] if fits else 0 for fits, each in zip(found, laws, strict=True)]
    for size in {*sizes} - {0}:
        part = [i for i, own in enumerate(sizes) if own == size]
        sorted_ML = np.sort(np.concatenate([laws[i].ids_ML for i in part]), 1)
        q_ML = np.concatenate([laws[i].q_ML for i in part])
        is_sound_M = (
            (sorted_ML[:, 0] >= 0)
            & (sorted_ML[:, -1] < vocab_size)
            & (q_ML >= 0).all(1)
            & (sorted_ML[:, 1:] > sorted_ML[:, :-1]).all(1)
            & (q_ML < np.inf).all(1)
        )
        counts = [len(laws[i].ids_ML) for i in part]
        for i, is_sound in zip(part, np.logical_and.reduceat(is_sound_M, np.cumsum([0, *counts[:-1]])), strict=True):
            found[i] = bool(is_sound)
    return found


def _fits(draft: Draft, laws: DraftProbs) -> bool:
    count, (num_laws, size) = len(draft) if draft.is_chain else len(families(draft)), laws.ids_ML.shape
    return laws.ids_ML.shape == laws.q_ML.shape and 0 < count == num_laws and 0 < size <= DRAFT_PROBS_SIZE


def drawn_from(draft: Draft, laws: DraftProbs) -> dict[int, Drawn]:
    """Return what is judged behind each node of *draft* that has children.

    A child that its law lacks came when there was nothing left to draw; neither it nor what came later is ever kept.
    """
    return {
        node: _drawn(nodes, [draft.tokens[child] for child in nodes], ids_L, q_L.astype(np.float64))
        for (node, nodes), ids_L, q_L in zip(families(draft).items(), laws.ids_ML, laws.q_ML, strict=True)
    }


def chosen(draft: Draft) -> dict[int, Drawn]:
    """Return what is judged where every guess was certain. What was guessed twice is left out."""
    found: dict[int, Drawn] = {}
    for node, nodes in families(draft).items():
        first: dict[int, int] = {}
        for child in nodes:
            first.setdefault(draft.tokens[child], child)
        children = Children([*first.values()], np.arange(len(first)), certain(len(first)))
        found[node] = Drawn(np.array([*first], np.int64), children)
    return found


class ChainTable(NamedTuple):
    """The chains of R rows, and what each guess could have been; zeros where a row has less than others.

    Attributes:
        counts_R: int64, guesses of each.
        ids_RKL: int64.
        q_RKL: float64; each adds up to 1, or is 0 where the guess is none of its ids.
        guess_RK: int64, which of the ids it is.
        is_id_RKL: where there is an id.
    """

    counts_R: Ints
    ids_RKL: Ints
    q_RKL: Floats
    guess_RK: Ints
    is_id_RKL: Flags

    @classmethod
    def of(cls, drafts: Seq[Draft], laws: Seq[DraftProbs | None]) -> "ChainTable":
        """Lay out chains with their *laws*; None for one whose guesses are certain."""
        counts_R = np.array([len(draft) for draft in drafts])
        sizes_R = np.array([1 if found is None else found.ids_ML.shape[1] for found in laws])
        shape = (len(drafts), int(counts_R.max()), int(sizes_R.max()))
        ids_RKL, q_RKL, token_RK = np.zeros(shape, np.int64), np.zeros(shape), np.zeros(shape[:2], np.int64)
        for r, (draft, found) in enumerate(zip(drafts, laws, strict=True)):
            count, size = len(draft), sizes_R[r]
            token_RK[r, :count] = draft.tokens
            ids_RKL[r, :count, :size] = token_RK[r, :count, None] if found is None else found.ids_ML
            q_RKL[r, :count, :size] = 1.0 if found is None else found.q_ML
        is_guess_RK = np.arange(shape[1]) < counts_R[:, None]
        is_id_RKL = is_guess_RK[:, :, None] & (np.arange(shape[2]) < sizes_R[:, None, None])
        is_token_RKL = is_id_RKL & (ids_RKL == token_RK[:, :, None])
        q_RKL = normalised(q_RKL * is_token_RKL.any(2, keepdims=True))
        return cls(counts_R, ids_RKL, q_RKL, is_token_RKL.argmax(2), is_id_RKL)


def _drawn(nodes: list[int], tokens: list[int], ids_L: Ints, q_L: Floats) -> Drawn:
    is_token_WL = np.array(tokens)[:, None] == ids_L
    drawn_W = is_token_WL.argmax(1)
    q_WL = without_elders(q_L, drawn_W)
    q_WL[~is_token_WL.any(1).cumprod().astype(np.bool_)] = 0.0
    return Drawn(ids_L, Children(nodes, drawn_W, q_WL))
