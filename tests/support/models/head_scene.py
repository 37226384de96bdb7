"""A draft head over rows of unequal lengths, and what it must draft."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from proposers import registry
from protos.config.engine import SpeculativeConfig
from protos.draft import Draft, DraftRow
from tests.support.models.dense_runner import DenseRunner, FakeParts, Text
from tests.support.models.head_checkpoints import TARGET, H, V, some
from tests.support.models.published import Weights

TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 2), (2,), (0, 1, 0))
KS = (9, 2, 4, 1)
LENGTHS = (5, 1 + 1, 9, 3)
Path = tuple[int, ...]
LogitsBehind = Callable[[Path], torch.Tensor]


class Scene:
    """A module built from a checkpoint, and rows of different lengths and draft sizes."""

    def __init__(
        self, method: str, config: dict[str, Any], stored: Weights, *, warmth: float, k: int = 9, **speculative: Any
    ) -> None:
        self.embedding, self.head = some(V, H, seed=91), some(V, H, seed=92)
        self.config = SpeculativeConfig(method=method, num_speculative_tokens=k, model="here", **speculative)
        parts = FakeParts(stored, config, TARGET, self.embedding, self.head)
        self.proposer_class: Any = registry.load(method)
        self.texts = [
            Text([(7 * i + 3 * s) % V for i in range(n)], some(n - 1, H, seed=50 + s)) for s, n in enumerate(LENGTHS)
        ]
        self.noise_SKV = some(len(KS), 9, V, seed=93, spread=1.0) * warmth
        self.runner = DenseRunner(self.proposer_class.build(self.config, parts), self.texts, self.noise_SKV)

    def propose(self) -> list[Draft]:
        proposer = self.proposer_class.create(self.config, self.runner)
        return proposer.propose([DraftRow(slot, k) for slot, k in enumerate(KS)])

    def state(self, slot: int) -> torch.Tensor:
        features = self.texts[slot].features
        assert features is not None
        return features[-1]


def paths_of(draft: Draft) -> list[Path]:
    """Return the path to each node of a chain or a tree."""
    found: list[Path] = []
    for node, token in enumerate(draft.tokens):
        parent = draft.parents[node] if draft.parents else node - 1
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def path_of(choice: Path, behind: LogitsBehind, noise_KV: torch.Tensor) -> Path:
    """Return the path of a choice: at each depth the draft token of that rank."""
    path: Path = ()
    for depth, rank in enumerate(choice):
        scores = behind(path).log_softmax(-1) + noise_KV[depth]
        path = (*path, int(scores.sort(descending=True).indices[rank]))
    return path


def check(scene: Scene, behind: Callable[[int, Path], torch.Tensor], choices: tuple[Path, ...]) -> None:
    """Check that every row holds exactly the paths of its first choices."""
    for slot, draft in enumerate(scene.propose()):
        wanted = [path_of(choice, partial(behind, slot), scene.noise_SKV[slot]) for choice in choices[: KS[slot]]]
        assert paths_of(draft) == wanted
        assert all(parent < node for node, parent in enumerate(draft.parents))


def chain(length: int) -> tuple[Path, ...]:
    return tuple((0,) * depth for depth in range(1, length + 1))


warm = pytest.mark.parametrize("warmth", [0.0, 1.0], ids=["greedy", "drawn"])
