"""Rules of acceptance, proved by enumeration: no sampling, all drafts and outcomes of small models added up.

A model's laws depend on the whole text before, so that a law taken from the wrong place is seen. What one round emits
is followed by what the target would say by itself, up to a fixed length; the joint law of all that must be the target's
to 1e-12. Every outcome is asked of the rule itself, with u on either side of each of its odds.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from itertools import permutations, product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from workers.verification import rejection_math as rules
from workers.verification import rejection_math_trees as rules_trees
from workers.verification.rejection_math_trees import ROOT, Children, Trial

Floats = npt.NDArray[np.float64]
Text = tuple[int, ...]
Model = Callable[[Text], Floats]
EXACT = 1e-12


class Table:
    """A model whose laws are drawn once for every text: *make* says how."""

    def __init__(self, make: Callable[[np.random.Generator], Floats], seed: int) -> None:
        self._make, self._rng, self._laws = make, np.random.default_rng(seed), dict[Text, Floats]()

    def __call__(self, text: Text) -> Floats:
        """Return the law behind *text*."""
        if text not in self._laws:
            self._laws[text] = self._make(self._rng)
        return self._laws[text]


def smooth(size: int = 3) -> Callable[[np.random.Generator], Floats]:
    """Laws of all kinds."""
    return lambda rng: rng.dirichlet(np.full(size, 0.7))


def within(ids: Seq[int], size: int = 3) -> Callable[[np.random.Generator], Floats]:
    """Laws that have some ids alone."""

    def make(rng: np.random.Generator) -> Floats:
        law_V = np.zeros(size)
        law_V[list(ids)] = rng.dirichlet(np.ones(len(ids)))
        return law_V

    return make


def one_hot(size: int = 3) -> Callable[[np.random.Generator], Floats]:
    """Laws that are certain."""
    return lambda rng: np.eye(size)[rng.integers(size)]


def near(model: Model, size: int) -> Model:
    """A model that nearly agrees with another."""

    def law(text: Text) -> Floats:
        moved_V = model(text) + 1e-9 * np.arange(size)
        return moved_V / moved_V.sum()

    return law


class Pair(NamedTuple):
    """A target, a draft, and the size of their vocabulary."""

    target: Model
    draft: Model
    size: int = 3


def pairs() -> dict[str, Pair]:
    """Return pairs of all kinds."""
    target = Table(smooth(), 1)
    return {
        "unlike": Pair(target, Table(smooth(), 2)),
        "equal": Pair(target, target),
        "nearly equal": Pair(target, near(target, 3)),
        "certain draft": Pair(target, Table(one_hot(), 3)),
        "certain target": Pair(Table(one_hot(), 4), target),
        "both certain": Pair(Table(one_hot(), 5), Table(one_hot(), 6)),
        "disjoint": Pair(Table(within((0, 1)), 7), Table(within((2,)), 8)),
        "overlapping": Pair(Table(within((0, 1)), 9), Table(within((1, 2)), 10)),
    }


PAIRS = pairs()
each_pair = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)


def joint(model: Model, size: int, length: int, text: Text = ()) -> Floats:
    """Return the law of the next *length* tokens, `[V] * length`."""
    if not length:
        return np.ones(())
    law_V = model(text)
    return np.stack([law_V[v] * joint(model, size, length - 1, (*text, v)) for v in range(size)])


class Tally:
    """Adds up what rounds emit, each continued by the target to *length* tokens."""

    def __init__(self, target: Model, size: int, length: int) -> None:
        self.target, self.size, self.length = target, size, length
        self.law = np.zeros((size,) * length)
        self._behind = dict[Text, Floats]()

    def add(self, weight: float, kept: Text, left_V: Floats) -> None:
        """A round kept *kept* and drew a token from *left_V*, with probability *weight*."""
        law_V = left_V / left_V.sum()
        for token in range(self.size):
            text = (*kept, token)
            if text not in self._behind:
                self._behind[text] = joint(self.target, self.size, self.length - len(text), text)
            self.law[text] += weight * law_V[token] * self._behind[text]

    def check(self) -> None:
        """What was emitted has the target's law."""
        assert np.abs(self.law - joint(self.target, self.size, self.length)).max() < EXACT


def on_either_side(odds: Seq[float]) -> Iterator[tuple[float, Floats]]:
    """Yield every combination of u below and above *odds*, with its probability where that is not 0."""
    for below in product((True, False), repeat=len(odds)):
        weight = float(np.prod([each if is_below else 1 - each for each, is_below in zip(odds, below, strict=True)]))
        if weight > 0:
            yield (
                weight,
                np.array(
                    [each / 2 if is_below else (1 + each) / 2 for each, is_below in zip(odds, below, strict=True)]
                ),
            )


def whole(p_V: Floats, scale: float, ids: Seq[int], left_L: Floats | None) -> Floats:
    """Return what is left as the workers make it."""
    at_M2 = torch.tensor([(0, i) for i in ids] if left_L is not None else [], dtype=torch.int64).reshape(-1, 2)
    left_M = torch.from_numpy(np.array([] if left_L is None else left_L, np.float64))
    found: Floats = rules.left(torch.from_numpy(p_V)[None], torch.tensor([scale], dtype=torch.float64), at_M2, left_M)[
        0
    ].numpy()
    return found


# Chains.


def chain_of(target: Model, draft: Model, guesses: Text, width: int) -> tuple[rules.ChainBatch, list[list[int]]]:
    """Return one chain as the rules are given it, its laws those ids that the draft has, and which those are."""
    shape = (1, len(guesses), width)
    p_RKL, q_RKL, guess_RK, ids = np.zeros(shape), np.zeros(shape), np.zeros(shape[:2], np.int64), []
    for i, guess in enumerate(guesses):
        law_V = draft(guesses[:i])
        own = np.flatnonzero(law_V).tolist()
        p_RKL[0, i, : len(own)], q_RKL[0, i, : len(own)] = target(guesses[:i])[own], law_V[own]
        guess_RK[0, i] = own.index(guess)
        ids.append(own)
    return rules.ChainBatch(np.array([len(guesses)]), p_RKL, q_RKL, guess_RK), ids


def probability(model: Model, text: Text) -> float:
    """Return how likely *model* says *text*."""
    return float(np.prod([model(text[:i])[token] for i, token in enumerate(text)]))


CHAIN_RULES = {"standard": (rules.standard, rules.standard_odds), "block": (rules.block, rules.block_odds)}


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("rule", CHAIN_RULES)
@each_pair
def test_a_chain_keeps_the_targets_law(pair: Pair, rule: str, count: int) -> None:
    target, draft, size = pair
    judge, odds_of = CHAIN_RULES[rule]
    tally = Tally(target, size, count + 1)
    for guesses in product(range(size), repeat=count):
        drafted = probability(draft, guesses)
        if not drafted:
            continue
        chains, ids = chain_of(target, draft, guesses, size)
        for weight, u_K in on_either_side(odds_of(chains)[0].tolist()):
            kept = judge(chains, u_K[None])
            i = int(kept.counts_R[0])
            left_L = kept.left_RL[0][: len(ids[i])] if i < count else None
            left_V = whole(
                target(guesses[:i]), float(kept.scale_R[0]) if i < count else 1.0, ids[i] if i < count else [], left_L
            )
            tally.add(drafted * weight, guesses[:i], left_V)
    tally.check()


def kept_on_average(rule: str, pair: Pair, count: int) -> float:
    """Return how many guesses of a chain are kept on average."""
    target, draft, size = pair
    judge, odds_of = CHAIN_RULES[rule]
    total = 0.0
    for guesses in product(range(size), repeat=count):
        drafted = probability(draft, guesses)
        if drafted:
            chains, _ = chain_of(target, draft, guesses, size)
            total += sum(
                drafted * weight * int(judge(chains, u_K[None]).counts_R[0])
                for weight, u_K in on_either_side(odds_of(chains)[0].tolist())
            )
    return total


@each_pair
def test_block_keeps_at_least_as_many(pair: Pair) -> None:
    assert kept_on_average("block", pair, 3) >= kept_on_average("standard", pair, 3) - EXACT


def test_block_keeps_more_where_laws_differ_and_all_where_they_are_equal() -> None:
    unlike, equal = PAIRS["unlike"], PAIRS["equal"]
    assert kept_on_average("block", unlike, 3) > kept_on_average("standard", unlike, 3) + 0.01
    assert kept_on_average("standard", equal, 3) == pytest.approx(3)
    assert kept_on_average("block", equal, 3) == pytest.approx(3)


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_chains_of_a_batch_do_not_know_of_each_other(rule: str) -> None:
    judge, _ = CHAIN_RULES[rule]
    (target, draft, _), rng = PAIRS["unlike"], np.random.default_rng(3)
    guesses: list[Text] = [(0, 1, 2), (1,), (), (2, 2)]
    alone = [chain_of(target, draft, each, 3)[0] for each in guesses]
    u_RK = rng.random((4, 3))
    filled = [np.zeros((4, 3, 3)), np.zeros((4, 3, 3)), np.zeros((4, 3), np.int64)]
    for r, chain in enumerate(alone):
        for whole_R, own_R in zip(filled, chain[1:], strict=True):
            whole_R[r, : len(guesses[r])] = own_R[0]
    together = judge(
        rules.ChainBatch(np.array([len(each) for each in guesses]), filled[0], filled[1], filled[2].astype(np.int64)),
        u_RK,
    )
    assert together.counts_R[2] == 0
    for r in (0, 1, 3):
        by_itself = judge(alone[r], u_RK[r : r + 1, : len(guesses[r])])
        assert by_itself.counts_R[0] == together.counts_R[r]
        if by_itself.counts_R[0] < len(guesses[r]):
            assert by_itself.scale_R[0] == together.scale_R[r]
            assert (by_itself.left_RL[0] == together.left_RL[r]).all()


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


def drawn(law_V: Floats, width: int) -> Iterator[tuple[float, Text]]:
    """Yield all that *width* draws without replacement may bring, with its probability."""
    for order in permutations(range(len(law_V)), width):
        chance, left_V = 1.0, law_V.copy()
        for j, token in enumerate(order):
            mass = left_V.sum()
            # With nothing left to draw, whatever stands there is as good as anything.
            chance *= left_V[token] / mass if mass > 0 else float(token == min({*range(len(law_V))} - {*order[:j]}))
            left_V[token] = 0.0
        if chance > 0:
            yield chance, order


def chosen(law_V: Floats, width: int) -> Iterator[tuple[float, Text]]:
    """Yield the *width* likeliest ids, which are certain."""
    yield 1.0, tuple(np.argsort(-law_V)[:width].tolist())


class Tree:
    """A shape whose tokens are drawn from a draft, node by node, parents before children."""

    def __init__(self, shape: Shape) -> None:
        self.places = sorted(
            ((*up, j) for up, width in shape.items() for j in range(width)), key=lambda path: (len(path), path)
        )
        self.number = {path: node for node, path in enumerate(self.places)} | {(): ROOT}
        self.shape = shape
        self.depth = max(map(len, self.places))

    def fillings(self, pair: Pair, is_drawn: bool) -> Iterator[tuple[float, dict[int, Text]]]:
        """Yield the text behind each node, and how likely the draft says all of them together."""
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
        """Return p, the children and the ids of their laws, as the rules are given them."""
        p, children, ids = dict[int, Floats](), dict[int, Children](), dict[int, list[int]]()
        for up, width in self.shape.items():
            node = self.number[up]
            nodes = [self.number[(*up, j)] for j in range(width)]
            tokens = [texts[child][-1] for child in nodes]
            law_V = pair.draft(texts[node])
            own = sorted({*np.flatnonzero(law_V).tolist(), *tokens}) if is_drawn else tokens
            drawn_W = np.array([own.index(token) for token in tokens])
            q_WL = rules_trees.without_elders(law_V[own], drawn_W) if is_drawn else rules_trees.certain(width)
            p[node], ids[node] = pair.target(texts[node])[own], own
            children[node] = Children(nodes, drawn_W, q_WL)
        return p, children, ids


Ends = Iterator[tuple[float, Trial]]


def standard_ends(p: dict[int, Floats], children: dict[int, Children], count: int) -> Ends:
    """Yield all that recursive rejection may come to, with its probability."""
    odds = np.zeros(count)
    for node, below in children.items():
        odds[below.nodes] = rules_trees.standard_node(p[node], below).odds_W
    for weight, u_N in on_either_side(odds.tolist()):
        yield weight, rules_trees.standard_tree(p, children, u_N)


def block_ends(p: dict[int, Floats], children: dict[int, Children], count: int) -> Ends:
    """Yield all that traversal verification may come to, with its probability."""
    trials = rules_trees.block_tree(p, children)
    odds = np.zeros(count)
    for trial in trials[:-1]:
        odds[trial.node] = trial.odds
    for weight, u_N in on_either_side(odds.tolist()):
        yield weight, rules_trees.last_of_path(trials, u_N)


TREE_RULES = {"standard": standard_ends, "block": block_ends}


@pytest.mark.parametrize("is_drawn", [True, False], ids=["drawn", "certain"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", TREE_RULES)
@each_pair
def test_a_tree_keeps_the_targets_law(pair: Pair, rule: str, shape: str, is_drawn: bool) -> None:
    tree = Tree(SHAPES[shape])
    tally = Tally(pair.target, pair.size, tree.depth + 1)
    for weight, texts in tree.fillings(pair, is_drawn):
        p, children, ids = tree.given(pair, texts, is_drawn)
        for odds, end in TREE_RULES[rule](p, children, len(tree.places)):
            text = texts[end.node]
            tally.add(weight * odds, text, whole(pair.target(text), end.scale, ids.get(end.node, []), end.left_L))
    tally.check()


def test_rounding_that_leaves_nothing_costs_no_token() -> None:
    p_RV = torch.tensor([[0.25, 0.75]], dtype=torch.float64)
    at_M2, left_M = torch.tensor([[0, 0], [0, 1]]), torch.zeros(2, dtype=torch.float64)
    assert rules.left(p_RV, torch.ones(1, dtype=torch.float64), at_M2, left_M).tolist() == p_RV.tolist()


def test_a_token_is_drawn_by_the_noise_given_and_none_where_there_is_none() -> None:
    weights = torch.tensor([[0.0, 1.0, 3.0], [0.0, 2.0, 2.0], [0.0, 0.0, 0.0], [torch.nan, 1.0, 1.0]])
    noise = torch.tensor([[9.0, 2.0, 0.0], [0.0, 0.0, 0.0], [1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
    assert rules.drawn(weights.double(), noise.double()).tolist() == [1, 1, -1, -1]
