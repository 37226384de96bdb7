"""Hydra drafts by the published mathematics."""

import pytest
import torch

from proposers.shared.static_tree import StaticTree
from tests.support.models.head_checkpoints import H, V, hydra_checkpoint, prefix_model
from tests.support.models.head_scene import TREE, Path, Scene, chain, check, warm
from tests.support.models.published import Weights, linear


def hydra_logits(stored: Weights, arch: str, read: torch.Tensor, head: int) -> torch.Tensor:
    is_prefix = arch == "prefix-mlp"
    for k in range(3):
        name = f"hydra_mlp.{head}.{2 * k + 1 if is_prefix else k}"
        while f"{name}.linear.weight" not in stored:
            name = f"hydra_mlp.{head}.{int(name.split('.')[2]) - (2 if is_prefix else 1)}"
        inner = linear(stored, f"{name}.linear", read)
        passed = linear(stored, f"{name}.res_connection", read) if len(inner) != len(read) else read
        read = passed + inner * torch.sigmoid(inner)
    return linear(stored, f"hydra_lm_head.{head}" + (".1" if is_prefix else ""), read)


@warm
@pytest.mark.parametrize(
    ("arch", "grounded", "stored_once"),
    [
        ("mlp", True, True),
        ("mlp", True, False),
        ("mlp", False, True),
        ("prefix-mlp", True, False),
    ],
)
@pytest.mark.parametrize("tree", [None, chain(3), TREE], ids=["usual", "chain", "given"])
def test_hydra(arch: str, grounded: bool, stored_once: bool, warmth: float, tree: tuple[Path, ...] | None) -> None:
    config, stored = hydra_checkpoint(arch, grounded=grounded, stored_once=stored_once)
    if not stored_once:  # as in the state dict that the authors' `train.py` saves, but with other values
        stored = {**stored, "input_embed_fn.weight": torch.ones(V, H)}
    scene = Scene("hydra", config, stored, warmth=warmth, speculative_token_tree=tree)

    def behind(slot: int, path: Path) -> torch.Tensor:
        state = scene.state(slot)
        if arch == "prefix-mlp":
            features = scene.texts[slot].features
            assert features is not None
            state = prefix_model()(inputs_embeds=features[None], use_cache=False).last_hidden_state[0, -1]
        tokens = (scene.texts[slot].tokens[-1], *path)
        read = torch.cat([state, *(scene.embedding[token] for token in tokens)]) if grounded else state
        return hydra_logits(stored, arch, read, len(path))

    wanted = StaticTree.best(9, 3, 0.9) if tree is None else StaticTree.of(tree, 3, 0.9)
    check(scene, behind, wanted.choices)
