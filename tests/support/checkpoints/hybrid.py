"""Published checkpoints of models whose layers keep recurrent state beside attention."""

from typing import Any

from tests.support.checkpoints.dense import config
from tests.support.checkpoints.entry import CARD, DEFAULTS, QUOTED, SHARED, Published
from tests.support.checkpoints.experts import sparse
from tests.support.checkpoints.gated_delta import QWEN3_NEXT, QWEN35, QWEN35_MOE, qwen3_5, qwen3_5_moe, qwen3_next
from tests.support.checkpoints.stored import headers
from tests.support.checkpoints.tensors import NORMS, Tensors, attention, ends, gated, linear, norms

PATTERN = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
NEMOTRON = config("nemotron_h", 4480, 15680, 56, 40, 8, 131072, 131072, head_dim=128) | {
    "hybrid_override_pattern": PATTERN, "mamba_num_heads": 128, "mamba_head_dim": 80, "ssm_state_size": 128,
    "n_groups": 8, "conv_kernel": 4, "expand": 2, "chunk_size": 128, "mlp_hidden_act": "relu2", "use_conv_bias": True,
    "use_bias": False, "mlp_bias": False, "attention_bias": False, "layer_norm_epsilon": 1e-5, "time_step_min": 0.001,
    "time_step_max": 0.1, "time_step_floor": 0.0001, "residual_in_fp32": False,
    "auto_map": {"AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM"},
}  # fmt: skip
LFM2 = config("lfm2", 2048, 12288, 16, 32, 8, 65536, 128000, rope_theta=1000000.0) | {
    "full_attn_idxs": [2, 5, 8, 10, 12, 14], "conv_L_cache": 3, "conv_bias": False, "block_auto_adjust_ff_dim": True,
    "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "norm_eps": 1e-5,
    "tie_embedding": True, "tie_word_embeddings": True,
}  # fmt: skip
GRANITE = config("granitemoehybrid", 4096, 768, 40, 32, 8, 100352, 131072) | {
    "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
    "num_local_experts": 72, "num_experts_per_tok": 10, "shared_intermediate_size": 1536, "mamba_n_heads": 128,
    "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_conv_bias": True, "mamba_proj_bias": False, "position_embedding_type": "nope", "tie_word_embeddings": True,
    "attention_multiplier": 0.0078125, "embedding_multiplier": 12, "residual_multiplier": 0.22, "logits_scaling": 16,
}  # fmt: skip
FALCON = config("falcon_h1", 3072, 12288, 44, 12, 2, 130048, 262144, head_dim=128, rope_theta=100000000000.0) | {
    "mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_d_state": 256, "mamba_n_groups": 1,
    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False, "mamba_rms_norm": False,
}  # fmt: skip
FULL = (4, 8, 12, 16, 20, 24, 27)
"""Layers of Kimi-Linear with full attention, counted from 1."""
KIMI: dict[str, Any] = config("kimi_linear", 2304, 9216, 27, 32, 32, 163840, 0) | {
    "model_max_length": 1048576, "head_dim": 72, "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True,
    "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024,
    "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 2.446, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "linear_attn_config": {
        "full_attn_layers": list(FULL), "kda_layers": [layer for layer in range(1, 28) if layer not in FULL],
        "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
    },
    "auto_map": {"AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM"},
}  # fmt: skip
del KIMI["max_position_embeddings"]


def _mamba2(at: str, hidden: int, *, heads: int, head_dim: int, groups: int, states: int, normed: bool) -> Tensors:
    inner = heads * head_dim
    mixed = inner + 2 * groups * states
    tensors = linear(f"{at}in_proj", inner + mixed + heads, hidden) | linear(f"{at}out_proj", hidden, inner)
    tensors |= {f"{at}{name}": (heads,) for name in ("A_log", "D", "dt_bias")}
    tensors |= {f"{at}conv1d.weight": (mixed, 1, 4), f"{at}conv1d.bias": (mixed,)}
    return tensors | (norms(at, inner, "norm") if normed else {})


def _nemotron() -> Tensors:
    tensors = {"backbone.embeddings.weight": (131072, 4480), "backbone.norm_f.weight": (4480,)}
    tensors |= linear("lm_head", 131072, 4480)
    for layer, kind in enumerate(PATTERN):
        at = f"backbone.layers.{layer}."
        tensors |= norms(at, 4480, "norm")
        if kind == "M":
            tensors |= _mamba2(f"{at}mixer.", 4480, heads=128, head_dim=80, groups=8, states=128, normed=True)
        elif kind == "*":
            tensors |= attention(f"{at}mixer.", NEMOTRON)
        else:
            tensors |= linear(f"{at}mixer.up_proj", 15680, 4480) | linear(f"{at}mixer.down_proj", 4480, 15680)
    return tensors


def _lfm2() -> Tensors:
    tensors = {"model.embed_tokens.weight": (65536, 2048), "model.embedding_norm.weight": (2048,)}
    for layer in range(16):
        at = f"model.layers.{layer}."
        tensors |= norms(at, 2048, "operator_norm", "ffn_norm")
        tensors |= gated(f"{at}feed_forward.", 2048, 8192, ("w1", "w3", "w2"))
        if layer in LFM2["full_attn_idxs"]:
            names = "q_layernorm", "k_layernorm"
            tensors |= attention(f"{at}self_attn.", LFM2, normed=64, out="out_proj", norm_names=names)
        else:
            tensors |= linear(f"{at}conv.in_proj", 3 * 2048, 2048) | linear(f"{at}conv.out_proj", 2048, 2048)
            tensors |= {f"{at}conv.conv.weight": (2048, 1, 3)}
    return tensors


def _granite() -> Tensors:
    tensors = ends(GRANITE)
    for layer, kind in enumerate(GRANITE["layer_types"]):
        at = f"model.layers.{layer}."
        tensors |= norms(at, 4096, *NORMS) | linear(f"{at}block_sparse_moe.router.layer", 72, 4096)
        tensors |= {f"{at}block_sparse_moe.input_linear.weight": (72, 2 * 768, 4096)}
        tensors |= {f"{at}block_sparse_moe.output_linear.weight": (72, 4096, 768)}
        tensors |= linear(f"{at}shared_mlp.input_linear", 2 * 1536, 4096)
        tensors |= linear(f"{at}shared_mlp.output_linear", 4096, 1536)
        if kind == "attention":
            tensors |= attention(f"{at}self_attn.", GRANITE)
        else:
            tensors |= _mamba2(f"{at}mamba.", 4096, heads=128, head_dim=64, groups=1, states=128, normed=True)
    return tensors


def _falcon() -> Tensors:
    tensors = {"model.embed_tokens.weight": (130048, 3072), "model.final_layernorm.weight": (3072,)}
    tensors |= linear("lm_head", 130048, 3072)
    for layer in range(44):
        at = f"model.layers.{layer}."
        tensors |= norms(at, 3072, "input_layernorm", "pre_ff_layernorm") | attention(f"{at}self_attn.", FALCON)
        tensors |= gated(f"{at}feed_forward.", 3072, 12288)
        tensors |= _mamba2(f"{at}mamba.", 3072, heads=24, head_dim=128, groups=1, states=256, normed=False)
    return tensors


def _kimi() -> Tensors:
    tensors = ends(KIMI)
    for layer in range(27):
        at = f"model.layers.{layer}."
        tensors |= norms(at, 2304, *NORMS)
        tensors |= _kimi_full(f"{at}self_attn.") if layer + 1 in FULL else _kimi_delta(f"{at}self_attn.")
        if layer < 1:
            tensors |= gated(f"{at}mlp.", 2304, 9216)
        else:
            c = KIMI | {"n_routed_experts": 256}
            tensors |= sparse(f"{at}block_sparse_moe.", c, ("w1", "w3", "w2"))
    return tensors


def _kimi_full(at: str) -> Tensors:
    return (
        linear(f"{at}q_proj", 32 * 192, 2304)
        | linear(f"{at}kv_a_proj_with_mqa", 512 + 64, 2304)
        | linear(f"{at}kv_b_proj", 32 * 256, 512)
        | linear(f"{at}o_proj", 2304, 32 * 128)
        | norms(at, 512, "kv_a_layernorm")
    )


def _kimi_delta(at: str) -> Tensors:
    tensors = linear(f"{at}o_proj", 2304, 4096) | linear(f"{at}b_proj", 32, 2304) | norms(at, 128, "o_norm")
    for name in "qkv":
        tensors |= linear(f"{at}{name}_proj", 4096, 2304) | {f"{at}{name}_conv1d.weight": (4096, 1, 4)}
    for name in "fg":
        tensors |= linear(f"{at}{name}_a_proj", 128, 2304) | linear(f"{at}{name}_b_proj", 4096, 128)
    return tensors | {f"{at}A_log": (1, 1, 32, 1), f"{at}dt_bias": (4096,)}


def _states(layers: int, channels: int, inputs: int, numbers: int) -> int:
    """Return the bytes of one state: so many inputs of a convolution in bf16, and numbers of a recurrence in fp32."""
    return layers * (channels * inputs * 2 + numbers * 4)


HYBRID = (
    Published(
        "Qwen/Qwen3-Next-80B-A3B-Instruct", "gated delta net, 512 experts, one MTP layer", QWEN3_NEXT,
        lambda: headers(qwen3_next()), f"{CARD}; MTP: {SHARED}", 12 * 2 * 2 * 256 * 2,
        state_bytes=_states(36, 2 * 2048 + 4096, 3, 32 * 128 * 128),
    ),
    Published(
        "Qwen/Qwen3.5-9B", "text of a multimodal checkpoint: gated delta net, one MTP layer", QWEN35,
        lambda: headers(qwen3_5()), f"{DEFAULTS}; MTP: {SHARED}", 8 * 2 * 4 * 256 * 2,
        state_bytes=_states(24, 2 * 2048 + 4096, 3, 32 * 128 * 128),
    ),
    Published(
        "Qwen/Qwen3.5-35B-A3B", "text of a multimodal checkpoint: gated delta net, 256 experts, one MTP layer",
        QWEN35_MOE, lambda: headers(qwen3_5_moe()), f"{DEFAULTS}; MTP: {SHARED}", 10 * 2 * 2 * 256 * 2,
        state_bytes=_states(30, 2 * 2048 + 4096, 3, 32 * 128 * 128),
    ),
    Published(
        "nvidia/NVIDIA-Nemotron-Nano-9B-v2", "Mamba-2, MLPs and attention as layers of their own", NEMOTRON,
        lambda: headers(_nemotron()), QUOTED, 4 * 2 * 8 * 128 * 2,
        state_bytes=_states(27, 128 * 80 + 2 * 8 * 128, 3, 128 * 80 * 128),
    ),
    Published(
        "ibm-granite/granite-4.0-h-small", "Mamba-2, 72 experts", GRANITE, lambda: headers(_granite()), QUOTED,
        4 * 2 * 8 * 128 * 2, state_bytes=_states(36, 128 * 64 + 2 * 128, 3, 128 * 64 * 128),
    ),
    Published(
        "tiiuae/Falcon-H1-7B-Instruct", "Mamba-2 and attention in every layer", FALCON, lambda: headers(_falcon()),
        QUOTED, 44 * 2 * 2 * 128 * 2, state_bytes=_states(44, 3072 + 2 * 256, 3, 24 * 128 * 256),
    ),
    Published(
        "LiquidAI/LFM2-1.2B", "short convolutions", LFM2, lambda: headers(_lfm2()), CARD, 6 * 2 * 8 * 64 * 2,
        state_bytes=_states(10, 2048, 2, 0), parameters=1_170_340_608,
    ),
    Published(
        "moonshotai/Kimi-Linear-48B-A3B-Instruct", "Kimi delta attention, latent attention, 256 experts", KIMI,
        lambda: headers(_kimi()), CARD, 7 * 32 * (192 + 128) * 2, state_bytes=_states(20, 3 * 4096, 3, 32 * 128 * 128),
    ),
)  # fmt: skip
