"""Loading tokenizers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from protos.config.engine import ModelConfig
from protos.errors import ModelError
from runtime.text.tokenizer import load_tokenizer
from tests.support.text.byte_level import train_byte_level

ROOT = Path(__file__).parents[3]
LOAD = """
import sys
from transformers import PreTrainedTokenizerFast
theirs = "torch" in sys.modules  # transformers 5.17 loads it by itself
from protos.config.engine import ModelConfig
from runtime.text.tokenizer import load_tokenizer
tokenizer = load_tokenizer(ModelConfig(model=sys.argv[1]))
tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
assert tokenizer.encode("hello", add_special_tokens=True)
assert ("torch" in sys.modules) == theirs
"""


def test_loading_a_tokenizer_does_not_load_torch(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer could be loaded from .*skip_tokenizer_init") as caught:
        load_tokenizer(ModelConfig(model=str(tmp_path)))
    assert "\n" not in str(caught.value)


def test_skip_tokenizer_init_loads_nothing() -> None:
    assert load_tokenizer(ModelConfig(model="nowhere", skip_tokenizer_init=True)) is None


def test_a_tokenizer_in_its_older_files_is_converted(tmp_path: Path) -> None:
    # facebook/opt-* on the Hub have no tokenizer.json.
    core = train_byte_level(["def f(x): return x"] * 9, 300, ["</s>"])
    parts = json.loads(core.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(parts["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in parts["merges"]))
    (tmp_path / "config.json").write_text('{"model_type": "opt"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    tokenizer = load_tokenizer(ModelConfig(str(tmp_path)))
    assert tokenizer is not None
    text = "def f(x): return x"
    assert tokenizer.backend_tokenizer.encode(text).ids == core.encode(text).ids
