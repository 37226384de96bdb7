"""Tiny random models of every supported family; the whole set takes seconds."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.recurrent.tiny_hybrids import HYBRIDS

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]

SPECIFIC: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {**MOE, "head_dim": 16},
    "mistral": {"sliding_window": 12},
    "gemma2": {"head_dim": 8, "sliding_window": 12, "query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0,
               "attn_logit_softcapping": 2.0},
    "gemma3_text": {"head_dim": 8, "sliding_window": 12, "query_pre_attn_scalar": 8, "layer_types": ALTERNATING},
    "phi": {"partial_rotary_factor": 0.5, "num_key_value_heads": 4},
    "phi3": {"sliding_window": 12},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12},
    "olmo2": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7},
    "starcoder2": {"sliding_window": 12},
    "cohere": {"logit_scale": 0.5, "use_qk_norm": True},
    "stablelm": {"partial_rotary_factor": 0.5},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 12,
                "layer_types": ALTERNATING,
                "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                                    "original_max_position_embeddings": 64}},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256, "n_inner": 48,
             "scale_attn_by_inverse_layer_idx": True},
    "gpt_neox": {"num_key_value_heads": 4, "rotary_pct": 0.5},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256, "n_inner": 48, "multi_query": True},
    "deepseek_v3": {"q_lora_rank": 12, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
                    "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
                    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8,
                 "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "use_qk_norm": True},
}  # fmt: skip
GPT2_LIKE = frozenset({"gpt2", "gpt_bigcode"})
RENAMED = frozenset({"n_embd", "n_layer", "n_head", "n_positions"})
FAMILIES = tuple(SPECIFIC)
"""Those with attention in every layer."""


def settings(family: str, **overrides: Any) -> dict[str, Any]:
    """Return the config values of a tiny *family*, updated by *overrides*."""
    common = COMMON
    if family in GPT2_LIKE:
        common = {key: COMMON[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "tie_word_embeddings")}
    return {**common, **(SPECIFIC | HYBRIDS)[family], **overrides}


def build(family: str, folder: Path, *, seed: int = 0, spread: float = 0.25, **overrides: Any) -> Path:
    """Save a tiny random model of *family* into *folder*, as fp32 safetensors, and return the folder.

    Weights are spread wider than usual, so that attention is far from uniform and errors show. The same
    seed and settings give the same weights.
    """
    config = AutoConfig.for_model(family, **settings(family, **overrides))
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 or "bias" in name or "sinks" in name:
                weight.normal_(0.0, spread, generator=generator)
            else:
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)
    model.save_pretrained(folder)
    return folder


def perturb(source: Path, folder: Path, *, seed: int = 1, noise: float = 0.05) -> Path:
    """Save a copy of the model in *source* with noise on every weight: a draft that is often, not always, right."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=noise)
    model.save_pretrained(folder)
    return folder


def edit(folder: Path, name: str = "config.json", **changes: Any) -> Path:
    """Change entries of a JSON file of a checkpoint, which is made if there is none; return *folder*."""
    path = folder / name
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **changes}))
    return folder
