"""MLP speculators draft by the published mathematics."""

import math

import pytest
import torch

from proposers.shared.static_tree import StaticTree
from tests.support.models.head_checkpoints import HEADS, INNER, H, mlp_checkpoint
from tests.support.models.head_scene import KS, TREE, Path, Scene, chain, check, warm
from tests.support.models.published import Weights, rms


def mlp_logits(stored: Weights, state: torch.Tensor, tokens: Path, *, tied: bool, scaled: bool) -> torch.Tensor:
    def weight(part: str, i: int, leaf: str = "weight") -> torch.Tensor:
        return stored[f"speculator.{part}.{min(i, int(part == 'proj')) if tied else i}.{leaf}"]

    state_weight = 0.5 ** (0.5 / HEADS)
    token_weight = math.sqrt((1 - state_weight**2) * INNER / 2)
    if scaled:
        state = rms(state, torch.ones(H)) / math.sqrt(2)
    for i, token in enumerate(tokens):
        mixed = weight("proj", i) @ state * state_weight + weight("emb", i)[token] * token_weight
        normed = rms(mixed, weight("ln", i)) + weight("ln", i, "bias")
        state = normed * 0.5 * (1 + torch.erf(normed / math.sqrt(2)))
    return weight("head", len(tokens) - 1) @ state


@warm
@pytest.mark.parametrize(("tied", "scaled"), [(False, False), (True, True)])
@pytest.mark.parametrize("tree", [None, TREE])
def test_mlp_speculator(tied: bool, scaled: bool, warmth: float, tree: tuple[Path, ...] | None) -> None:
    config, stored = mlp_checkpoint(tied=tied, scaled=scaled)
    scene = Scene("mlp_speculator", config, stored, warmth=warmth, speculative_token_tree=tree)

    def behind(slot: int, path: Path) -> torch.Tensor:
        tokens = (scene.texts[slot].tokens[-1], *path)
        return mlp_logits(stored, scene.state(slot), tokens, tied=tied, scaled=scaled)

    check(scene, behind, chain(HEADS) if tree is None else StaticTree.of(TREE, HEADS, 0.9).choices)


def test_fewer_tokens_than_were_trained_leave_the_weights_alone() -> None:
    config, stored = mlp_checkpoint(tied=False, scaled=False)
    scene = Scene("mlp_speculator", config, stored, warmth=0.0, k=2)

    def behind(slot: int, path: Path) -> torch.Tensor:
        tokens = (scene.texts[slot].tokens[-1], *path)
        return mlp_logits(stored, scene.state(slot), tokens, tied=False, scaled=False)

    check(scene, behind, chain(2))


def test_more_tokens_than_heads_are_cut_and_said(caplog: pytest.LogCaptureFixture) -> None:
    config, stored = mlp_checkpoint(tied=False, scaled=False)
    drafts = Scene("mlp_speculator", config, stored, warmth=0.0, k=9).propose()
    assert [len(draft) for draft in drafts] == [min(k, HEADS) for k in KS]
    assert "mlp_speculator checkpoint has 4 heads" in caplog.text
