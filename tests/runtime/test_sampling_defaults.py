"""A checkpoint's own sampling defaults: taken by default, from where they are looked for, or not at all."""

import json
from pathlib import Path
from typing import Any

import pytest

from protos.config.arguments import parse
from protos.config.engine import ModelConfig
from protos.errors import ConfigError
from protos.sampling import SamplingParams
from runtime.text.sampling_defaults import default_max_tokens, sampling_defaults

STORED = {
    "eos_token_id": 2,
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
    "min_p": None,
    "repetition_penalty": 1.05,
    "max_new_tokens": 99,
    "transformers_version": "5",
}
TAKEN = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}


def stored(folder: Path, content: Any = STORED) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder)


def test_those_of_the_model_are_taken_as_vllm_takes_them(tmp_path: Path) -> None:
    defaults = sampling_defaults(ModelConfig(stored(tmp_path)))
    assert defaults == TAKEN
    assert SamplingParams(**defaults).top_k == 20
    assert default_max_tokens(ModelConfig(str(tmp_path))) == 99
    assert default_max_tokens(ModelConfig(str(tmp_path), generation_config="vllm")) is None
    assert sampling_defaults(ModelConfig(stored(tmp_path, {"eos_token_id": 2}))) == {}
    assert default_max_tokens(ModelConfig(str(tmp_path))) is None
    with pytest.raises(ConfigError, match="max_new_tokens must be an integer of at least 1, got 0"):
        default_max_tokens(ModelConfig(stored(tmp_path, {"max_new_tokens": 0})))


def test_none_are_taken_where_none_are_wanted_or_there(tmp_path: Path) -> None:
    assert sampling_defaults(ModelConfig(stored(tmp_path), generation_config="vllm")) == {}
    (tmp_path / "empty").mkdir()
    assert sampling_defaults(ModelConfig(str(tmp_path / "empty"))) == {}
    assert sampling_defaults(ModelConfig("nobody/has-this-model", download_dir=str(tmp_path))) == {}


def test_those_of_another_folder(tmp_path: Path) -> None:
    other = stored(tmp_path / "other", {"temperature": 0.5})
    assert sampling_defaults(ModelConfig(stored(tmp_path), generation_config=other)) == {"temperature": 0.5}


@pytest.mark.parametrize(
    ("content", "choice", "words"),
    [
        ({"temperature": -1}, "auto", "temperature must be at least 0.*generation_config 'vllm'"),
        ({"top_p": "high"}, "auto", "top_p"),
        ("{", "auto", r"cannot be read \(JSONDecodeError\)"),
        (STORED, "nowhere", "must be auto, vllm or a folder with a generation_config.json, got 'nowhere'"),
    ],
)
def test_what_cannot_be_sampled_with(tmp_path: Path, content: Any, choice: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        sampling_defaults(ModelConfig(stored(tmp_path, content), generation_config=choice))
    assert str(tmp_path) not in str(error.value)


def test_the_argument_has_vllms_name_and_default() -> None:
    assert parse({"model": "m"}).model.generation_config == "auto"
    assert parse({"model": "m", "generation-config": "vllm"}).model.generation_config == "vllm"
