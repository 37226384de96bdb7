"""Ways in which published checkpoints differ from what `save_pretrained` writes; tokens are those of `transformers`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file

from protos.config.engine import ModelConfig
from protos.errors import ModelError
from slipstream import SamplingParams
from tests.support.distributed.tensor_parallel import VOCAB, check
from tests.support.identity import Reference, assert_identical, generate
from tests.support.models.tiny_models import build, edit
from workers.model.loader import load
from workers.model.self_check import self_check
from workers.weights.described import read_language_config
from workers.weights.keeping import AsValues
from workers.weights.load import load_whole
from workers.weights.quantized.compressed import read_config

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[5, 9, 17, 5, 9, 17, 5, 9], [*range(3, 43)]]
GROUP = 32


def assert_tokens(folder: Path, meant: Path | None = None, **options: Any) -> None:
    reference = Reference(meant or folder)
    expected = [reference.greedy(prompt, 10) for prompt in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    run = generate(folder, PROMPTS, params, num_gpu_blocks_override=64, max_num_seqs=2, **options)
    assert_identical(PROMPTS, run.outputs, expected, reference)


@pytest.mark.parametrize(
    ("rope", "length", "most"),
    [
        ({"type": "dynamic", "factor": 2.0}, 256, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 16, 64),
    ],
    ids=["dynamic", "yarn turned on by hand"],
)
def test_rotary_scaling(rope: dict[str, Any], length: int, most: int, tmp_path: Path) -> None:
    folder = edit(
        build("llama", tmp_path),
        rope_parameters=None,
        rope_scaling=rope,
        rope_theta=1e4,
        max_position_embeddings=length,
    )
    assert load(ModelConfig(str(folder))).max_model_len == most
    with pytest.raises(ModelError, match=f"made for {most} positions"):
        load(ModelConfig(str(folder), max_model_len=most + 1))
    assert_tokens(folder)


def test_the_context_of_command_r(tmp_path: Path) -> None:
    folder = edit(build("cohere", tmp_path), max_position_embeddings=32, model_max_length=128)
    assert load(ModelConfig(str(folder))).max_model_len == 128
    assert_tokens(folder)


def test_a_head_that_is_stored_though_it_should_be_tied(tmp_path: Path) -> None:
    folder = build("llama", tmp_path, vocab_size=VOCAB, tie_word_embeddings=True)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    size = tensors["model.embed_tokens.weight"].shape
    torch.manual_seed(0)
    save_file({**tensors, "lm_head.weight": torch.randn(size)}, path, {"format": "pt"})
    assert_tokens(folder)
    check(folder, 2)
    own = load_whole(folder, "m", read_language_config(folder), torch.float32, torch.device("cpu"), AsValues())
    assert torch.equal(own.lm_head.weight, load(ModelConfig(str(folder))).model.lm_head.weight)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path, {"format": "pt"})
    own = load_whole(folder, "m", read_language_config(folder), torch.float32, torch.device("cpu"), AsValues())
    assert own.lm_head.weight is own.model.embed_tokens.weight


def test_a_window_as_long_as_the_context(tmp_path: Path) -> None:
    folder = build("mistral", tmp_path, sliding_window=256, max_position_embeddings=256)
    loaded = load(ModelConfig(str(folder)))
    loaded.model.config.sliding_window = 256
    self_check(loaded, "m")


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
INT8 = INT4 | {"num_bits": 8}


@pytest.mark.parametrize("more", [{"actorder": "group"}, {"actorder": "weight"}, {}])
def test_inputs_of_groups_in_any_order(more: dict[str, Any], tmp_path: Path) -> None:
    """GPTQ with `actorder="group"`, as `llm-compressor` stores it: `weight_g_idx` has the group of each input."""
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    folder, meant = build("llama", tmp_path / "q", **sizes), build("llama", tmp_path / "values", **sizes)
    stored, values = {}, {}
    torch.manual_seed(0)
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = values[name] = weight
            continue
        inputs = weight.shape[1]
        groups_I = torch.randperm(inputs) // GROUP
        scales_OG = torch.stack([weight[:, groups_I == g].abs().amax(1) for g in range(inputs // GROUP)], 1) / 7
        codes = (weight / scales_OG[:, groups_I]).round().clamp(-8, 7).to(torch.int8)
        values[name] = codes.float() * scales_OG[:, groups_I]
        module = name.removesuffix("weight")
        stored[f"{module}weight_packed"] = pack_to_int32(codes, 4)
        stored[f"{module}weight_scale"] = scales_OG
        stored[f"{module}weight_shape"] = torch.tensor(weight.shape)
        stored[f"{module}weight_g_idx"] = groups_I.int()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    save_file(values, meant / "model.safetensors", {"format": "pt"})
    group = {"targets": ["Linear"], "weights": INT4 | more}
    described = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    assert_tokens(edit(folder, quantization_config=described | {"ignore": ["lm_head"]}), meant)


@pytest.mark.parametrize("names", [["a", "b", "c"], ["c", "b", "a"]])
def test_the_most_precise_target_wins(names: list[str]) -> None:
    groups = {
        "a": {"targets": ["Linear"], "weights": INT4},
        "b": {"targets": ["re:.*down_proj$"], "weights": INT8},
        "c": {"targets": ["model.layers.1.mlp.down_proj"], "weights": INT4 | {"group_size": 16}},
    }
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    found = read_config(config | {"config_groups": {name: groups[name] for name in names}})
    for module, bits, size in (("0.mlp.up_proj", 4, 32), ("0.mlp.down_proj", 8, 32), ("1.mlp.down_proj", 4, 16)):
        weights = found._scheme_of(f"model.layers.{module}").weights
        assert weights is not None
        assert (weights.num_bits, weights.group_size) == (bits, size)
