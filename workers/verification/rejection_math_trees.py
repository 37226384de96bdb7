"""Acceptance by p/q in trees: see `workers.verification.rejection_math`, whose chains are trees without siblings.

- `standard`: recursive rejection without replacement, from the root down (SpecInfer, arXiv 2305.09781; EAGLE-2,
  arXiv 2406.16858);
- `block`: traversal verification, from the leaves up (arXiv 2505.12398).

The shape of a tree must not depend on what was drawn: how many children a node has is settled before any is known. And
under `block`, which looks at several nodes of a depth, their children must be drawn with noise of their own.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from workers.verification.rejection_math import Floats, Ints, end_odds, mass_beyond, normalised, positive

ROOT = -1


class Children(NamedTuple):
    """The children of one node, in the order in which they were drawn, each from what its elders left of the law.

    Attributes:
        nodes: their numbers in the draft.
        drawn_W: int64, which of the L ids each one is.
        q_WL: the law each was drawn from; it adds up to 1, or is 0 where there was nothing left to draw.
    """

    nodes: Seq[int]
    drawn_W: Ints
    q_WL: Floats


class Trial(NamedTuple):
    """A node that may be kept, as the last of its path: how likely, when none tried before it was.

    What is left behind it is proportional to `left_L` at the ids that its children were drawn from, and to `scale`
    times p at all others. Without children, `left_L` is None, and p is what is left.
    """

    node: int
    odds: float
    scale: float
    left_L: Floats | None


def without_elders(law_L: Floats, drawn_W: Ints) -> Floats:
    """Return the law of each of W tokens drawn from one without replacement, `[W, L]`: that without its elders."""
    q_WL = np.repeat(law_L[None], len(drawn_W), 0)
    for place, drawn in enumerate(drawn_W.tolist()):
        q_WL[place + 1 :, drawn] = 0.0
    return normalised(q_WL)


def certain(count: int) -> Floats:
    """Return the laws of children that were not drawn but chosen, whose ids are their own: a point mass each."""
    return np.eye(count)


class Standing(NamedTuple):
    """What is left at a node when the first j of its children were tried in vain, for j from 0 to W.

    Attributes:
        odds_W: how likely child j is kept when its elders were not.
        scales_J: p counts so much beyond the law's ids, `[W + 1]`.
        left_JL: what is left at them, `[W + 1, L]`; with what is beyond it adds up to 1.
    """

    odds_W: Floats
    scales_J: Floats
    left_JL: Floats


def standard_node(p_L: Floats, children: Children) -> Standing:
    """Return what `standard` does at one node of a tree: p_(j+1) = norm((p_j - q_j)+), child j with odds p_j/q_j.

    Args:
        p_L: the target's probability behind the node, of the ids that its children were drawn from.
        children: of the node.
    """
    rest, scale, left_L = float(mass_beyond(p_L)), 1.0, p_L
    odds, scales, lefts = [], [scale], [left_L]
    for drawn, q_L in zip(children.drawn_W.tolist(), children.q_WL, strict=True):
        odds.append(_ratio(left_L[drawn], q_L[drawn]))
        left_L = positive(left_L - q_L)
        mass = rest * scale + float(left_L.sum())
        scale, left_L = (scale / mass, left_L / mass) if mass > 0 else (scale, lefts[0])
        scales.append(scale)
        lefts.append(left_L)
    return Standing(np.minimum(1.0, np.array(odds)), np.array(scales), np.array(lefts))


def standard_tree(p: Mapping[int, Floats], children: Mapping[int, Children], u_N: Floats) -> Trial:
    """Walk down from the root to the first child that is kept, as far as there is one; arguments as in `block_tree`.

    The law of children must not depend on what stands elsewhere at their depth: a walk looks at one node of each alone.
    """
    node = ROOT
    while node in children:
        below = children[node]
        standing = standard_node(p[node], below)
        kept = first_kept(standing, u_N[list(below.nodes)])
        if kept is None:
            return Trial(node, 1.0, float(standing.scales_J[-1]), standing.left_JL[-1])
        node = below.nodes[kept]
    return Trial(node, 1.0, 1.0, None)


def first_kept(standing: Standing, u_W: Floats) -> int | None:
    """Return which child is kept, None for none."""
    kept_W = np.flatnonzero(u_W < standing.odds_W)
    return int(kept_W[0]) if len(kept_W) else None


def last_of_path(trials: Seq[Trial], u_N: Floats) -> Trial:
    """Return the first trial whose node's u is below its odds; the root's odds are 1, whatever `u_N[ROOT]` may be."""
    return next(trial for trial in trials if trial.node == ROOT or u_N[trial.node] < trial.odds)


def block_tree(p: Mapping[int, Floats], children: Mapping[int, Children]) -> list[Trial]:
    """Return the trials of `block` on a tree, in order: the first whose u is below its odds is the end of the path.

    A leaf is tried with P of its path, as the last guess of a chain. When it is not kept it is taken out of the tree;
    its parent's p and P become what they are in `block_odds` behind a guess that is not kept, and the parent's next
    child is come to with them, or, where none is left, the parent itself is tried. The root's odds are 1.

    Args:
        p: for each node that has children, and `ROOT`, the target's probability behind it of the ids they were drawn
            from, `[L]`.
        children: of each of those.
    """
    return _Traversal(p, children).from_node(ROOT, 1.0)


@dataclass(frozen=True)
class _Traversal:
    """From the leaves up: see `block_tree`."""

    p: Mapping[int, Floats]
    children: Mapping[int, Children]

    def from_node(self, node: int, path: float) -> list[Trial]:
        """Return the trials below *node*, which is come to with odds *path*, and its own."""
        below = self.children.get(node)
        if below is None:
            return [Trial(node, path, 1.0, None)]
        trials: list[Trial] = []
        rest, scale, left_L = float(mass_beyond(self.p[node])), 1.0, self.p[node]
        for child, drawn, q_L in zip(below.nodes, below.drawn_W.tolist(), below.q_WL, strict=True):
            trials += self.from_node(child, min(1.0, path * _ratio(left_L[drawn], q_L[drawn])))
            remains_L = positive(path * left_L - q_L)
            mass = path * rest * scale + float(remains_L.sum())
            if mass > 0:
                scale, left_L = path * scale / mass, remains_L / mass
            path = 1.0 if node == ROOT else float(end_odds(np.array(mass), np.array(path)))
        return [*trials, Trial(node, path, scale, left_L)]


def _ratio(p: float, q: float) -> float:
    return float(p / q) if q > 0 else 0.0
