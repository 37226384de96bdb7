"""Recurrent drafters (ReDrafter) draft by the published mathematics."""

from functools import partial

import pytest
import torch

from proposers.recurrent import RecurrentProposer
from proposers.shared.static_tree import StaticTree
from protos.draft import DraftRow
from tests.support.models.head_checkpoints import EXIT, H, redrafter_checkpoint
from tests.support.models.head_scene import KS, LogitsBehind, Path, Scene, chain, check, paths_of, warm
from tests.support.models.published import Weights, linear


def redrafter_logits(scene: Scene, stored: Weights, slot: int, path: Path, *, rnn: bool) -> torch.Tensor:
    state = torch.zeros(H)
    for token in (scene.texts[slot].tokens[-1], *path):
        if rnn:
            inner = stored["rnn_w.weight"] @ scene.embedding[token] + linear(stored, "rnn_u", state)
            state = inner * torch.sigmoid(inner)
        else:
            state = state + scene.embedding[token]
    read = torch.cat([scene.state(slot), state])
    if "input_proj.weight" in stored:
        read = linear(stored, "input_proj", read)
    for j in range(2):
        inner = linear(stored, f"lm_head.{j}.linear", read)
        read = read + inner * torch.sigmoid(inner)
    logits = stored["lm_head.2.weight"] @ read
    logits = logits - logits.max()
    return torch.where(logits >= logits.sort(descending=True).values[49], logits, -torch.inf)


def beam_nodes(behind: LogitsBehind, noise_KV: torch.Tensor, *, width: int, length: int, k: int) -> set[Path]:
    """Beam search over log-probabilities; among a beam's children only the *width* best by the noise take part."""
    beams: dict[Path, float] = {(): 0.0}
    nodes: dict[Path, float] = {}
    for depth in range(length):
        grown: dict[Path, float] = {}
        for path, score in beams.items():
            log_q = behind(path).log_softmax(-1)
            for token in (log_q + noise_KV[depth]).sort(descending=True).indices[:width].tolist():
                grown[(*path, token)] = score + float(log_q[token])
        beams = dict(sorted(grown.items(), key=lambda item: -item[1])[:width])
        nodes |= beams
    return set(sorted(nodes, key=lambda path: -nodes[path])[:k])


@warm
@pytest.mark.parametrize(("rnn", "exit_dim"), [(True, EXIT), (False, 2 * H)])
@pytest.mark.parametrize("width", [1, 3, 10])
def test_redrafter(rnn: bool, exit_dim: int, width: int, warmth: float) -> None:
    config, stored = redrafter_checkpoint(rnn=rnn, exit_dim=exit_dim)
    scene = Scene("recurrent", config, stored, warmth=warmth)
    proposer = RecurrentProposer(scene.runner, StaticTree.chain(9), width, length=3)
    drafts = proposer.propose([DraftRow(slot, k) for slot, k in enumerate(KS)])
    for slot, draft in enumerate(drafts):
        behind = partial(redrafter_logits, scene, stored, slot, rnn=rnn)
        wanted = beam_nodes(behind, scene.noise_SKV[slot], width=width, length=3, k=KS[slot])
        assert set(paths_of(draft)) == wanted
        assert len(paths_of(draft)) == len(wanted)


@warm
def test_redrafter_drafts_chains_of_any_length(warmth: float) -> None:
    config, stored = redrafter_checkpoint(rnn=True, exit_dim=EXIT)
    scene = Scene("recurrent", config, stored, warmth=warmth, speculative_token_tree=chain(9))
    check(scene, partial(redrafter_logits, scene, stored, rnn=True), chain(9))
