"""Files fetched from the Hub: no weights for a tokenizer, and only the shards of a target that its draft reads."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from protos.config.engine import ModelConfig
from protos.errors import ModelError
from tests.support.models import tiny_models
from tests.workers.draft.test_weights import CPU, FAMILIES, assert_ends
from workers.draft.weights import CheckpointEnds, read_tensors
from workers.weights import hub as fetching
from workers.weights.hub import fetch, fetch_model, fetch_tokenizer, fetch_without_layers, read_config, shards_by_tensor

NAME = "someone/model"


class Hub:
    """A Hub client with one checkpoint: filters as the real client does, and copies files into a folder."""

    def __init__(self, source: Path, cache: Path) -> None:
        self.source, self.cache = source, cache
        cache.mkdir()

    def snapshot(self, name: str, *, allow_patterns: list[str], ignore_patterns: list[str], **_options: Any) -> str:
        assert name == NAME
        files = [path.name for path in self.source.iterdir()]
        for file in filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            shutil.copy(self.source / file, self.cache)
        return str(self.cache)

    @property
    def fetched(self) -> set[str]:
        return {path.name for path in self.cache.glob("*.safetensors")}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path / "source", tmp_path / "cache")
    monkeypatch.setattr(fetching, "snapshot_download", hub.snapshot)
    return hub


def ends(model: str) -> Path:
    config = ModelConfig(model=model)
    return fetch_without_layers(config, read_config(config))


def in_shards(folder: Path) -> None:
    """Save the model in *folder* again, with few tensors in each shard."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="4KB")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_elsewhere_fetches_the_ends_alone(family: str, hub: Hub) -> None:
    in_shards(tiny_models.build(family, hub.source))
    folder = ends(NAME)
    assert_ends(CheckpointEnds(folder, family, torch.float32, CPU), hub.source)
    layers = {".layers.0.", ".layers.1.", "h.0.", "h.1."}
    for shard in hub.fetched:
        with safe_open(folder / shard, "pt") as weights:
            assert any(all(layer not in name for layer in layers) for name in weights.keys()), shard  # noqa: SIM118
    assert len(hub.fetched) < len(list(hub.source.glob("*.safetensors"))) / 2
    assert fetch(ModelConfig(model=NAME)) == folder  # and for a target, all of it
    assert len(hub.fetched) == len(list(hub.source.glob("*.safetensors")))


def test_heads_inside_the_target_are_fetched(hub: Hub) -> None:
    wanted = ("model.layers.2.eh_proj.weight", "model.mtp_layers.0.input_proj.weight", "mtp.layers.0.mlp.weight")
    unwanted = ("model.layers.1.mlp.weight", "layers.0.mlp.weight", "transformer.h.1.mlp.weight")
    hub.source.mkdir()
    shards = {name: f"model-{number}.safetensors" for number, name in enumerate((*wanted, *unwanted))}
    for name, shard in shards.items():
        save_file({name: torch.ones(2)}, hub.source / shard)
    (hub.source / fetching.INDEX).write_text(json.dumps({"weight_map": shards}))
    (hub.source / "config.json").write_text('{"num_hidden_layers": 2}')
    assert {name for name, _ in read_tensors(ends(NAME))} == {*wanted}


def test_one_file_is_fetched_whole(hub: Hub) -> None:
    tiny_models.build("llama", hub.source)
    assert (ends(NAME) / "model.safetensors").is_file()


def test_what_torch_saved_is_fetched_where_there_are_no_safetensors(hub: Hub) -> None:
    tiny_models.build("llama", hub.source)
    names = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight")
    index = {name: f"pytorch_model-{number}.bin" for number, name in enumerate(names)}
    for name, shard in index.items():
        torch.save({name: torch.ones(2)}, hub.source / shard)
    (hub.source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    assert not list(fetch_model(ModelConfig(model=NAME)).glob("*.bin"))
    (hub.source / "model.safetensors").unlink()
    (hub.cache / "model.safetensors").unlink()
    save_file({"v_head.weight": torch.ones(2)}, hub.source / "v_head.safetensors")  # beside the model's
    torch.save({}, hub.source / "pytorch_model.fp16.bin")
    assert [path.name for path in ends(NAME).glob("*.bin")] == ["pytorch_model-0.bin"]
    assert len(list(fetch_model(ModelConfig(model=NAME)).glob("*.bin"))) == 2


def test_a_folder_is_used_as_it_is(tmp_path: Path) -> None:
    folder = tiny_models.build("llama", tmp_path / "llama")
    assert ends(str(folder)) == folder


def test_a_tokenizer_comes_without_weights(hub: Hub) -> None:
    tiny_models.build("llama", hub.source)
    (hub.source / "tokenizer.json").write_text("{}")
    assert (fetch_tokenizer(ModelConfig(model="other", tokenizer=NAME)) / "tokenizer.json").is_file()
    assert (fetch_tokenizer(ModelConfig(model=NAME)) / "tokenizer.json").is_file()
    assert not hub.fetched


def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / fetching.INDEX).write_text(json.dumps({"weight_map": {"x": "../other.safetensors"}}))
    with pytest.raises(ModelError, match=r"names the shard .*other.safetensors.; shards must be"):
        shards_by_tensor(tmp_path, "it")
