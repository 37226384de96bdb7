"""The laws that a draft was drawn from: what a rule that judges by p/q has to know of it besides its tokens.

Children of one node are drawn from one law, one after another without replacement. So a draft has a law for each node
that has children, the root included, in the order in which their first children come; a chain has one for each guess.
Laws are short (`LAW_SIZE`), and what was drawn was drawn from them as they are: so a rule is exact however little they
are like the draft's whole opinion.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protos.drafts import parents_of
from protos.messages import Draft
from workers.rules import Floats, Ints
from workers.rules_trees import Children, certain, without_elders

LAW_SIZE = 64
"""Ids of a law at most."""


@dataclass(frozen=True)
class Laws:
    """The laws of one draft, M of them, as they were drawn from.

    Attributes:
        ids_ML: int64.
        q_ML: float32; 0 where there is nothing.
    """

    ids_ML: Ints
    q_ML: npt.NDArray[np.float32]


BySlot = Mapping[int, Laws]
NO_LAWS: BySlot = {}


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
    for node, parent in enumerate(parents_of(draft)):
        found.setdefault(parent, []).append(node)
    return found


def sound(draft: Draft, laws: Laws, vocab_size: int) -> bool:
    """Say whether these are laws, one for each family of *draft*: of ids that there are, each once."""
    ids_ML, q_ML = laws.ids_ML, laws.q_ML
    if ids_ML.shape != q_ML.shape or len(ids_ML) != len(families(draft)) or not 0 < ids_ML.shape[1] <= LAW_SIZE:
        return False
    sorted_ML = np.sort(ids_ML, 1)
    return bool(sorted_ML[:, 0].min() >= 0 and sorted_ML[:, -1].max() < vocab_size
                and (sorted_ML[:, 1:] > sorted_ML[:, :-1]).all() and np.isfinite(q_ML).all() and (q_ML >= 0).all())


def drawn_from(draft: Draft, laws: Laws) -> dict[int, Drawn]:
    """Return what is judged behind each node of *draft* that has children.

    A child that its law lacks came when there was nothing left to draw; neither it nor what came later is ever kept.
    """
    return {node: _drawn(nodes, [draft.tokens[child] for child in nodes], ids_L, q_L.astype(np.float64))
            for (node, nodes), ids_L, q_L in zip(families(draft).items(), laws.ids_ML, laws.q_ML, strict=True)}


def chosen(draft: Draft) -> dict[int, Drawn]:
    """Return what is judged where every guess was certain. Probes are left out, and so is what was guessed twice."""
    found: dict[int, Drawn] = {}
    for node, nodes in families(draft).items():
        first: dict[int, int] = {}
        for child in nodes:
            if not (draft.probes and draft.probes[child]):
                first.setdefault(draft.tokens[child], child)
        if first:
            children = Children([*first.values()], np.arange(len(first)), certain(len(first)))
            found[node] = Drawn(np.array([*first], np.int64), children)
    return found


def _drawn(nodes: list[int], tokens: list[int], ids_L: Ints, q_L: Floats) -> Drawn:
    is_token_WL = np.array(tokens)[:, None] == ids_L
    drawn_W = is_token_WL.argmax(1)
    q_WL = without_elders(q_L, drawn_W)
    q_WL[~is_token_WL.any(1).cumprod().astype(np.bool_)] = 0.0
    return Drawn(ids_L, Children(nodes, drawn_W, q_WL))
