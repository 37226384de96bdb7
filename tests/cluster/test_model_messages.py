"""What a command says of a model before and while it loads it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.cli import main as cli
from cluster.llm import LLM
from protos.errors import ConfigError
from tests.support.models import tiny_models


@pytest.mark.parametrize(
    ("keys", "ranks", "says"),
    [
        ({}, 3, "must be one of 1, 2, 4 for .*, which has 4 attention heads and 2 key/value heads; got 3"),
        ({"num_attention_heads": 12, "num_key_value_heads": 8}, 6, "must be one of 1, 2, 4 for "),
        (
            {"num_attention_heads": None, "num_key_value_heads": None, "n_head": 12},
            8,
            "must be one of 1, 2, 3, 4, 6, 12 for ",
        ),
    ],
)
def test_ranks_that_cannot_share_the_heads_are_refused_before_ray_starts(
    tmp_path: Path, keys: dict[str, Any], ranks: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    folder = tiny_models.build("llama", tmp_path / "llama")
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, **keys}))
    with pytest.raises(ConfigError, match=rf"^tensor_parallel_size {says}"):
        cli.app(["generate", "x", "--model", str(folder), "-tp", str(ranks)], standalone_mode=False)


def test_each_note_on_a_model_is_shown_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_models.build("llama", tmp_path / "llama")
    with (
        caplog.at_level("INFO"),
        LLM(str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, num_gpu_blocks_override=64),
    ):
        pass
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "bytes per token" in line] == ["KV cache: 384 bytes per token"]
