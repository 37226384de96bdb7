"""MTP heads in the target's checkpoint."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from proposers.formats import mtp
from protos.errors import ModelError
from tests.support.models import synthetic, synthetic_layers, tiny_models
from tests.support.models.format_readers import WIDTH


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "qwen2"])
def test_mtp_heads_are_found_in_the_targets_checkpoint(tmp_path: Path, family: str) -> None:
    folder = synthetic_layers.with_mtp(family, tmp_path, heads=2)
    config, tensors = synthetic.config_of(folder), synthetic.stored(folder)
    spec = mtp.read(config, config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    found = mtp.load(spec, tensors)
    assert spec.num_layers == 2
    assert (spec.state_first, spec.one_step) == (family == "qwen2",) * 2
    assert spec.feeds_back_normed == (family != "qwen2")
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
    assert (spec.num_layers, spec.one_plus, spec.state_first, spec.feeds_back_normed) == (1, True, False, True)
    found = mtp.load(spec, {name: torch.zeros(shape) for name, shape in shapes.items()})
    assert {name.removeprefix("layers.0.block.") for name in found if ".block." in name} == block.keys()
    assert {"layers.0.norm.weight", "layers.0.proj.weight", "layers.0.embed_norm.weight"} <= found.keys()


def test_a_target_without_heads(target: Path) -> None:
    with pytest.raises(ModelError, match="it holds no heads: no tensor begins with"):
        mtp.read(synthetic.config_of(target), synthetic.config_of(target), {"model.norm.weight": (WIDTH,)})
