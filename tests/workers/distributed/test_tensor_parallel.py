"""Models split over ranks, against the plain `transformers` forward."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from protos.config.engine import ModelConfig
from tests.support.distributed.ranks import in_memory, on_ranks
from tests.support.distributed.tensor_parallel import VOCAB, check, runner_of, share
from tests.support.models.every_family import ENDS, build_any
from tests.support.models.tiny_models import FAMILIES, build
from tests.workers.model.test_models import sequences
from workers.attention.batch import Batch
from workers.distributed.groups import Group
from workers.model.loader import load
from workers.model.runner import ModelRunner

pytestmark = pytest.mark.usefixtures("one_thread")

GATHERED = frozenset({"olmo2", "olmoe", "phi3"})
"""Families in which every rank attends with all heads."""


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_equal_one(family: str, tmp_path: Path) -> None:
    folder = build(family, tmp_path, vocab_size=VOCAB)
    whole = load(ModelConfig(model=str(folder))).layers[0].kv_heads
    here = whole if family in GATHERED or whole == 1 else whole // 2
    assert [layers[0].kv_heads for layers in check(folder, 2)] == [here, here]


@pytest.mark.parametrize("family", FAMILIES)
def test_four_ranks_equal_one(family: str, tmp_path: Path) -> None:
    """With two K/V heads in most families: each is on two ranks."""
    folder = build(family, tmp_path, vocab_size=VOCAB)
    whole = load(ModelConfig(model=str(folder))).layers[0].kv_heads
    here = whole if family in GATHERED else max(1, whole // 4)
    assert [layers[0].kv_heads for layers in check(folder, 4)] == [here] * 4


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48, "ranks": 3}),
        ("gemma2", {"tie_word_embeddings": True}),
        ("stablelm", {"qk_layernorm": True, "use_qkv_bias": True}),
        ("stablelm", {"qk_layernorm": True, "ranks": 4}),
        ("opt", {"word_embed_proj_dim": 16, "tie_word_embeddings": True}),
        ("opt", {"do_layer_norm_before": False}),
        ("gpt2", {"tie_word_embeddings": True}),
        ("gpt_bigcode", {"multi_query": False}),
        ("gpt_bigcode", {"multi_query": False, "ranks": 4}),
        ("deepseek_v3", {"q_lora_rank": None}),
        ("deepseek_v3", {"rope_interleave": False, "ranks": 4}),
        ("olmoe", {"clip_qkv": 0.5}),
        ("phi", {"qk_layernorm": True}),
        ("llama", {"vocab_size": 9, "ranks": 4}),
    ],
)
def test_variants(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    changes = {"vocab_size": VOCAB, **changes}
    ranks = changes.pop("ranks", 2)
    check(build(family, tmp_path, **changes), ranks, changes["vocab_size"])


@pytest.mark.parametrize("family", ["deepseek_v2", "glm4_moe_lite", "minicpm3", "youtu"])
def test_latent_attention_of_other_families(family: str, tmp_path: Path) -> None:
    check(build_any(family, tmp_path), 2, ENDS["vocab_size"])


def decode(runner: ModelRunner, group: Group, prompt: np.ndarray, steps: int) -> list[int]:
    """Return greedy ids, sampled on rank 0 and broadcast to the others."""
    ids = list(prompt)
    start = 0
    for _ in range(steps):
        fed = np.array(ids[start:])
        batch = Batch(np.array([0]), np.array([start]), np.array([len(fed)]), fed)
        logits_1V = runner.forward(batch, np.array([len(fed) - 1]))
        chosen = logits_1V.argmax(-1) if group.rank == 0 else torch.zeros(1, dtype=torch.int64)
        start = len(ids)
        ids.append(int(group.broadcast(chosen)))
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_greedy_ids_over_gloo(family: str, tmp_path: Path) -> None:
    folder = build(family, tmp_path, vocab_size=VOCAB)
    rows = sequences(VOCAB)[3:]
    rows[0] = np.concatenate((rows[0], np.zeros(20, np.int64)))  # whose blocks the new tokens take
    prompt = rows[0][:9]
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    settings = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, "eos_token_id": VOCAB + 1}
    expected = model.generate(torch.from_numpy(prompt)[None], **settings)[0, 9:].tolist()
    found = on_ranks(2, lambda group: decode(runner_of(folder, group, rows), group, prompt, 20))
    assert found == [expected, expected]


def test_notes_tell_what_this_rank_caches(tmp_path: Path) -> None:
    folder = build("llama", tmp_path)
    assert [loaded.notes for loaded in in_memory(2, lambda group: share(folder, group))] == [
        ("KV cache: 192 bytes per token",)
    ] * 2


def test_split_models_say_that_they_run_eager(tmp_path: Path) -> None:
    folder = build("llama", tmp_path)
    lines = in_memory(2, lambda group: runner_of(folder, group, sequences()).warm_up())
    assert lines == ["running eager: exchanges between ranks are not compiled"] * 2


def test_a_config_that_lies_about_its_heads(tmp_path: Path) -> None:
    folder = build("opt", tmp_path, vocab_size=VOCAB)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_key_value_heads": 1}))
    check(folder, 4)
