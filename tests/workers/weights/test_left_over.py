"""Tensors of decoder layers that a family does not have are refused, however the checkpoint is read."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from protos.config.engine import ModelConfig
from protos.errors import ModelError
from tests.support.models import quantized as formats
from tests.support.models.tiny_models import build
from workers.model.loader import load

pytestmark = pytest.mark.usefixtures("one_thread")

BIAS = "model.layers.1.mlp.down_proj.bias"
BESIDE = (
    "model.layers.9.enorm.weight",
    "mtp.fc.weight",
    "model.layers.0.self_attn.rotary_emb.inv_freq",
    "model.layers.0.self_attn.rotary_emb.cos_cached",
    "model.layers.0.mlp.down_proj.activation_scale",
    "model.layers.0.self_attn.kv_scale",
)
REFUSED = f"has 1 tensors in its decoder layers that model_type 'llama' does not have, the first is {BIAS}"
READERS = pytest.mark.parametrize("quantization", [None, "int8"], ids=["transformers", "own"])


def _add(folder: Path, **tensors: torch.Tensor) -> str:
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, {"format": "pt"})
    return str(folder)


@READERS
def test_a_bias_that_nothing_reads(quantization: str | None, tmp_path: Path) -> None:
    name = _add(build("llama", tmp_path), **{BIAS: torch.zeros(64)})
    with pytest.raises(ModelError, match=REFUSED):
        load(ModelConfig(name, quantization=quantization))


@READERS
def test_what_is_beside_the_layers(quantization: str | None, tmp_path: Path) -> None:
    name = _add(build("llama", tmp_path), **{each: torch.ones(4) for each in BESIDE})
    assert load(ModelConfig(name, quantization=quantization)).model_type == "llama"


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_bias_of_gptq(value: float, tmp_path: Path) -> None:
    described = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
    source = build("llama", tmp_path / "source", hidden_size=64, intermediate_size=96)
    formats.quantized(source, tmp_path / "quantised", formats.gptq(4, 32), described, ("_proj.weight",))
    name = _add(tmp_path / "quantised", **{BIAS: torch.full((64,), value)})
    if value:
        with pytest.raises(ModelError, match=REFUSED):
            load(ModelConfig(name))
    else:
        assert "gptq" in " ".join(load(ModelConfig(name)).notes)


@pytest.mark.parametrize("parts", [("qweight", "scales"), ("weight", "weight_scale")])
def test_quantised_weights_that_the_config_does_not_describe(parts: tuple[str, str], tmp_path: Path) -> None:
    """As old checkpoints of GPTQ and ModelOpt, which describe them in a file of their own."""
    path = build("llama", tmp_path) / "model.safetensors"
    tensors = load_file(path)
    weight = tensors.pop("model.layers.1.mlp.down_proj.weight")
    tensors |= {f"model.layers.1.mlp.down_proj.{part}": weight.clone() for part in parts}
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelError, match="it has quantised weights, but no quantization_config"):
        load(ModelConfig(str(tmp_path)))
