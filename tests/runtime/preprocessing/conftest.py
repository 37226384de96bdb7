"""A tokenizer saved in a folder, and a preprocessor that uses it."""

from pathlib import Path

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from protos.config.engine import ModelConfig
from runtime.text.preprocessor import Preprocessor
from runtime.text.tokenizer import load_tokenizer
from tests.support.text.byte_level import train_byte_level

CORPUS = ["hello world, the future of AI is bright", "def main() -> None: return None"] * 20
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
EOS = 1
VOCAB = 340


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = train_byte_level(CORPUS, VOCAB, ["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    where = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(where)
    return where


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    loaded = load_tokenizer(ModelConfig(model=str(folder)))
    assert loaded is not None
    return loaded


@pytest.fixture
def preprocessor(tokenizer: PreTrainedTokenizerFast) -> Preprocessor:
    return Preprocessor(tokenizer, vocab_size=VOCAB, max_model_len=64, capacity=1024, eos_ids=(EOS,), seed=3)
