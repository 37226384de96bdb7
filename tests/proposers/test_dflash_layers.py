"""DFlash heads of `speculators` whose layers slide, see all or mix both: drafts equal its arithmetic, spelt out here.

As in its `create_anchor_block_mask_mod`: a sliding layer lets every token of a block attend to the `sliding_window`
tokens right before the block, wherever in the block it is, and to no others before it. The window hides nothing of the
block. In sliding layers tokens attend to the block causally, unless `sliding_window_non_causal`; in others, to all of
it.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from proposers.dflash import DFlashProposer
from protos.draft import DraftRow
from tests.support.models.drafter_world import (
    CONFIG,
    HEAD,
    HEADS,
    KV_HEADS,
    THETA,
    H,
    V,
    World,
    layer_shapes,
    random_tensors,
    world,
)
from tests.support.models.paged_worker import paged_worker
from tests.support.models.published import Weights, attend, linear, mlp, rms, rotate
from workers.attention.backend import NAME as PAGED
from workers.attention.native import NativeAttention
from workers.attention.torch import TorchAttention

MASK, D, BLOCK, WINDOW = V - 1, H // HEADS, 8, 5
COUNTS = (2, 5, 6, 7, 12, 50)
"""Known tokens of each text: contexts of 1 and 4 tokens are shorter than the window, 5 fits, others are longer."""
SLIDING, FULL = "sliding_attention", "full_attention"


def config_of(kinds: list[str], *, non_causal: bool) -> dict[str, Any]:
    layers = {
        **HEAD,
        "model_type": "qwen3",
        "num_hidden_layers": len(kinds),
        "head_dim": D,
        "rope_theta": THETA,
        "layer_types": kinds,
        "use_sliding_window": SLIDING in kinds,
        "sliding_window": WINDOW,
    }
    return {
        "speculators_model_type": "dflash",
        "transformer_layer_config": layers,
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [2, 5],
        "sliding_window_non_causal": non_causal,
    }


def weights_of(count: int) -> Weights:
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, 2 * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    for i in range(count):
        shapes |= layer_shapes(f"layers.{i}") | {f"layers.{i}.input_layernorm.weight": (H,)}
        shapes |= {f"layers.{i}.self_attn.{name}_norm.weight": (D,) for name in "qk"}
    return random_tensors(shapes)


def sees(kind: str, anchor: int, *, non_causal: bool) -> torch.Tensor:
    """Return which of the `anchor` tokens before a block and of its own each token attends to, key by key."""
    mask = torch.zeros(BLOCK, anchor + BLOCK, dtype=torch.bool)
    for q in range(BLOCK):
        for key in range(anchor):
            mask[q, key] = kind == FULL or key >= anchor - WINDOW
        for key in range(BLOCK):
            mask[q, anchor + key] = kind == FULL or non_causal or key <= q
    return mask


def logits_of(made: World, weights: Weights, slot: int, kinds: list[str], *, non_causal: bool) -> torch.Tensor:
    """Return the logits of the masks of a block after a text: `[BLOCK - 1, V]`."""
    context = rms(linear(weights, "fc", made.features[slot]), weights["hidden_norm.weight"])
    anchor = len(context)
    positions = list(range(anchor + BLOCK))
    h = made.embedding[[made.texts[slot][-1]] + [MASK] * (BLOCK - 1)]
    for i, kind in enumerate(kinds):
        prefix = f"layers.{i}.self_attn"
        x = rms(h, weights[f"layers.{i}.input_layernorm.weight"])
        both = torch.cat([context, x])
        q = rms(linear(weights, f"{prefix}.q_proj", x).view(-1, HEADS, D), weights[f"{prefix}.q_norm.weight"])
        k = rms(linear(weights, f"{prefix}.k_proj", both).view(-1, KV_HEADS, D), weights[f"{prefix}.k_norm.weight"])
        v = linear(weights, f"{prefix}.v_proj", both).view(-1, KV_HEADS, D)
        mask = sees(kind, anchor, non_causal=non_causal)
        attended = attend(rotate(q, positions[anchor:], THETA), rotate(k, positions, THETA), v, mask)
        h = h + linear(weights, f"{prefix}.o_proj", attended)
        h = h + mlp(weights, f"layers.{i}.mlp", rms(h, weights[f"layers.{i}.post_attention_layernorm.weight"]))
    return (rms(h, weights["norm.weight"]) @ made.head.T)[1:]


@pytest.mark.parametrize("make", [NativeAttention, TorchAttention])
@pytest.mark.parametrize("non_causal", [False, True])
@pytest.mark.parametrize(
    "kinds", [[SLIDING, SLIDING], [FULL, FULL], [SLIDING, FULL], [FULL, SLIDING, SLIDING]], ids="-".join
)
@pytest.mark.parametrize("k", [BLOCK - 1, 3])
def test_layers_slide_or_see_all_as_their_config_says(
    monkeypatch: pytest.MonkeyPatch, make: Any, kinds: list[str], k: int, *, non_causal: bool
) -> None:
    made, weights = world(2 * H, counts=COUNTS), weights_of(len(kinds))
    parts = replace(made.parts(weights, config_of(kinds, non_causal=non_causal)), attention=PAGED)
    module = DFlashProposer.build(CONFIG, parts)
    monkeypatch.setattr("workers.model.module_runner.attention_of", make)
    worker = paged_worker(module, made.texts, made.features, k=BLOCK, vocab_size=V)
    found: list[torch.Tensor] = []
    sample = worker.sample

    def sampling(rows: Any, logits_RV: torch.Tensor, step: int) -> torch.Tensor:
        found.append(logits_RV)
        return sample(rows, logits_RV, step)

    monkeypatch.setattr(worker, "sample", sampling)
    drafts = worker.propose(DFlashProposer(worker), [DraftRow(slot, k) for slot in range(len(COUNTS))])
    for slot, (draft, logits_KV) in enumerate(zip(drafts, torch.stack(found, 1), strict=True)):
        wanted_KV = logits_of(made, weights, slot, kinds, non_causal=non_causal)[:k]
        torch.testing.assert_close(logits_KV, wanted_KV, atol=2e-4, rtol=2e-4)
        assert list(draft.tokens) == wanted_KV.argmax(-1).tolist()
