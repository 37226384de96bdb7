"""Medusa drafts by the published mathematics."""

import pytest
import torch

from proposers.shared.static_tree import StaticTree
from tests.support.models.head_checkpoints import V, medusa_checkpoint
from tests.support.models.head_scene import TREE, Path, Scene, chain, check, warm
from tests.support.models.published import Weights, linear


def medusa_logits(scene: Scene, stored: Weights, output: str, state: torch.Tensor, head: int) -> torch.Tensor:
    for j in range(2):
        name = f"medusa_heads.blocks.{head}.layers.{j}" if output == "truncated" else f"{head}.{j}.linear"
        inner = linear(stored, name, state)
        state = state + inner * torch.sigmoid(inner)
    if output == "target":
        return scene.head @ state
    if output == "own":
        return stored[f"{head}.2.weight"] @ state
    logits = torch.full((V,), -torch.inf)
    for row, token in enumerate(stored["token_map"].tolist()):
        logits[token] = stored[f"lm_heads.{head}.weight"][row] @ state
    return logits


@warm
@pytest.mark.parametrize("output", ["own", "target", "truncated"])
@pytest.mark.parametrize("tree", [None, chain(3), TREE], ids=["usual", "chain", "given"])
def test_medusa(output: str, warmth: float, tree: tuple[Path, ...] | None) -> None:
    config, stored = medusa_checkpoint(output)
    scene = Scene("medusa", config, stored, warmth=warmth, speculative_token_tree=tree)

    def behind(slot: int, path: Path) -> torch.Tensor:
        return medusa_logits(scene, stored, output, scene.state(slot), len(path))

    wanted = StaticTree.best(9, 3, 0.8) if tree is None else StaticTree.of(tree, 3, 0.8)
    check(scene, behind, wanted.choices)
