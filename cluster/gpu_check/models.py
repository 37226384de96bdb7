"""Models with random weights: tiny ones of several families, and large ones whose draft is right at a given rate."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

TINY: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 64},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
    "minicpm3": {
        "num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 256, "qk_rope_head_dim": 32, "head_dim": 32,
        "qk_nope_head_dim": 64, "v_head_dim": 64,
    },
}  # fmt: skip
"""Grouped heads, norms of queries and keys, windows and soft caps, experts, sinks, latents."""
DAMPING = 0.01
"""Of what layers add to the residual stream, so that the last token alone decides the next one."""


@dataclass(frozen=True)
class ModelShape:
    """A published shape.

    Attributes:
        kind: `model_type` of its configuration.
        values: of the configuration.
    """

    kind: str
    values: Mapping[str, Any]


def _shape(kind: str, hidden: int, inner: int, layers: int, *, heads: tuple[int, int, int], vocab: int) -> ModelShape:
    num_heads, num_kv_heads, head_size = heads
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    attention = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_size}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    others = {"max_position_embeddings": 8192, "tie_word_embeddings": False, "initializer_range": 0.02}
    return ModelShape(kind, {**sizes, **attention, **ends, **others})


SHAPES: Mapping[str, ModelShape] = {
    "tiny": _shape("llama", 128, 256, 4, heads=(4, 2, 32), vocab=512),
    "tiny-draft": _shape("llama", 64, 128, 1, heads=(2, 1, 32), vocab=512),
    "small-draft": _shape("llama", 256, 768, 2, heads=(4, 2, 64), vocab=32_000),
    "0.4B": _shape("llama", 1024, 2816, 24, heads=(16, 8, 64), vocab=32_000),
    "0.6B": _shape("qwen3", 1024, 3072, 28, heads=(16, 8, 128), vocab=151_936),
    "1B": _shape("llama", 2048, 8192, 16, heads=(32, 8, 64), vocab=128_256),
    "8B": _shape("llama", 4096, 14_336, 32, heads=(32, 8, 128), vocab=128_256),
}
"""The last three are of Qwen3-0.6B, Llama-3.2-1B and Llama-3.1-8B, but with output layers of their own."""


def save_tiny(family: str, folder: Path) -> Path:
    """Write a tiny fp32 model of *family* with random weights; return its folder."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**TINY, **FAMILIES[family]})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def right_share(accepted: float, k: int) -> float:
    """Return the share of tokens after which a draft must be right so that *accepted* of its draft tokens are.

    Of a chain of *k*, those after the first wrong one are not accepted: the mean of p, p^2, ..., p^k is *accepted*.
    """
    low, high = 0.0, 1.0
    for _ in range(50):
        share = (low + high) / 2
        is_low = sum(share**i for i in range(1, k + 1)) < accepted * k
        low, high = (share, high) if is_low else (low, share)
    return low


def save_pair(target: str, draft: str | None, right: float, device: str, folder: Path) -> tuple[Path, Path]:
    """Write a target and a draft of these shapes, whose greedy tokens are the same after a share *right* of all tokens.

    Without *draft*, only the target is written.

    Each token has one successor: a fixed permutation of the vocabulary. The draft has another one for 1 - *right* of
    the tokens. Layers are computed in full, but what they add is damped.
    """
    num_tokens = SHAPES[target].values["vocab_size"]
    generator = torch.Generator().manual_seed(1)
    successor_V = torch.randperm(num_tokens, generator=generator)
    wrong = torch.randperm(num_tokens, generator=generator)[: round((1.0 - right) * num_tokens)]
    drafted_V = successor_V.clone()
    drafted_V[wrong] = successor_V[wrong.roll(1)]
    if draft is not None:
        _save(SHAPES[draft], drafted_V, device, folder / "draft")
    return _save(SHAPES[target], successor_V, device, folder / "target"), folder / "draft"


@torch.no_grad()
def _save(shape: ModelShape, successor_V: torch.Tensor, device: str, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    config = AutoConfig.for_model(shape.kind, **shape.values)
    torch.manual_seed(2)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.mul_(DAMPING)
    embedding_VE = model.get_input_embeddings().weight.normal_()
    scale = embedding_VE.shape[1] ** -0.5
    model.get_output_embeddings().weight[successor_V.to(device)] = embedding_VE * scale
    model.save_pretrained(folder)
    return folder
