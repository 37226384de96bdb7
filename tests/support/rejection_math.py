"""Small models for proofs by enumeration: what rounds emit has the target's distribution, exactly.

A model's distribution depends on the whole text before, so that one taken from the wrong place is seen. What one round
emits is continued by the target itself, up to a fixed length; the joint distribution must be the target's to 1e-12.
Every outcome is taken from the rule itself, with u on either side of each acceptance probability.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from workers.verification import rejection_math as rules

Floats = npt.NDArray[np.float64]
Text = tuple[int, ...]
Model = Callable[[Text], Floats]
EXACT = 1e-12


class Table:
    """A model whose distributions are drawn once for every text, by *make*."""

    def __init__(self, make: Callable[[np.random.Generator], Floats], seed: int) -> None:
        self._make, self._rng, self._probs = make, np.random.default_rng(seed), dict[Text, Floats]()

    def __call__(self, text: Text) -> Floats:
        """Return the distribution after *text*."""
        if text not in self._probs:
            self._probs[text] = self._make(self._rng)
        return self._probs[text]


def smooth(size: int = 3) -> Callable[[np.random.Generator], Floats]:
    """Distributions of all kinds."""
    return lambda rng: rng.dirichlet(np.full(size, 0.7))


def within(ids: Seq[int], size: int = 3) -> Callable[[np.random.Generator], Floats]:
    """Distributions over some ids only."""

    def make(rng: np.random.Generator) -> Floats:
        p_V = np.zeros(size)
        p_V[list(ids)] = rng.dirichlet(np.ones(len(ids)))
        return p_V

    return make


def one_hot(size: int = 3) -> Callable[[np.random.Generator], Floats]:
    """Point masses."""
    return lambda rng: np.eye(size)[rng.integers(size)]


def near(model: Model, size: int) -> Model:
    """A model that is nearly equal to another."""

    def moved(text: Text) -> Floats:
        moved_V = model(text) + 1e-9 * np.arange(size)
        return moved_V / moved_V.sum()

    return moved


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
"""Runs a test for each pair."""


def joint(model: Model, size: int, length: int, text: Text = ()) -> Floats:
    """Return the joint distribution of the next *length* tokens, `[V] * length`."""
    if not length:
        return np.ones(())
    p_V = model(text)
    return np.stack([p_V[v] * joint(model, size, length - 1, (*text, v)) for v in range(size)])


class Tally:
    """Adds up what rounds emit, each continued by the target to *length* tokens."""

    def __init__(self, target: Model, size: int, length: int) -> None:
        self.target, self.size, self.length = target, size, length
        self.joint = np.zeros((size,) * length)
        self._after = dict[Text, Floats]()

    def add(self, weight: float, accepted: Text, residual_V: Floats) -> None:
        """A round accepted *accepted* and sampled a token from *residual_V*, with probability *weight*."""
        p_V = residual_V / residual_V.sum()
        for token in range(self.size):
            text = (*accepted, token)
            if text not in self._after:
                self._after[text] = joint(self.target, self.size, self.length - len(text), text)
            self.joint[text] += weight * p_V[token] * self._after[text]

    def check(self) -> None:
        """What was emitted has the target's distribution."""
        assert np.abs(self.joint - joint(self.target, self.size, self.length)).max() < EXACT


def on_either_side(probabilities: Seq[float]) -> Iterator[tuple[float, Floats]]:
    """Yield every combination of u below and above *probabilities*, with its probability where that is not 0."""
    for below in product((True, False), repeat=len(probabilities)):
        pairs = [*zip(probabilities, below, strict=True)]
        weight = float(np.prod([each if is_below else 1 - each for each, is_below in pairs]))
        if weight > 0:
            yield weight, np.array([each / 2 if is_below else (1 + each) / 2 for each, is_below in pairs])


def whole(p_V: Floats, scale: float, ids: Seq[int], residual_L: Floats | None) -> Floats:
    """Return the residual over the whole vocabulary, as the workers compute it."""
    at_M2 = torch.tensor([(0, i) for i in ids] if residual_L is not None else [], dtype=torch.int64).reshape(-1, 2)
    residual_M = torch.from_numpy(np.array([] if residual_L is None else residual_L, np.float64))
    scale_1 = torch.tensor([scale], dtype=torch.float64)
    found: Floats = rules.residual(torch.from_numpy(p_V)[None], scale_1, at_M2, residual_M)[0].numpy()
    return found
