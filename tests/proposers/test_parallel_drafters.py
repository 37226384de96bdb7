"""PARD, P-EAGLE and DFlash: what they draft in one forward equals the published mathematics."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from proposers.dflash import DFlashProposer
from proposers.p_eagle import ParallelEagleProposer
from proposers.pard import PardProposer
from protos.draft import DraftRow
from tests.support.models.drafter_world import (
    CONFIG,
    HEAD,
    HEADS,
    KV_HEADS,
    ROWS,
    SILENT_THETA,
    THETA,
    H,
    K,
    V,
    World,
    layer_shapes,
    random_tensors,
    world,
)
from tests.support.models.published import Weights, attend, attention, causal, linear, mlp, rms, rotate

MASK = V - 1
D = H // HEADS


def assert_drafts(proposer: Any, made: World, logits_KV: Any, rows: list[DraftRow] = ROWS) -> None:
    """`logits_KV(slot, k)` are the logits of k draft positions."""
    for row, draft in zip(rows, proposer.propose(rows), strict=True):
        log_q = logits_KV(row.slot, row.k).log_softmax(-1) + made.noise[row.slot, : row.k]
        assert list(draft.tokens) == log_q.argmax(-1).tolist()
        assert draft.is_chain


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_pard_drafts_at_masks_after_the_text(family: str, tied: bool) -> None:
    made = world(H)
    config = {
        **HEAD,
        "model_type": family,
        "num_hidden_layers": 2,
        "head_dim": D,
        "rope_theta": THETA,
        "tie_word_embeddings": tied,
    }
    plain = AutoConfig.for_model(**{**config, "model_type": family})
    model = AutoModelForCausalLM.from_config(plain, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 0.4, generator=torch.Generator().manual_seed(5)) if weight.ndim > 1 else None
    stored = {name: weight for name, weight in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    module = PardProposer.build(CONFIG, made.parts(stored, {**config, "pard_token": MASK}))
    runner = made.runner(module)
    for text in runner.texts:
        text.features = None

    def logits_KV(slot: int, k: int) -> torch.Tensor:
        tokens = made.texts[slot] + [MASK] * (k - 1)
        with torch.inference_mode():
            return model(torch.tensor([tokens])).logits[0, -k:]

    assert_drafts(PardProposer(runner), made, logits_KV)
    assert_drafts(PardProposer(runner), made, logits_KV, [DraftRow(1, 1), DraftRow(0, 1)])


def test_p_eagle_feeds_a_learned_state_beside_masks() -> None:
    made = world(3 * H)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, 3 * H),
        "norm.weight": (H,),
        "lm_head.weight": (V, H),
        "mask_hidden": (1, 1, 3 * H),
        "layers.0.hidden_norm.weight": (H,),
        "layers.0.input_layernorm.weight": (H,),
        **layer_shapes("layers.0", 2 * H),
    }
    weights = random_tensors(shapes)
    config = {**HEAD, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": V, "ptd_token_id": MASK}
    module = ParallelEagleProposer.build(CONFIG, made.parts(weights, config))

    def logits_KV(slot: int, k: int) -> torch.Tensor:
        tokens = made.texts[slot][1:] + [MASK] * (k - 1)
        masks = weights["mask_hidden"].reshape(1, -1).repeat(k - 1, 1)
        states, count = linear(weights, "fc", torch.cat([made.features[slot], masks])), len(tokens)
        e = rms(made.embedding[tokens], weights["layers.0.input_layernorm.weight"])
        g = rms(states, weights["layers.0.hidden_norm.weight"])
        h = states + attention(
            weights,
            "layers.0.self_attn",
            torch.cat([e, g], -1),
            list(range(count)),
            causal(count),
            head_dim=D,
            theta=SILENT_THETA,
        )
        h = h + mlp(weights, "layers.0.mlp", rms(h, weights["layers.0.post_attention_layernorm.weight"]))
        return linear(weights, "lm_head", rms(h, weights["norm.weight"]))[-k:]

    assert_drafts(ParallelEagleProposer(made.runner(module)), made, logits_KV)
    assert_drafts(ParallelEagleProposer(made.runner(module)), made, logits_KV, [DraftRow(2, 1)])


def dflash_tensors(layers: int) -> Weights:
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, 2 * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    for i in range(layers):
        prefix = f"layers.{i}"
        shapes |= layer_shapes(prefix) | {f"{prefix}.input_layernorm.weight": (H,)}
        shapes |= {f"{prefix}.self_attn.{name}_norm.weight": (D,) for name in "qk"}
    return random_tensors(shapes)


def dflash_block(
    made: World,
    weights: Weights,
    slot: int,
    block: list[int],
    *,
    sees_block: torch.Tensor,
) -> torch.Tensor:
    """Return states after the last norm at each position of the block: keys and values of context come first."""
    context = rms(linear(weights, "fc", made.features[slot]), weights["hidden_norm.weight"])
    known = len(context)
    positions = list(range(known + len(block)))
    sees = torch.cat([torch.ones(len(block), known, dtype=torch.bool), sees_block], 1)
    h = made.embedding[block]
    for i in range(2):
        prefix = f"layers.{i}.self_attn"
        x = rms(h, weights[f"layers.{i}.input_layernorm.weight"])
        both = torch.cat([context, x])
        q = rms(linear(weights, f"{prefix}.q_proj", x).view(-1, HEADS, D), weights[f"{prefix}.q_norm.weight"])
        k = rms(linear(weights, f"{prefix}.k_proj", both).view(-1, KV_HEADS, D), weights[f"{prefix}.k_norm.weight"])
        v = linear(weights, f"{prefix}.v_proj", both).view(-1, KV_HEADS, D)
        attended = attend(rotate(q, positions[known:], THETA), rotate(k, positions, THETA), v, sees)
        h = h + linear(weights, f"{prefix}.o_proj", attended)
        h = h + mlp(weights, f"layers.{i}.mlp", rms(h, weights[f"layers.{i}.post_attention_layernorm.weight"]))
    return rms(h, weights["norm.weight"])


@pytest.mark.parametrize("anchor", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_dflash_denoises_a_block_over_the_targets_states(anchor: bool, is_causal: bool) -> None:
    made, weights = world(2 * H), dflash_tensors(2)
    config = {
        **HEAD,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "head_dim": D,
        "block_size": 16,
        "dflash_config": {
            "mask_token_id": MASK,
            "target_layer_ids": [1, 4],
            "sample_from_anchor": anchor,
            "causal": is_causal,
        },
    }
    module = DFlashProposer.build(CONFIG, made.parts(weights, config))

    def logits_KV(slot: int, k: int) -> torch.Tensor:
        block = [made.texts[slot][-1]] + [MASK] * 15  # whatever k is
        sees_block = causal(16) if is_causal else torch.ones(16, 16, dtype=torch.bool)
        first = 0 if anchor else 1
        return dflash_block(made, weights, slot, block, sees_block=sees_block)[first : first + k] @ made.head.T

    assert_drafts(DFlashProposer(made.runner(module)), made, logits_KV)
    assert_drafts(DFlashProposer(made.runner(module)), made, logits_KV, [DraftRow(2, 1), DraftRow(1, 1)])


def test_dflash_drafts_no_more_than_its_block_holds() -> None:
    made, weights = world(2 * H), dflash_tensors(2)
    config = {
        **HEAD,
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "head_dim": D,
        "block_size": 4,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 4]},
    }
    proposer = DFlashProposer(made.runner(DFlashProposer.build(CONFIG, made.parts(weights, config))))
    assert [len(draft) for draft in proposer.propose([DraftRow(0, 2), DraftRow(1, K)])] == [2, 3]


def test_a_dflash_row_with_little_room_is_fed_a_shorter_block() -> None:
    made, weights = world(2 * H), dflash_tensors(2)
    config = {
        **HEAD,
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "head_dim": D,
        "block_size": 8,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 4]},
    }
    rows = [DraftRow(0, 3, room=20), DraftRow(1, 2, room=4)]

    def logits_KV(slot: int, k: int) -> torch.Tensor:
        size = {0: 8, 1: 5}[slot]
        block = [made.texts[slot][-1]] + [MASK] * (size - 1)
        sees_block = torch.ones(size, size, dtype=torch.bool)
        return dflash_block(made, weights, slot, block, sees_block=sees_block)[1 : 1 + k] @ made.head.T

    module = DFlashProposer.build(CONFIG, made.parts(weights, config))
    assert_drafts(DFlashProposer(made.runner(module)), made, logits_KV, rows)


@pytest.mark.parametrize(
    ("draft", "outputs"),
    [
        ({"num_hidden_layers": 1, "num_target_layers": 36}, (18,)),
        ({"num_hidden_layers": 5, "num_target_layers": 36}, (1, 9, 17, 25, 33)),
        ({"num_hidden_layers": 5, "num_target_layers": 28}, (1, 7, 13, 19, 25)),
        ({"num_hidden_layers": 8, "num_target_layers": 48}, (1, 7, 14, 20, 26, 32, 39, 45)),
        ({"num_hidden_layers": 3}, (1, 23, 45)),
    ],
)
def test_dflash_reads_evenly_spaced_layers_if_its_config_names_none(
    draft: dict[str, int], outputs: tuple[int, ...]
) -> None:
    """As `build_target_layer_ids` of z-lab's code: n // 2 for one layer, else from 1 to n - 3, rounded."""
    target = {"hidden_size": H, "num_hidden_layers": 48, "vocab_size": V}
    features = DFlashProposer.features_of(CONFIG, {**draft, "dflash_config": {"mask_token_id": 1}}, target)
    assert features.inputs_of == tuple(layer + 1 for layer in outputs)


def test_features_are_the_inputs_of_layers_in_the_order_of_the_checkpoint() -> None:
    target = {"hidden_size": H, "num_hidden_layers": 6, "vocab_size": V}
    dflash = {"dflash_config": {"target_layer_ids": [4, 1]}}
    assert DFlashProposer.features_of(CONFIG, dflash, target).inputs_of == (5, 2)
    assert PardProposer.features_of(CONFIG, {}, target).needs == "none"
    assert ParallelEagleProposer.features_of(CONFIG, {}, target).inputs_of == (2, 3, 3)
