"""Loading checkpoints, and errors that name the model and the reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from protos.config.engine import ModelConfig
from protos.errors import ModelError
from protos.layers import LayerShape
from tests.support.models.tiny_models import build, edit
from workers.model import loader
from workers.model.loader import load
from workers.weights import hub as fetching
from workers.weights.families import REFUSED, TESTED


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return build("llama", tmp_path / "llama")


def refusal(folder: Path | str, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load(ModelConfig(model=str(folder), **options))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_facts(llama: Path) -> None:
    edit(llama, "generation_config.json", eos_token_id=[2, 7])
    loaded = load(ModelConfig(model=str(llama), device="cpu"))
    assert (loaded.vocab_size, loaded.max_model_len, loaded.eos_ids) == (96, 256, (2, 7))
    assert loaded.layers == (LayerShape(2, 8, 8),) * 3
    assert loaded.dtype == torch.float32 == next(loaded.model.parameters()).dtype
    assert not loaded.model.training
    assert not any(weight.requires_grad for weight in loaded.model.parameters())
    assert loaded.notes == ("KV cache: 384 bytes per token",)


def test_expanded_keys_are_explained(tmp_path: Path) -> None:
    loaded = load(ModelConfig(model=str(build("deepseek_v3", tmp_path))))
    assert "864 bytes per token (keys and values are cached expanded" in loaded.notes[0]


def test_kimi_k2_is_read_as_deepseek_v3(tmp_path: Path) -> None:
    """Its code, which is never run, is DeepSeek-V3's under another name."""
    folder = build("deepseek_v3", tmp_path)
    expected = load(ModelConfig(model=str(folder)))
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModelForCausalLM": "modeling_deepseek.X"}
    loaded = load(ModelConfig(model=str(edit(folder, model_type="kimi_k2", auto_map=code))))
    assert loaded.model_type == expected.model_type == "deepseek_v3"
    assert loaded.notes == expected.notes
    assert type(loaded.model) is type(expected.model)
    assert loaded.model.config.to_diff_dict() == expected.model.config.to_diff_dict()
    weights = expected.model.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in loaded.model.state_dict().items())


def test_loading_is_silent(llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    load(ModelConfig(model=str(llama)))
    assert capfd.readouterr() == ("", "")


def test_dtype_is_the_checkpoints_unless_the_cpu_lacks_it(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(llama, dtype="bfloat16")
    monkeypatch.setattr(loader, "cpu_computes", lambda dtype: True)
    assert load(ModelConfig(model=str(llama), device="cpu")).dtype == torch.bfloat16
    assert load(ModelConfig(model=str(llama), device="cpu", dtype="float32")).dtype == torch.float32
    monkeypatch.setattr(loader, "cpu_computes", lambda dtype: dtype == torch.float32)
    loaded = load(ModelConfig(model=str(llama), device="cpu"))
    assert loaded.dtype == torch.float32
    assert "this CPU has no bfloat16 arithmetic: weights are loaded as float32" in loaded.notes
    wanted = load(ModelConfig(model=str(llama), device="cpu", dtype="bfloat16"))
    assert wanted.dtype == torch.bfloat16
    assert "this CPU has no bfloat16 arithmetic; dtype 'auto' does without" in wanted.notes
    edit(llama, dtype=None, torch_dtype=None)
    assert load(ModelConfig(model=str(llama), device="cpu")).dtype == torch.float32


def test_context_length(llama: Path) -> None:
    assert load(ModelConfig(model=str(llama), max_model_len=100)).max_model_len == 100
    assert "max_model_len is 300, but" in (message := refusal(llama, max_model_len=300))
    assert "made for 256 positions" in message


def test_context_length_of_vicuna_16k(llama: Path) -> None:
    """What the rotary scaling makes of it stands beside it."""
    described = json.loads((llama / "config.json").read_text())
    del described["rope_parameters"]
    scaled = {**described, "rope_scaling": {"type": "linear", "factor": 4.0}, "max_sequence_length": 1024}
    assert loader.context_length(scaled, ModelConfig(model="any")) == 1024
    assert loader.context_length({**described, "max_sequence_length": 1024}, ModelConfig(model="any")) == 256


@pytest.mark.parametrize("wrong", [{"hidden_size": "64"}, {"layer_types": ["full_attention"] * 9}])
def test_a_config_that_transformers_refuses(llama: Path, wrong: dict[str, Any]) -> None:
    edit(llama, **wrong)
    assert "cannot be loaded" in refusal(llama)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests behaviour without CUDA")
def test_cuda_without_cuda(llama: Path) -> None:
    assert "torch sees no CUDA device" in refusal(llama, device="cuda")


def saved_by_torch(folder: Path, *, in_shards: bool, **more: Any) -> None:
    """Write the weights in *folder*, and *more*, as torch saves them, and remove the safetensors."""
    weights = load_file(folder / "model.safetensors") | more
    (folder / "model.safetensors").unlink()
    if not in_shards:
        torch.save(weights, folder / "pytorch_model.bin")
        return
    names = sorted(weights)
    parts = {"pytorch_model-1.bin": names[::2], "pytorch_model-2.bin": names[1::2]}
    for shard, part in parts.items():
        torch.save({name: weights[name] for name in part}, folder / shard, _use_new_zipfile_serialization=False)
    index = {name: shard for shard, part in parts.items() for name in part}
    edit(folder, "pytorch_model.bin.index.json", weight_map=index)


def weights_of(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = load(ModelConfig(model=str(folder), device="cpu", **options)).model.state_dict()
    return weights


@pytest.mark.parametrize("in_shards", [False, True])
@pytest.mark.parametrize(
    ("family", "computed"), [("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"), ("gpt2", "h.0.attn.bias")]
)
def test_what_torch_saved_is_read(family: str, computed: str, in_shards: bool, tmp_path: Path) -> None:
    """The same weights as from safetensors, whatever was stored of what is computed."""
    folder = build(family, tmp_path / family, tie_word_embeddings=True)
    wanted = weights_of(folder)
    saved_by_torch(folder, in_shards=in_shards, **{computed: torch.zeros(4)})
    found = weights_of(folder)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    edit(folder, dtype=None, torch_dtype=None)  # then the dtype is that of the weights
    assert {weight.dtype for weight in weights_of(folder).values()} == {torch.float32}
    assert "quantised to int8" in " ".join(load(ModelConfig(model=str(folder), quantization="int8")).notes)


def test_safetensors_come_first(llama: Path) -> None:
    (llama / "pytorch_model.bin").write_bytes(b"not read")
    edit(llama, "pytorch_model.bin.index.json", weight_map={"lm_head.weight": "not-there.bin"})
    assert load(ModelConfig(model=str(llama))).vocab_size == 96


class Code:
    """Would run when unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return print, ("it ran",)


def test_code_among_weights_is_refused(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved_by_torch(llama, in_shards=False, more=Code())
    assert "pytorch_model.bin holds more than tensors, which would run code when loaded" in refusal(llama)
    assert "it ran" not in capsys.readouterr().out
    (llama / "pytorch_model.bin").write_bytes(b"damaged")
    assert "pytorch_model.bin" in refusal(llama)
    (llama / "pytorch_model.bin").unlink()
    assert "there are no weights: none of model.safetensors.index.json, model.safetensors, pytorch" in refusal(llama)


def test_missing_weights(llama: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    gone = [name for name in weights if "layers.1.mlp" in name]
    save_file({k: v for k, v in weights.items() if k not in gone}, llama / "model.safetensors", {"format": "pt"})
    assert f"3 weights are missing from the checkpoint, the first is {min(gone)}" in refusal(llama)


def test_damaged_weights(llama: Path) -> None:
    (llama / "model.safetensors").write_bytes(b"\x00" * 40)
    assert "cannot be loaded" in refusal(llama, dtype="float32")
    assert "cannot be" in refusal(edit(llama, dtype=None, torch_dtype=None))


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/model.safetensors", "a\\b.safetensors", "model.bin"])
def test_shards_lie_beside_their_index(llama: Path, shard: str) -> None:
    edit(llama, "model.safetensors.index.json", weight_map={"lm_head.weight": shard})
    assert repr(shard) in refusal(llama)


def test_missing_shard(llama: Path) -> None:
    edit(llama, "model.safetensors.index.json", weight_map={"lm_head.weight": "model-2.safetensors"})
    assert "the shard model-2.safetensors named in the index of its weights is missing" in refusal(llama)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "bloom"}, "alibi"),
        ({"model_type": "falcon", "alibi": False}, "does not go through transformers' attention interface"),
        ({"model_type": "zamba2"}, "recurrent state"),
        ({"model_type": "rwkv"}, "recurrent state"),
        ({"model_type": "llama4_text"}, "in chunks"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "mystery", "auto_map": {"AutoConfig": "x.Y"}}, "auto_map"),
        ({"model_type": "mystery"}, "no causal language model class"),
        ({"model_type": "gemma3"}, "multimodal"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_attention"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": None},
            "longest sequence in the batch",
        ),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 64},
            "max_model_len to at most 64",
        ),
    ],
)
def test_refused_by_name_before_weights_are_read(llama: Path, changes: dict[str, Any], reason: str) -> None:
    (llama / "model.safetensors").unlink()
    message = refusal(edit(llama, **changes))
    assert reason in message
    assert repr(changes.get("model_type", "llama")) in message


def test_longrope_is_served_within_its_short_range(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64,
    }
    folder = build("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=64)
    assert "at most 64" in refusal(folder)
    assert load(ModelConfig(model=str(folder), max_model_len=64)).max_model_len == 64


def test_code_in_the_repository_is_not_needed_where_a_class_exists(llama: Path) -> None:
    edit(llama, auto_map={"AutoModelForCausalLM": "evil.Evil"})
    (llama / "evil.py").write_text("raise SystemExit('executed')")
    assert load(ModelConfig(model=str(llama))).vocab_size == 96


def test_unknown_attention_arguments_are_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.LlamaAttention.forward

    def biased(self: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(self, *args, **kwargs, position_bias=1)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", biased)
    assert "passes 'position_bias' to attention" in refusal(llama)


def test_layers_that_attend_otherwise_are_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.LlamaAttention.forward

    def sometimes(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        return (hidden_states, None) if self.layer_idx == 1 else plain(self, hidden_states, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", sometimes)
    assert "layers [1] do not attend through the attention interface" in refusal(llama)


def test_not_a_model(tmp_path: Path) -> None:
    assert "there is no config.json" in refusal(tmp_path)
    assert "no such folder" in refusal(tmp_path / "nothing")
    assert "neither a folder nor a valid Hub id" in refusal("not a valid id")
    (tmp_path / "config.json").write_text("{")
    assert "config.json cannot be read" in refusal(tmp_path)


def test_hub_ids_go_through_the_hub_client(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[tuple[str, str | None, str | None]] = []

    def snapshot(name: str, revision: str | None, cache_dir: str | None, **options: Any) -> str:
        requested.append((name, revision, cache_dir))
        assert not any("bin" in pattern or "py" in pattern for pattern in options["allow_patterns"])
        return str(llama)

    monkeypatch.setattr(fetching, "snapshot_download", snapshot)
    load(ModelConfig(model="someone/llama", revision="abc", download_dir="/cache"))
    assert requested == [("someone/llama", "abc", "/cache")] * 2


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("long story")

    monkeypatch.setattr(fetching, "snapshot_download", unreachable)
    assert "someone/llama at revision abc: not in the cache" in refusal("someone/llama", revision="abc")


def test_no_family_is_both_tested_and_refused() -> None:
    assert not TESTED & REFUSED.keys()
