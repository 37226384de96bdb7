"""Rejection sampling of draft trees. Chains, in `workers.verification.rejection_math`, are trees without siblings.

- `standard`: recursive rejection sampling without replacement, from the root down (SpecInfer, arXiv 2305.09781;
  EAGLE-2, arXiv 2406.16858);
- `block`: traversal verification, from the leaves up (arXiv 2505.12398).

The shape of a tree must not depend on the sampled tokens: how many children a node has is fixed before any is sampled.
And under `block`, which verifies several nodes of a depth, their children must be sampled with independent noise.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from workers.verification.rejection_math import Floats, Ints, end_probability, mass_beyond, normalised, positive

ROOT = -1


class Children(NamedTuple):
    """The children of one node in the order in which they were sampled, without replacement.

    Attributes:
        nodes: their numbers in the draft.
        drawn_W: int64, which of the L ids each one is.
        q_WL: the distribution each was sampled from; it sums to 1, or is 0 where no id was left.
    """

    nodes: Seq[int]
    drawn_W: Ints
    q_WL: Floats


class PathEnd(NamedTuple):
    """A node that may be the last accepted one: with which probability, if no earlier candidate was accepted.

    The residual after it is proportional to `residual_L` at the ids of its children's distribution, and to `scale`
    times p at all others. Without children, `residual_L` is None, and the residual is p.
    """

    node: int
    probability: float
    scale: float
    residual_L: Floats | None


def sibling_distributions(q_L: Floats, drawn_W: Ints) -> Floats:
    """Return the distribution of each of W tokens sampled from q without replacement, `[W, L]`."""
    q_WL = np.repeat(q_L[None], len(drawn_W), 0)
    for place, drawn in enumerate(drawn_W.tolist()):
        q_WL[place + 1 :, drawn] = 0.0
    return normalised(q_WL)


def point_masses(count: int) -> Floats:
    """Return the distributions of children that were not sampled: each a point mass at an id of its own."""
    return np.eye(count)


class NodeResiduals(NamedTuple):
    """Acceptance of one node's children: the residual after the first j of them were rejected, for j from 0 to W.

    Attributes:
        acceptance_W: the probability that child j is accepted when those before it were rejected.
        scales_J: what p is multiplied with beyond the L ids, `[W + 1]`.
        residuals_JL: the residual at the L ids, `[W + 1, L]`; with the mass beyond them it sums to 1.
    """

    acceptance_W: Floats
    scales_J: Floats
    residuals_JL: Floats


def standard_node(p_L: Floats, children: Children) -> NodeResiduals:
    """Return what `standard` does at one node: p_(j+1) = norm((p_j - q_j)+), child j is accepted with p_j/q_j.

    Args:
        p_L: the target's probability after the node, of the ids of the children's distribution.
        children: of the node.
    """
    rest, scale, residual_L = float(mass_beyond(p_L)), 1.0, p_L
    acceptance, scales, residuals = [], [scale], [residual_L]
    for drawn, q_L in zip(children.drawn_W.tolist(), children.q_WL, strict=True):
        acceptance.append(_ratio(residual_L[drawn], q_L[drawn]))
        residual_L = positive(residual_L - q_L)
        mass = rest * scale + float(residual_L.sum())
        scale, residual_L = (scale / mass, residual_L / mass) if mass > 0 else (scale, residuals[0])
        scales.append(scale)
        residuals.append(residual_L)
    return NodeResiduals(np.minimum(1.0, np.array(acceptance)), np.array(scales), np.array(residuals))


def first_accepted(residuals: NodeResiduals, u_W: Floats) -> int | None:
    """Return which child is accepted, None for none."""
    accepted_W = np.flatnonzero(u_W < residuals.acceptance_W)
    return int(accepted_W[0]) if len(accepted_W) else None


def end_of_path(candidates: Seq[PathEnd], u_N: Floats) -> PathEnd:
    """Return the first candidate whose u is below its probability; the root's probability is 1, without a u."""
    return next(end for end in candidates if end.node == ROOT or u_N[end.node] < end.probability)


def block_tree(p: Mapping[int, Floats], children: Mapping[int, Children]) -> list[PathEnd]:
    """Return the candidates of `block` on a tree, in order: the first whose u is below its probability ends the path.

    A leaf's probability is P of its path, as for the last token of a chain. When it is rejected it leaves the tree; its
    parent's p and P become what they are in `block_acceptance` after a rejected token, and the parent's next child is
    tried with them, or, if none is left, the parent itself. The root's probability is 1.

    Args:
        p: for each node that has children, and `ROOT`, the target's probability after it of the ids of the children's
            distribution, `[L]`.
        children: of each of those.
    """
    return _Traversal(p, children).from_node(ROOT, 1.0)


@dataclass(frozen=True)
class _Traversal:
    """From the leaves up: see `block_tree`."""

    p: Mapping[int, Floats]
    children: Mapping[int, Children]

    def from_node(self, node: int, path: float) -> list[PathEnd]:
        """Return the candidates below *node*, whose path has the probability *path*, and the node itself."""
        below = self.children.get(node)
        if below is None:
            return [PathEnd(node, path, 1.0, None)]
        candidates: list[PathEnd] = []
        rest, scale, residual_L = float(mass_beyond(self.p[node])), 1.0, self.p[node]
        for child, drawn, q_L in zip(below.nodes, below.drawn_W.tolist(), below.q_WL, strict=True):
            candidates += self.from_node(child, min(1.0, path * _ratio(residual_L[drawn], q_L[drawn])))
            remaining_L = positive(path * residual_L - q_L)
            mass = path * rest * scale + float(remaining_L.sum())
            if mass > 0:
                scale, residual_L = path * scale / mass, remaining_L / mass
            path = 1.0 if node == ROOT else float(end_probability(np.array(mass), np.array(path)))
        return [*candidates, PathEnd(node, path, scale, residual_L)]


def _ratio(p: float, q: float) -> float:
    return float(p / q) if q > 0 else 0.0
