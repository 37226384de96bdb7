"""Where others have read these checkpoints wrongly. Each test fails for the wrong reading."""

from pathlib import Path
from typing import Any

import pytest
import torch

from proposers.eagle import EagleProposer
from proposers.eagle3 import Eagle3Proposer
from proposers.mtp import MtpProposer
from protos.draft import DraftRow
from protos.errors import ModelError
from tests.proposers.test_attention_drafters import VARIANTS, H, Variant, eagle_tensors
from tests.proposers.test_mtp import Written
from tests.support.models.drafter_world import CONFIG, HEAD, K, V, World, random_tensors, world
from tests.support.models.published import Weights

ROWS = [DraftRow(0, K), DraftRow(1, K), DraftRow(2, K)]


def eagle_drafts(made: World, weights: Weights, **config: Any) -> list[tuple[int, ...]]:
    module = EagleProposer.build(CONFIG, made.parts(weights, {**HEAD, **config}))
    return [draft.tokens for draft in EagleProposer(made.runner(module), 1, K).propose(ROWS)]


def eagle3_drafts(made: World, weights: Weights, variant: Variant) -> list[tuple[int, ...]]:
    module = Eagle3Proposer.build(CONFIG, made.parts(weights, variant.full_config()))
    return [draft.tokens for draft in Eagle3Proposer(made.runner(module), 1, K).propose(ROWS)]


def test_eagle_has_a_bias_where_its_config_is_silent() -> None:
    made, with_bias = world(H), eagle_tensors(bias=True)
    without = {name: weight for name, weight in with_bias.items() if name != "fc.bias"}
    with pytest.raises(ModelError, match=r"fc\.bias"):
        eagle_drafts(made, without)
    with pytest.raises(ModelError, match=r"fc\.bias"):
        eagle_drafts(made, with_bias, bias=False)
    assert eagle_drafts(made, with_bias) != eagle_drafts(made, without, bias=False)


def test_eagle_has_no_norm_in_front_of_its_first_layer() -> None:
    made, weights = world(H), eagle_tensors(bias=True)
    with pytest.raises(ModelError, match=r"layers\.0\.input_layernorm"):
        eagle_drafts(made, weights | {"layers.0.input_layernorm.weight": torch.ones(H)})


def test_eagle_reads_tokens_one_ahead_of_states() -> None:
    """So the first token is never read, and the last one is."""
    made, weights = world(H), eagle_tensors(bias=True)
    drafts = eagle_drafts(made, weights)
    for text in made.texts:
        text[0] = (text[0] + 1) % V
    assert eagle_drafts(made, weights) == drafts
    for text in made.texts:
        text[-1] = (text[-1] + 1) % V
    assert eagle_drafts(made, weights) != drafts


def test_eagle_3_maps_ids_by_offsets() -> None:
    made, variant = world(3 * H), VARIANTS["as published"]
    weights = variant.tensors()
    known = {i + int(offset) for i, offset in enumerate(weights["d2t"])}
    drafted = {token for tokens in eagle3_drafts(made, weights, variant) for token in tokens}
    assert drafted <= known
    assert not drafted <= set(weights["d2t"].tolist())
    with pytest.raises(ModelError, match="d2t"):  # ids where offsets should be lead out of the vocabulary
        eagle3_drafts(made, weights | {"d2t": weights["d2t"] + torch.arange(len(known))}, variant)


def test_eagle_3_reads_the_embedding_before_the_state() -> None:
    made, variant = world(3 * H), VARIANTS["as published"]
    weights = variant.tensors()
    blind = dict(weights)
    for name in "qkv":  # the half that reads embeddings; they are then unused
        blind[f"midlayer.self_attn.{name}_proj.weight"] = weights[f"midlayer.self_attn.{name}_proj.weight"].clone()
        blind[f"midlayer.self_attn.{name}_proj.weight"][:, :H] = 0.0
    drafts = eagle3_drafts(made, blind, variant)
    for text in made.texts:
        text[-1] = (text[-1] + 1) % V
    assert eagle3_drafts(made, blind, variant) == drafts
    assert eagle3_drafts(made, weights, variant) != drafts


def test_eagle_3_feeds_states_back_before_the_norm() -> None:
    made, variant = world(3 * H), VARIANTS["as published"]
    weights = variant.tensors()
    before, behind = (eagle3_drafts(made, weights, kind) for kind in (variant, VARIANTS["recycled behind the norm"]))
    assert before != behind
    assert [tokens[0] for tokens in before] == [tokens[0] for tokens in behind]


def test_heads_that_say_2048_go_as_far_as_the_target() -> None:
    variant = VARIANTS["as published"]
    eagle = EagleProposer.build(CONFIG, world(H).parts(eagle_tensors(bias=True), HEAD))
    eagle3 = Eagle3Proposer.build(CONFIG, world(3 * H).parts(variant.tensors(), variant.full_config()))
    assert HEAD["max_position_embeddings"] == 2048
    assert eagle.max_model_len == eagle3.max_model_len == 8192


@pytest.mark.parametrize(
    ("config", "inputs_of"),
    [
        ({}, (2, 16, 29)),
        ({"eagle_aux_hidden_state_layer_ids": [3, 17, 30]}, (3, 17, 30)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, (2, 16, 29)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [20, 26, 32]}}, (20, 26, 32)),
    ],
)
def test_layers_are_named_in_several_ways(config: dict[str, Any], inputs_of: tuple[int, ...]) -> None:
    target = {"hidden_size": H, "num_hidden_layers": 32, "vocab_size": V}
    assert Eagle3Proposer.features_of(CONFIG, {**HEAD, **config}, target).inputs_of == inputs_of


def test_mimo_reads_the_state_before_the_embedding(tmp_path: Path) -> None:
    made = Written(tmp_path, "qwen2")
    hidden = made.embedding.shape[1]
    made.tensors["model.mtp_layers.0.input_proj.weight"][:, hidden:] = 0.0
    drafts = [draft.tokens for draft in MtpProposer.create(CONFIG, made.runner()).propose(ROWS)]
    made.embedding = random_tensors({"other": tuple(made.embedding.shape)}, 9)["other"]
    assert [draft.tokens for draft in MtpProposer.create(CONFIG, made.runner()).propose(ROWS)] == drafts
    made.features = [-features for features in made.features]
    assert [draft.tokens for draft in MtpProposer.create(CONFIG, made.runner()).propose(ROWS)] != drafts
