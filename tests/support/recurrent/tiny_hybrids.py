"""Settings of tiny models with recurrent layers, by family. See `tests.support.models.tiny_models.build`."""

from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MAMBA_2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
GATED_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
LINEAR_FIRST = ["linear_attention", "full_attention", "linear_attention"]
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MAMBA_1: dict[str, Any] = {"state_size": 6, "conv_kernel": 4, "expand": 2, "time_step_rank": 3}
CONV_FIRST = ["conv", "full_attention", "conv"]

_ALL: dict[str, dict[str, Any]] = {
    "qwen3_next": {**GATED_DELTA, **EXPERTS, "layer_types": LINEAR_FIRST, "mlp_only_layers": [0]},
    "qwen3_5_text": {**GATED_DELTA, "layer_types": LINEAR_FIRST},
    "qwen3_5_moe_text": {**GATED_DELTA, **EXPERTS, "layer_types": LINEAR_FIRST},
    "olmo_hybrid": {**GATED_DELTA, "linear_num_value_heads": 2, "layer_types": LINEAR_FIRST},
    "kimi_linear": {
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "linear_conv_kernel_dim": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 12,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 6,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "layer_types": LINEAR_FIRST,
    },
    "lfm2": {"conv_L_cache": 3, "layer_types": CONV_FIRST, "block_auto_adjust_ff_dim": False},
    "lfm3": {
        "conv_L_cache": 4,
        "head_dim": 8,
        "sliding_window": 12,
        "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
        "num_hidden_layers": 4,
    },
    "jamba": {
        "mamba_d_state": 6,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": 3,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 0,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "mamba": MAMBA_1,
    "falcon_mamba": MAMBA_1,
    "mamba2": {
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 6,
        "n_groups": 2,
        "conv_kernel": 4,
        "expand": 2,
        "chunk_size": 8,
    },
    "lfm2_moe": {**EXPERTS, "conv_L_cache": 3, "layer_types": CONV_FIRST, "num_dense_layers": 1},
    "bamba": {**MAMBA_2, "attn_layer_indices": [1]},
    "falcon_h1": {
        **MAMBA_2,
        "mamba_d_ssm": 64,
        "mamba_rms_norm": True,
        "ssm_multipliers": [0.7, 1.2, 0.9, 1.1, 0.8],
        "key_multiplier": 0.6,
        "attention_out_multiplier": 0.9,
    },
    "granitemoehybrid": {
        **MAMBA_2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
        "layer_types": LINEAR_FIRST,
        "logits_scaling": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.7,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
        "num_hidden_layers": 5,
        "head_dim": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 6,
        "conv_kernel": 4,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
}
HYBRIDS = {family: settings for family, settings in _ALL.items() if family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
"""Those that the installed `transformers` has."""
UNSPLIT = ("mamba", "mamba2", "falcon_mamba")
"""Without attention and MLPs there is nothing that ranks could share."""
SPLIT = tuple(family for family in HYBRIDS if family not in UNSPLIT)
