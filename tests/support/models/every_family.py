"""A tiny model of any decoder-only family that `transformers` lists, from the names of its config's settings."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.models.tiny_models import COMMON, SPECIFIC, settings
from tests.support.models.wrapped import GEMMA4_TEXT
from tests.support.recurrent.tiny_hybrids import HYBRIDS

LARGEST = 30_000_000
"""Parameters; families whose size has other names are not built."""
SMALL: dict[str, Any] = {
    **COMMON,
    "num_key_value_heads": 4,  # as many as query heads: latent attention needs it
    "head_dim": 8,
    "sliding_window": 12,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "n_inner": 48,
    "d_model": 32,
    "n_layers": 3,
    "n_heads": 4,
    "num_layers": 3,
    "num_heads": 4,
}


ENDS: dict[str, Any] = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2}
GIVEN: dict[str, dict[str, Any]] = {
    "gemma4_text": GEMMA4_TEXT,
    "falcon": {**ENDS, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_hidden_size": 48},
    "gpt_neo": {
        **ENDS,
        "hidden_size": 32,
        "num_layers": 3,
        "num_heads": 4,
        "attention_types": [[["global", "local", "global"], 1]],
        "max_position_embeddings": 256,
    },
    "dbrx": {
        **ENDS,
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 256,
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
}
CHANGED: dict[str, dict[str, Any]] = {
    "dots1": {"n_shared_experts": 1},
    "zaya": {"num_experts_per_tok": 1},
    "mimo_v2_flash": {"num_key_value_heads": 2},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "intermediate_size": [48, 48, 48],
        "activation_sparsity_pattern": [0.0] * 3,
    },
    "olmo3": {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
}


class NotBuiltError(Exception):
    """These settings do not make a model of this family."""


def build_any(family: str, folder: Path) -> Path:
    """Save a tiny random model of *family* into *folder*. Raises `NotBuiltError` with the reason."""
    try:
        config = AutoConfig.for_model(family, **_settings(family))
        with torch.device("meta"):
            size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
        if size > LARGEST:
            raise NotBuiltError(f"it has {size / 1e6:.0f} M parameters")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _randomize(model)
        model.save_pretrained(folder)
    except NotBuiltError:
        raise
    except Exception as error:  # whatever a config finds wrong with settings that were not made for it
        raise NotBuiltError(f"{type(error).__name__}: {error}") from error
    return folder


def _settings(family: str) -> dict[str, Any]:
    if family in SPECIFIC or family in HYBRIDS:
        return settings(family)
    if family in GIVEN:
        return GIVEN[family]
    usual = AutoConfig.for_model(family)
    latent = {"head_dim"} if hasattr(usual, "kv_lora_rank") else set()  # which is computed there
    known = {key: value for key, value in SMALL.items() if key not in latent and hasattr(usual, key)}
    return known | CHANGED.get(family, {})


def _randomize(model: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 or "bias" in name:
                weight.normal_(0.0, 0.25, generator=generator)
