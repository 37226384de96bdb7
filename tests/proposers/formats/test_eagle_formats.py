"""Checkpoints of EAGLE and EAGLE-3: names, vocabulary maps, auxiliary layers, rope."""

from pathlib import Path
from typing import Any

import pytest
import torch

from proposers.formats import dflash, eagle3
from protos.errors import ModelError
from tests.support.models import synthetic, synthetic_layers
from tests.support.models.format_readers import READERS, VOCAB, WIDTH, opened, same


def test_eagle_has_a_bias_unless_it_says_otherwise_and_no_first_norm(target: Path) -> None:
    made = synthetic_layers.eagle(target)
    assert "bias" not in made.config
    spec, tensors = opened(made, target)
    assert spec.fc_bias
    assert "fc.bias" in tensors
    assert "layers.0.input_layernorm.weight" not in tensors
    assert not opened(synthetic_layers.eagle(target, bias=False), target)[0].fc_bias
    with pytest.raises(ModelError, match=r"fc\.bias should be \[32\]"):
        opened(made.without("fc.bias"), target)
    assert same(opened(made.renamed("model.{}".format), target)[1], tensors)
    assert opened(synthetic_layers.eagle(target, embedding=True), target)[0].has_embedding


@pytest.mark.parametrize("bias", [False, True])
def test_eagle_as_vllm_converts_it_is_the_same(target: Path, bias: bool) -> None:
    plain, tensors = opened(synthetic_layers.eagle(target, bias=bias, embedding=True), target)
    made = synthetic_layers.eagle_vllm(target, bias=bias)
    spec, also = opened(made, target)
    assert same(also, tensors)
    assert {**vars(spec), "stored": 0} == {**vars(plain), "stored": 0}
    named = made.having(architectures=["EagleLlamaForCausalLM"])
    assert same(opened(named, target)[1], tensors)
    with pytest.raises(ModelError, match="truncated_vocab_size is 48 of 96"):
        opened(made.having(truncated_vocab_size=48), target)
    with pytest.raises(ModelError, match="add_para_norm"):
        opened(made.having(add_para_norm=True), target)


def test_string_booleans_are_read(target: Path) -> None:
    made = synthetic_layers.eagle(target, bias=False).having(bias="False")
    assert not opened(made, target)[0].fc_bias
    with pytest.raises(ModelError, match="bias in its config must be true or false, got 'maybe'"):
        opened(made.having(bias="maybe"), target)


def test_eagle3_offsets_become_ids(target: Path) -> None:
    made = synthetic_layers.eagle3(target, kept=48)
    spec, tensors = opened(made, target)
    assert (spec.draft_size, spec.vocab_size, spec.has_embedding) == (48, VOCAB, False)
    expected = [i for i in range(VOCAB) if made.tensors["t2d"][i]]
    assert tensors["target_ids"].tolist() == expected
    assert not {"d2t", "t2d"} & tensors.keys()
    everything = opened(synthetic_layers.eagle3(target, kept=None), target)
    assert "target_ids" not in everything[1]


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({"d2t": torch.full((48,), 60)}, r"d2t makes draft id 36 the target's 96, outside of its 96 ids"),
        ({"d2t": torch.full((48,), -1)}, "d2t makes draft id 0 the target's -1"),
        ({"d2t": -torch.arange(48)}, "d2t maps 48 draft ids to 1 different"),
        ({"d2t": torch.zeros(48)}, "d2t should hold whole numbers, but holds float32"),
        ({"t2d": torch.ones(96, dtype=torch.bool)}, "t2d marks 96 ids of the target, but the draft has 48"),
        ({"t2d": torch.arange(96) >= 48}, "which t2d does not mark"),
        ({"d2t": torch.zeros(47, dtype=torch.int64)}, r"d2t should be \[48\], but the checkpoint has \[47\]"),
    ],
)
def test_vocabulary_maps_are_validated(target: Path, broken: dict[str, torch.Tensor], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        opened(synthetic_layers.eagle3(target, kept=48).holding(broken), target)


def test_a_truncated_vocabulary_needs_its_map(target: Path) -> None:
    with pytest.raises(ModelError, match=r"d2t should be \[48\].*no such tensor"):
        opened(synthetic_layers.eagle3(target, kept=48).without("d2t", "t2d"), target)


@pytest.mark.parametrize(
    ("config", "inputs_of"),
    [
        ({}, (2, 3, 3)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, (1, 3, 6)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}}, (2, 3, 6)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}}, (2, 4, 6)),
        ({"eagle_config": {"use_aux_hidden_state": "false"}}, ()),
    ],
    ids=["none", "inputs", "nested outputs", "nested inputs", "the head's"],
)
def test_three_conventions_for_auxiliary_layers(
    target: Path, config: dict[str, Any], inputs_of: tuple[int, ...]
) -> None:
    assert eagle3.features_of(config, synthetic.config_of(target)) == inputs_of


def test_auxiliary_layers_the_target_does_not_have(target: Path) -> None:
    with pytest.raises(ModelError, match="input of layer 7, but the target has 6 layers"):
        eagle3.features_of({"eagle_aux_hidden_state_layer_ids": [1, 7]}, synthetic.config_of(target))


def test_the_layers_of_a_large_target() -> None:
    """Those of a 32-layer Llama, as the authors and TensorRT-LLM name them."""
    described = {"hidden_size": 8, "num_hidden_layers": 32, "vocab_size": 9}
    outputs = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}
    assert eagle3.features_of({}, described) == eagle3.features_of(outputs, described) == (2, 16, 29)


def test_nested_layers_that_do_not_begin_with_1_are_inputs() -> None:
    """As in `nvidia/gpt-oss-120b-Eagle3-v3`; 36 of 36 layers is the output of the last one, before the final norm."""
    described = {"hidden_size": 8, "num_hidden_layers": 36, "vocab_size": 9}
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [24, 30, 36], "use_aux_hidden_state": True}}
    assert eagle3.features_of(nested, described) == (24, 30, 36)


def test_eagle3_names_of_other_tools(target: Path) -> None:
    made = synthetic_layers.eagle3(target, fc_norm=True, layers=2)
    spec, tensors = opened(made, target)
    assert (spec.num_layers, spec.fc_norm) == (2, True)
    assert tensors["layers.0.self_attn.q_proj.weight"].shape[1] == 2 * WIDTH
    assert tensors["layers.1.self_attn.q_proj.weight"].shape[1] == WIDTH
    legacy = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
    old = made.renamed(lambda name: f"{legacy[int(name[8])]}.weight" if name.startswith("fc_norm.") else name)
    assert same(opened(old, target)[1], tensors)
    export = made.renamed(lambda name: f"model.{name.replace('midlayer.', 'layers.0.')}")
    assert same(opened(export, target)[1], tensors)
    with pytest.raises(ModelError, match=r"midlayer\.hidden_norm\.weight and layers\.0\.hidden_norm\.weight are both"):
        opened(made.holding({"layers.0.hidden_norm.weight": torch.ones(WIDTH)}), target)


def test_eagle3_of_another_width_needs_its_own_ends(target: Path) -> None:
    made = synthetic_layers.eagle3(target, hidden_size=16)
    spec, _ = opened(made, target)
    assert (spec.dims.hidden, spec.target_hidden, spec.features) == (16, WIDTH, 3 * WIDTH)
    with pytest.raises(ModelError, match=r"embed_tokens\.weight should be \[96, 16\]"):
        opened(made.without("embed_tokens.weight"), target)


def test_latent_attention_is_refused_by_name(target: Path) -> None:
    with pytest.raises(ModelError, match="latent attention"):
        opened(synthetic_layers.eagle3(target).having(kv_lora_rank=8), target)


def test_a_short_context_is_raised_to_the_targets(target: Path) -> None:
    long = {**synthetic.config_of(target), "max_position_embeddings": 131072}
    for made in (synthetic_layers.eagle(target), synthetic_layers.eagle3(target)):
        assert made.config["max_position_embeddings"] == 2048
        assert READERS[made.method].read(made.config, long, made.shapes).max_model_len == 131072
    assert opened(synthetic_layers.eagle(target), target)[0].max_model_len == 2048


@pytest.mark.parametrize(
    ("own", "rope"),
    [
        ({}, {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}),
        ({"rope_theta": 7.0}, {"rope_type": "default", "rope_theta": 7.0}),
        ({"rope_scaling": None}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}}, {"rope_type": "default", "rope_theta": 3.0}),
    ],
)
def test_rope_of_dflash_is_inherited_where_it_is_missing(
    target: Path, own: dict[str, Any], rope: dict[str, Any]
) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0}
    plain = {key: value for key, value in synthetic.config_of(target).items() if key != "rope_parameters"}
    for theirs in (
        {"rope_theta": 5e5, "rope_scaling": scaling},
        {"rope_parameters": {**scaling, "rope_theta": 5e5, "partial_rotary_factor": 0.5}},
        {
            "rope_parameters": {
                "full_attention": {**scaling, "rope_theta": 5e5},
                "sliding_attention": {"rope_theta": 1.0},
            }
        },
    ):
        made = synthetic_layers.dflash(target).having(**own)
        assert dflash.read(made.config, {**plain, **theirs}, made.shapes).rope == rope


@pytest.mark.parametrize(
    ("own", "rope"),
    [
        ({}, {"rope_type": "default", "rope_theta": 1e4}),
        ({"rope_scaling": None}, {"rope_type": "default", "rope_theta": 1e4}),
        ({"rope_scaling": None, "rope_theta": None}, {"rope_type": "default", "rope_theta": 1e4}),
        ({"rope_theta": 7.0}, {"rope_type": "default", "rope_theta": 7.0}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}}, {"rope_type": "default", "rope_theta": 3.0}),
    ],
)
def test_rope_of_eagle_is_the_authors_default_where_it_is_missing(
    target: Path, own: dict[str, Any], rope: dict[str, Any]
) -> None:
    """EAGLE's `cnets.py` and SpecForge's `llama3_eagle.py` read nothing of the target's rope: base 10000, unscaled."""
    scaling = {"rope_type": "llama3", "factor": 8.0}
    theirs = {**synthetic.config_of(target), "rope_parameters": {**scaling, "rope_theta": 5e5}}
    for made in (synthetic_layers.eagle(target), synthetic_layers.eagle3(target), synthetic_layers.p_eagle(target)):
        changed = made.having(**own)
        assert READERS[made.method].read(changed.config, theirs, made.shapes).rope == rope
