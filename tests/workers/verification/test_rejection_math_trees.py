"""Rejection sampling of trees, proved by enumeration: all drafts and outcomes of small models are added up."""

from collections.abc import Iterator, Mapping
from itertools import permutations

import numpy as np
import pytest

from tests.support.rejection_math import Floats, Pair, Tally, Text, each_pair, on_either_side, whole
from workers.verification import rejection_math_trees as rules_trees
from workers.verification.rejection_math_trees import ROOT, Children, PathEnd

# Trees: a shape is the children of each node, by the path of places that leads there.

Shape = dict[Text, int]
SHAPES: dict[str, Shape] = {
    "two": {(): 2},
    "three": {(): 3},
    "two and two": {(): 2, (0,): 2},
    "two behind the second": {(): 2, (1,): 2},
    "two, two and one": {(): 2, (0,): 2, (1,): 1},
    "a chain with a sibling": {(): 1, (0,): 2, (0, 0): 1},
}


def drawn(p_V: Floats, width: int) -> Iterator[tuple[float, Text]]:
    """Yield every outcome of *width* draws without replacement, with its probability."""
    for order in permutations(range(len(p_V)), width):
        chance, residual_V = 1.0, p_V.copy()
        for j, token in enumerate(order):
            mass = residual_V.sum()
            # With no id left, the lowest other id stands for any.
            chance *= residual_V[token] / mass if mass > 0 else float(token == min({*range(len(p_V))} - {*order[:j]}))
            residual_V[token] = 0.0
        if chance > 0:
            yield chance, order


def chosen(p_V: Floats, width: int) -> Iterator[tuple[float, Text]]:
    """Yield the *width* most likely ids, with probability 1."""
    yield 1.0, tuple(np.argsort(-p_V)[:width].tolist())


class Tree:
    """A shape whose tokens are sampled from a draft, node by node, parents before children."""

    def __init__(self, shape: Shape) -> None:
        self.places = sorted(
            ((*up, j) for up, width in shape.items() for j in range(width)), key=lambda path: (len(path), path)
        )
        self.number = {path: node for node, path in enumerate(self.places)} | {(): ROOT}
        self.shape = shape
        self.depth = max(map(len, self.places))

    def fillings(self, pair: Pair, is_drawn: bool) -> Iterator[tuple[float, dict[int, Text]]]:
        """Yield the text up to each node, and the probability of all of them under the draft."""
        yield from self._fill([*self.shape], {ROOT: ()}, pair, is_drawn)

    def _fill(
        self, inner: list[Text], texts: dict[int, Text], pair: Pair, is_drawn: bool
    ) -> Iterator[tuple[float, dict[int, Text]]]:
        if not inner:
            yield 1.0, texts
            return
        up, text = inner[0], texts[self.number[inner[0]]]
        orders = drawn if is_drawn else chosen
        for chance, order in orders(pair.draft(text), self.shape[up]):
            more = texts | {self.number[(*up, j)]: (*text, token) for j, token in enumerate(order)}
            for weight, whole_tree in self._fill(inner[1:], more, pair, is_drawn):
                yield chance * weight, whole_tree

    def given(
        self, pair: Pair, texts: dict[int, Text], is_drawn: bool
    ) -> tuple[dict[int, Floats], dict[int, Children], dict[int, list[int]]]:
        """Return p, the children and the ids of their distributions, as the rules get them."""
        p, children, ids = dict[int, Floats](), dict[int, Children](), dict[int, list[int]]()
        for up, width in self.shape.items():
            node = self.number[up]
            nodes = [self.number[(*up, j)] for j in range(width)]
            tokens = [texts[child][-1] for child in nodes]
            p_V = pair.draft(texts[node])
            own = sorted({*np.flatnonzero(p_V).tolist(), *tokens}) if is_drawn else tokens
            drawn_W = np.array([own.index(token) for token in tokens])
            q_WL = rules_trees.sibling_distributions(p_V[own], drawn_W) if is_drawn else rules_trees.point_masses(width)
            p[node], ids[node] = pair.target(texts[node])[own], own
            children[node] = Children(nodes, drawn_W, q_WL)
        return p, children, ids


Ends = Iterator[tuple[float, PathEnd]]


def standard_tree(p: Mapping[int, Floats], children: Mapping[int, Children], u_N: Floats) -> PathEnd:
    """Descend from the root to the first accepted child, as long as there is one; arguments as for `block_tree`.

    The distribution of children must not depend on other nodes of their depth: one node of each depth is verified.
    """
    node = ROOT
    while node in children:
        below = children[node]
        residuals = rules_trees.standard_node(p[node], below)
        accepted = rules_trees.first_accepted(residuals, u_N[list(below.nodes)])
        if accepted is None:
            return PathEnd(node, 1.0, float(residuals.scales_J[-1]), residuals.residuals_JL[-1])
        node = below.nodes[accepted]
    return PathEnd(node, 1.0, 1.0, None)


def standard_ends(p: dict[int, Floats], children: dict[int, Children], count: int) -> Ends:
    """Yield every outcome of recursive rejection sampling, with its probability."""
    probabilities = np.zeros(count)
    for node, below in children.items():
        probabilities[below.nodes] = rules_trees.standard_node(p[node], below).acceptance_W
    for weight, u_N in on_either_side(probabilities.tolist()):
        yield weight, standard_tree(p, children, u_N)


def block_ends(p: dict[int, Floats], children: dict[int, Children], count: int) -> Ends:
    """Yield every outcome of traversal verification, with its probability."""
    candidates = rules_trees.block_tree(p, children)
    probabilities = np.zeros(count)
    for end in candidates[:-1]:
        probabilities[end.node] = end.probability
    for weight, u_N in on_either_side(probabilities.tolist()):
        yield weight, rules_trees.end_of_path(candidates, u_N)


TREE_RULES = {"standard": standard_ends, "block": block_ends}


@pytest.mark.parametrize("is_drawn", [True, False], ids=["drawn", "certain"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", TREE_RULES)
@each_pair
def test_a_tree_keeps_the_targets_distribution(pair: Pair, rule: str, shape: str, is_drawn: bool) -> None:
    tree = Tree(SHAPES[shape])
    tally = Tally(pair.target, pair.size, tree.depth + 1)
    for weight, texts in tree.fillings(pair, is_drawn):
        p, children, ids = tree.given(pair, texts, is_drawn)
        for probability, end in TREE_RULES[rule](p, children, len(tree.places)):
            text = texts[end.node]
            tally.add(
                weight * probability, text, whole(pair.target(text), end.scale, ids.get(end.node, []), end.residual_L)
            )
    tally.check()
