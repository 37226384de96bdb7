"""The distributions that draft tokens were sampled from, which the rules of rejection sampling need.

The children of one node are sampled from one distribution, without replacement. So a draft has a distribution for each
node that has children, the root included, in the order of their first children; a chain has one for each token. The
distributions are short (`DRAFT_PROBS_SIZE` ids). Tokens are sampled from them as they are, so rejection sampling is
exact, however much they differ from the draft model's whole distribution.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from protos.draft import Draft
from workers.verification.rejection_math import Floats, Ints, normalised
from workers.verification.rejection_math_trees import Children, point_masses, sibling_distributions

Flags = npt.NDArray[np.bool_]

DRAFT_PROBS_SIZE = 64
"""Most ids of a distribution."""


@dataclass(frozen=True)
class DraftProbs:
    """The M distributions of one draft.

    Attributes:
        ids_ML: int64.
        q_ML: float32; 0 for padding.
    """

    ids_ML: Ints
    q_ML: npt.NDArray[np.float32]


DraftProbsBySlot = Mapping[int, DraftProbs]
NO_DRAFT_PROBS: DraftProbsBySlot = {}


class ProposedDrafts(NamedTuple):
    """Drafts of some rows, in order.

    Attributes:
        drafts: one for each row.
        probs: the distributions that draft tokens were sampled from, by slot, where the rule needs them.
        missed: whether a draft on another worker missed its deadline.
    """

    drafts: Seq[Draft]
    probs: DraftProbsBySlot = NO_DRAFT_PROBS
    missed: bool = False


@dataclass(frozen=True)
class NodeChildren:
    """One node's children, with the distributions they were sampled from.

    Attributes:
        ids_L: int64, the ids of the distributions.
        children: the nodes, and the distribution of each.
    """

    ids_L: Ints
    children: Children


def children_by_parent(draft: Draft) -> dict[int, list[int]]:
    """Return the children of each node that has any, -1 for the root, in the order of the first of them."""
    found: dict[int, list[int]] = {}
    for node, parent in enumerate(draft.node_parents()):
        found.setdefault(parent, []).append(node)
    return found


def are_valid(drafts: Seq[Draft], probs: Seq[DraftProbs], vocab_size: int) -> list[bool]:
    """Return whether each draft has a valid distribution for each node with children: known ids, each once."""
    found = [_fits(draft, each) for draft, each in zip(drafts, probs, strict=True)]
    sizes = [each.ids_ML.shape[1] if fits else 0 for fits, each in zip(found, probs, strict=True)]
    for size in {*sizes} - {0}:
        part = [i for i, own in enumerate(sizes) if own == size]
        sorted_ML = np.sort(np.concatenate([probs[i].ids_ML for i in part]), 1)
        q_ML = np.concatenate([probs[i].q_ML for i in part])
        is_valid_M = (
            (sorted_ML[:, 0] >= 0)
            & (sorted_ML[:, -1] < vocab_size)
            & (q_ML >= 0).all(1)
            & (sorted_ML[:, 1:] > sorted_ML[:, :-1]).all(1)
            & (q_ML < np.inf).all(1)
        )
        counts = [len(probs[i].ids_ML) for i in part]
        for i, is_valid in zip(part, np.logical_and.reduceat(is_valid_M, np.cumsum([0, *counts[:-1]])), strict=True):
            found[i] = bool(is_valid)
    return found


def _fits(draft: Draft, probs: DraftProbs) -> bool:
    count, (num_found, size) = len(draft) if draft.is_chain else len(children_by_parent(draft)), probs.ids_ML.shape
    return probs.ids_ML.shape == probs.q_ML.shape and 0 < count == num_found and 0 < size <= DRAFT_PROBS_SIZE


def sampled_children(draft: Draft, probs: DraftProbs) -> dict[int, NodeChildren]:
    """Return the children of each node of *draft* that has any, sampled from *probs*.

    A child that is not in its distribution was added when no id was left; neither it nor later siblings are accepted.
    """
    return {
        node: _sampled(nodes, [draft.tokens[child] for child in nodes], ids_L, q_L.astype(np.float64))
        for (node, nodes), ids_L, q_L in zip(children_by_parent(draft).items(), probs.ids_ML, probs.q_ML, strict=True)
    }


def deterministic_children(draft: Draft) -> dict[int, NodeChildren]:
    """Return the children of each node of a draft that was not sampled. Repeated tokens are left out."""
    found: dict[int, NodeChildren] = {}
    for node, nodes in children_by_parent(draft).items():
        first: dict[int, int] = {}
        for child in nodes:
            first.setdefault(draft.tokens[child], child)
        children = Children([*first.values()], np.arange(len(first)), point_masses(len(first)))
        found[node] = NodeChildren(np.array([*first], np.int64), children)
    return found


class ChainTable(NamedTuple):
    """The chains of R rows and their distributions, padded with zeros.

    Attributes:
        counts_R: int64, tokens of each.
        ids_RKL: int64.
        q_RKL: float64; sums to 1, or is 0 where the token is none of the ids.
        drawn_RK: int64, which of the ids the token is.
        is_id_RKL: False for padding.
    """

    counts_R: Ints
    ids_RKL: Ints
    q_RKL: Floats
    drawn_RK: Ints
    is_id_RKL: Flags

    @classmethod
    def of(cls, drafts: Seq[Draft], probs: Seq[DraftProbs | None]) -> "ChainTable":
        """Lay out chains with their distributions; None for one that was not sampled."""
        counts_R = np.array([len(draft) for draft in drafts])
        sizes_R = np.array([1 if found is None else found.ids_ML.shape[1] for found in probs])
        shape = (len(drafts), int(counts_R.max()), int(sizes_R.max()))
        ids_RKL, q_RKL, token_RK = np.zeros(shape, np.int64), np.zeros(shape), np.zeros(shape[:2], np.int64)
        for r, (draft, found) in enumerate(zip(drafts, probs, strict=True)):
            count, size = len(draft), sizes_R[r]
            token_RK[r, :count] = draft.tokens
            ids_RKL[r, :count, :size] = token_RK[r, :count, None] if found is None else found.ids_ML
            q_RKL[r, :count, :size] = 1.0 if found is None else found.q_ML
        is_token_RK = np.arange(shape[1]) < counts_R[:, None]
        is_id_RKL = is_token_RK[:, :, None] & (np.arange(shape[2]) < sizes_R[:, None, None])
        is_token_RKL = is_id_RKL & (ids_RKL == token_RK[:, :, None])
        q_RKL = normalised(q_RKL * is_token_RKL.any(2, keepdims=True))
        return cls(counts_R, ids_RKL, q_RKL, is_token_RKL.argmax(2), is_id_RKL)


def _sampled(nodes: list[int], tokens: list[int], ids_L: Ints, q_L: Floats) -> NodeChildren:
    is_token_WL = np.array(tokens)[:, None] == ids_L
    drawn_W = is_token_WL.argmax(1)
    q_WL = sibling_distributions(q_L, drawn_W)
    q_WL[~is_token_WL.any(1).cumprod().astype(np.bool_)] = 0.0
    return NodeChildren(ids_L, Children(nodes, drawn_W, q_WL))
