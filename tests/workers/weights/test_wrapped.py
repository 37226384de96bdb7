"""The language model inside a multimodal checkpoint, against the whole model of `transformers` on text alone."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from protos.config.engine import ModelConfig
from protos.errors import ModelError
from slipstream import SamplingParams
from tests.support.identity import generate
from tests.support.models.quantized import fp8_rows, quantized
from tests.support.models.wrapped import build, rename
from workers.model.loader import load
from workers.weights.wrapped import WRAPPERS

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[6, 9, 17, 8, 9, 17, 6, 9], [3, 7, 4, 11, 8, 9, 10, 6, 12] * 2]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@torch.inference_mode()
def tokens_of_the_whole(folder: Path, prompt: list[int]) -> list[int]:
    """Greedy tokens of the multimodal model itself, without a cache."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.tensor([prompt])
    for _ in range(PARAMS.max_tokens or 0):
        logits_1NV = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        ids = torch.cat([ids, logits_1NV[:, -1:].argmax(-1)], 1)
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", sorted(WRAPPERS))
def test_text_alone_is_that_of_the_whole(kind: str, tmp_path: Path) -> None:
    folder = build(kind, tmp_path / "model")
    run = generate(folder, PROMPTS, PARAMS, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    assert run.outputs == [tokens_of_the_whole(folder, prompt) for prompt in PROMPTS]


def test_attention_that_is_bidirectional_in_images_only(tmp_path: Path) -> None:
    """As in the larger models of Gemma 4. "all" is refused."""
    folder = build("gemma4", tmp_path / "model", use_bidirectional_attention="vision")
    run = generate(folder, PROMPTS, PARAMS)
    assert run.outputs == [tokens_of_the_whole(folder, prompt) for prompt in PROMPTS]
    described = (folder / "config.json").read_text()
    (folder / "config.json").write_text(described.replace('"vision"', '"all"'))
    with pytest.raises(ModelError, match="its attention is bidirectional"):
        load(ModelConfig(model=str(folder)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("language_model.model.", "model.language_model."),
        ("language_model.", ""),
    ],
)
def test_names_of_other_versions(old: str, new: str, tmp_path: Path) -> None:
    folder = build("llava", tmp_path / "model", tie_word_embeddings=False)
    wanted = dict(load(ModelConfig(model=str(folder))).model.named_parameters())
    rename(folder, old, new)
    found = dict(load(ModelConfig(model=str(folder))).model.named_parameters())
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())
    assert not torch.equal(wanted["lm_head.weight"], wanted["model.embed_tokens.weight"])


def test_quantised_within_a_wrapper(tmp_path: Path) -> None:
    folder = build("llava", tmp_path / "model")
    ends = tuple(f".{part}_proj.weight" for part in ("q", "k", "v", "o", "gate", "up", "down"))
    quantized(folder, tmp_path / "quantised", fp8_rows, {"quant_method": "fbgemm_fp8"}, ends)
    run = generate(tmp_path / "quantised", PROMPTS, PARAMS)
    meant = tmp_path / "quantised-meant"
    assert run.outputs == [tokens_of_the_whole(meant, prompt) for prompt in PROMPTS]


def test_others_are_refused_by_name(tmp_path: Path) -> None:
    folder = build("gemma3", tmp_path / "model")
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"model_type": "paligemma"}))
    with pytest.raises(ModelError, match=r"model_type 'paligemma'\) cannot be served: it is a multimodal checkpoint"):
        load(ModelConfig(model=str(folder)))
