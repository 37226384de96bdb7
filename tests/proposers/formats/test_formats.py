"""Readers of checkpoint formats: canonical names and contents, every alias, and the traps of published checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from proposers.formats import dflash, eagle, eagle3, hydra, medusa, mlp_speculator, mtp, p_eagle, pard, recurrent
from protos.errors import ModelError
from tests.support.models import synthetic, synthetic_layers, tiny_models
from tests.support.models.synthetic import Synthetic

READERS: dict[str, Any] = {
    "medusa": medusa,
    "mlp_speculator": mlp_speculator,
    "hydra": hydra,
    "recurrent": recurrent,
    "eagle": eagle,
    "eagle3": eagle3,
    "p_eagle": p_eagle,
    "dflash": dflash,
}
WIDTH, VOCAB = 32, 96


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=6)


def opened(made: Synthetic, target: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """The spec and the canonical tensors of *made*."""
    reader = READERS[made.method]
    spec = reader.read(made.config, synthetic.config_of(target), made.shapes)
    return spec, reader.load(spec, made.tensors)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left)


def test_medusa_has_the_same_names_from_every_tool(target: Path) -> None:
    made = synthetic.medusa(target, heads=2, blocks=2)
    spec, tensors = opened(made, target)
    assert (spec.num_heads, spec.num_blocks, spec.output, spec.has_bias) == (2, 2, "own", True)
    assert tensors["blocks.1.0.bias"].equal(made.tensors["1.0.linear.bias"])
    assert tensors["heads.1.weight"].equal(made.tensors["1.2.weight"])
    beside = {"model.norm.weight": torch.ones(WIDTH), "lm_head.weight": torch.ones(VOCAB, WIDTH)}
    whole = made.renamed("medusa_head.{}".format).holding(beside)
    also = {name: tensor for name, tensor in opened(whole, target)[1].items() if name != "head.weight"}
    assert same(also, tensors)
    vllm = synthetic.medusa_vllm(target, heads=2, blocks=2)
    ours = opened(vllm, target)[1]
    assert ours["blocks.1.1.weight"].equal(vllm.tensors["medusa_heads.blocks.1.layers.1.weight"])
    assert ours["heads.0.weight"].equal(vllm.tensors["medusa_heads.lm_heads.0.weight"])
    bare = vllm.renamed(lambda name: name.removeprefix("medusa_heads."))
    assert same(opened(bare, target)[1], ours)


def test_medusa_without_outputs_goes_on_to_the_targets_head(target: Path) -> None:
    spec, tensors = opened(synthetic.medusa(target, own_heads=False), target)
    assert (spec.output, spec.num_heads) == ("target", 4)
    assert not any("head" in name for name in tensors)
    shared = opened(synthetic.medusa_vllm(target, shared=True), target)
    assert (shared[0].output, "head.weight" in shared[1]) == ("shared", True)


def test_medusa_truncated_vocabulary(target: Path) -> None:
    made = synthetic.medusa_vllm(target, kept=40)
    spec, tensors = opened(made, target)
    assert (spec.head_size, spec.vocab_size) == (40, VOCAB)
    assert tensors["target_ids"].equal(made.tensors["medusa_heads.token_map"])
    twice = made.holding({"medusa_heads.token_map": torch.zeros(40, dtype=torch.int64)})
    with pytest.raises(ModelError, match="token_map maps 40 draft ids to 1"):
        opened(twice, target)


def test_medusa_heads_that_are_there_count_whatever_the_config_says(target: Path) -> None:
    """Published configs say 2 where there are 5."""
    assert opened(synthetic.medusa(target, heads=5).having(medusa_num_heads=2), target)[0].num_heads == 5
    with pytest.raises(ModelError, match=r"blocks\.5\.0\.weight should be \[32, 32\].*no such tensor"):
        opened(synthetic.medusa(target, heads=5).having(medusa_num_heads=6), target)


def test_tied_mlp_speculator_shares_all_but_the_first_projection(target: Path) -> None:
    made = synthetic.mlp_speculator(target, heads=4, tied=True, scale=True)
    assert sum("proj" in name for name in made.tensors) == 2
    spec, tensors = opened(made, target)
    assert (spec.num_heads, spec.inner, spec.scale_input) == (4, 24, True)
    assert tensors["proj.3.weight"] is tensors["proj.1.weight"]
    assert tensors["head.3.weight"] is tensors["head.0.weight"]
    repeated = made.holding({"speculator.emb.2.weight": made.tensors["speculator.emb.0.weight"].clone()})
    assert same(opened(repeated, target)[1], tensors)
    with pytest.raises(ModelError, match=r"speculator\.emb\.2\.weight differs from speculator\.emb\.0\.weight"):
        opened(made.holding({"speculator.emb.2.weight": torch.zeros(VOCAB, 24)}), target)


def test_mlp_speculator_without_inner_width_has_the_outer_one(target: Path) -> None:
    made = synthetic.mlp_speculator(target, inner=WIDTH).having(inner_dim=0)
    assert opened(made, target)[0].inner == WIDTH


@pytest.mark.parametrize("prefix", [False, True])
def test_hydra_numbers_are_the_same_with_and_without_dropouts(target: Path, prefix: bool) -> None:
    made = synthetic.hydra(target, blocks=3, prefix=prefix)
    spec, tensors = opened(made, target)
    at = 3 if prefix else 1
    assert tensors["blocks.2.1.weight"].equal(made.tensors[f"hydra_mlp.2.{at}.linear.weight"])
    assert tensors["blocks.2.0.res.bias"].equal(made.tensors[f"hydra_mlp.2.{1 if prefix else 0}.res_connection.bias"])
    assert tensors["blocks.2.0.weight"].shape == (WIDTH, 4 * WIDTH)
    assert (spec.prefix is not None, "prefix.norm.weight" in tensors) == (prefix, prefix)
    assert "prefix.embed_tokens.weight" not in tensors
    once = made.without(*(name for name in made.tensors if name.split(".")[2] == ("5" if prefix else "2")))
    assert same(opened(once, target)[1], tensors)


def test_hydra_blocks_that_do_not_see_tokens(target: Path) -> None:
    spec, tensors = opened(synthetic.hydra(target, grounded=False), target)
    assert not spec.grounded
    assert tensors["blocks.2.0.weight"].shape == (WIDTH, WIDTH)


def test_recurrent_drafters_with_and_without_their_parts(target: Path) -> None:
    spec, tensors = opened(synthetic.recurrent(target, blocks=2), target)
    assert (spec.has_input, spec.exit, spec.is_rnn) == (False, 2 * WIDTH, True)
    assert {"blocks.1.bias", "head.weight", "rnn_u.bias"} <= tensors.keys()
    spec, tensors = opened(synthetic.recurrent(target, exit_dim=24, rnn=False).renamed("drafter.{}".format), target)
    assert tensors["input_proj.weight"].shape == (24, 2 * WIDTH)
    assert not any(name.startswith("rnn") for name in tensors)


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
        ({"t2d": torch.arange(96) >= 48}, "which t2d says the draft does not know"),
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
        ({"eagle_config": {"use_aux_hidden_state": "false"}}, ()),
    ],
    ids=["none", "inputs", "outputs", "the head's"],
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
def test_rope_is_inherited_where_it_is_missing(target: Path, own: dict[str, Any], rope: dict[str, Any]) -> None:
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
        made = synthetic_layers.eagle(target).having(**own)
        assert eagle.read(made.config, {**plain, **theirs}, made.shapes).rope == rope


def test_p_eagle_is_eagle3_and_a_mask(target: Path) -> None:
    made = synthetic_layers.p_eagle(target, mask=7)
    spec, tensors = opened(made, target)
    assert spec.mask_token_id == 7
    assert tensors["mask_hidden"].equal(made.tensors["mask_hidden"].flatten())
    as_eagle3 = eagle3.read(made.config, synthetic.config_of(target), made.shapes)
    assert "mask_hidden" not in eagle3.load(as_eagle3, made.tensors)
    flat = made.holding({"mask_hidden": made.tensors["mask_hidden"].reshape(1, -1)})
    assert same(opened(flat, target)[1], tensors)
    with pytest.raises(ModelError, match=r"mask_hidden should be \[1, 1, 96\], but the checkpoint has \[1, 1, 95\]"):
        opened(made.holding({"mask_hidden": torch.zeros(1, 1, 95)}), target)
    with pytest.raises(ModelError, match="mask token is 96, but there are 96 embeddings"):
        opened(made.having(ptd_token_id=96), target)
    with pytest.raises(ModelError, match="names no mask token"):
        opened(made.having(ptd_token_id=None), target)


def test_dflash_reads_behind_layers(target: Path) -> None:
    made = synthetic_layers.dflash(target, target_layers=(0, 5))
    spec, tensors = opened(made, target)
    assert (spec.inputs_of, spec.block_size, spec.mask_token_id, spec.causal) == ((1, 6), 4, 5, False)
    assert spec.dims.qk_norm
    assert "layers.1.self_attn.q_norm.weight" in tensors
    sliding = made.having(layer_types=["sliding_attention", "full_attention"], sliding_window=9)
    assert opened(sliding, target)[0].windows == (9, None)
    with pytest.raises(ModelError, match="attention_sink_bias"):
        opened(made.having(dflash_config={**made.config["dflash_config"], "attention_sink_bias": True}), target)


@pytest.mark.parametrize("name", ["eagle3", "p_eagle", "dflash"])
def test_the_speculators_format_says_the_same(target: Path, name: str) -> None:
    write: Any = getattr(synthetic_layers, name)
    made = write(target)
    spec, tensors = opened(made, target)
    other, also = opened(synthetic_layers.speculators(made, target), target)
    assert same(also, tensors)
    assert {**vars(spec), "stored": 0} == {**vars(other), "stored": 0}


@pytest.mark.parametrize("kind", ["dflash2", "dspark", "eagle9"])
def test_kinds_of_speculators_that_are_not_available(target: Path, kind: str) -> None:
    from proposers.formats import speculators

    with pytest.raises(ModelError, match=f"'{kind}' is not supported; supported are dflash, eagle3, mtp, peagle"):
        speculators.method_of({"speculators_model_type": kind})


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "qwen2"])
def test_mtp_heads_are_found_in_the_targets_checkpoint(tmp_path: Path, family: str) -> None:
    folder = synthetic_layers.with_mtp(family, tmp_path, heads=2)
    config, tensors = synthetic.config_of(folder), synthetic.stored(folder)
    spec = mtp.read(config, config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    found = mtp.load(spec, tensors)
    assert (spec.num_layers, spec.first_layer) == (2, 3)
    assert (spec.state_first, spec.one_step) == (family == "qwen2",) * 2
    assert spec.recycles_normed == (family == "deepseek_v3")
    assert spec.own_embedding == (family != "qwen2")
    prefix = "model.mtp_layers.1." if family == "qwen2" else "model.layers.4."
    assert found["layers.1.block.self_attn.o_proj.weight"].equal(tensors[prefix + "self_attn.o_proj.weight"])
    names = {"qwen2": "input_proj", "deepseek_v3": "eh_proj", "glm4_moe": "eh_proj"}
    assert found["layers.1.proj.weight"].equal(tensors[f"{prefix}{names[family]}.weight"])
    theirs = AutoModelForCausalLM.from_pretrained(folder).model.layers[-1]
    theirs.load_state_dict({name: found[f"layers.0.block.{name}"] for name in spec.block})
    if family != "qwen2":
        gate = torch.cat([tensors[f"{prefix}mlp.experts.2.{part}_proj.weight"] for part in ("gate", "up")])
        assert found["layers.1.block.mlp.experts.gate_up_proj"][2].equal(gate)
    needed = [name for name in tensors if name.startswith(mtp.prefixes(config))]
    assert len(needed) == len(spec.stored)
    with pytest.raises(ModelError, match="no such tensor"):
        mtp.read(config, config, {name: tuple(tensors[name].shape) for name in needed[1:]})


def test_mtp_heads_of_qwen3_next_share_what_leads_in_and_out() -> None:
    config = {
        "model_type": "qwen3_next",
        **tiny_models.COMMON,
        **tiny_models.MOE,
        "head_dim": 16,
        "shared_expert_intermediate_size": 16,
        "decoder_sparse_step": 1,
    }
    from proposers.formats.causal import last_layer_shapes

    block = last_layer_shapes("mtp", config)
    assert "self_attn.q_norm.weight" in block
    shapes = {
        "mtp.fc.weight": (WIDTH, 2 * WIDTH),
        "mtp.norm.weight": (WIDTH,),
        "mtp.pre_fc_norm_embedding.weight": (WIDTH,),
        "mtp.pre_fc_norm_hidden.weight": (WIDTH,),
    }
    for name, shape in block.items():
        parts = mtp._stored_as(f"mtp.layers.0.{name}", shape, {})
        shapes |= parts
    spec = mtp.read(config, config, shapes)
    assert (spec.num_layers, spec.one_plus, spec.state_first, spec.recycles_normed) == (1, True, False, True)
    found = mtp.load(spec, {name: torch.zeros(shape) for name, shape in shapes.items()})
    assert {name.removeprefix("layers.0.block.") for name in found if ".block." in name} == block.keys()
    assert {"layers.0.norm.weight", "layers.0.proj.weight", "layers.0.embed_norm.weight"} <= found.keys()


def test_a_target_without_heads(target: Path) -> None:
    with pytest.raises(ModelError, match="it holds no heads: no tensor begins with"):
        mtp.read(synthetic.config_of(target), synthetic.config_of(target), {"model.norm.weight": (WIDTH,)})


def test_pard_is_a_causal_model_and_a_mask(target: Path, tmp_path: Path) -> None:
    folder = synthetic_layers.pard(target, tmp_path, mask=9)
    config, tensors = synthetic.config_of(folder), synthetic.stored(folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    spec = pard.read(config, synthetic.config_of(target), shapes)
    assert (spec.mask_token_id, spec.vocab_size) == (9, VOCAB)
    assert same(pard.load(spec, tensors), tensors)
    with pytest.raises(ModelError, match=r"model\.norm\.weight should be \[32\]"):
        pard.read(config, config, {**shapes, "model.norm.weight": (31,)})


def test_a_tied_pard_model_may_leave_its_head_out(tmp_path: Path) -> None:
    base = tiny_models.build("llama", tmp_path / "base", tie_word_embeddings=True)
    folder = synthetic_layers.pard(base, tmp_path / "pard")
    config, tensors = synthetic.config_of(folder), synthetic.stored(folder)
    assert "lm_head.weight" not in tensors
    spec = pard.read(config, config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    assert set(spec.stored) == set(tensors)
