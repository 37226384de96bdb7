"""Published checkpoints of models with experts and attention in every layer."""

from typing import Any

from tests.support.checkpoints.dense import BLOCKS, config
from tests.support.checkpoints.entry import CARD, SHARED, Published
from tests.support.checkpoints.stored import Headers, described, fp8_blocks, headers
from tests.support.checkpoints.tensors import NORMS, Tensors, attention, ends, experts, gated, linear, norms

GPT_OSS: dict[str, Any] = config("gpt_oss", 2880, 2880, 24, 64, 8, 201088, 131072, head_dim=64) | {
    "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": True,
    "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(24)],
    "rope_theta": 150000, "swiglu_limit": 7.0, "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "quantization_config": described("mxfp4", modules_to_not_convert=[
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ]),
}  # fmt: skip
MIXTRAL = config("mixtral", 4096, 14336, 32, 32, 8, 32000, 32768, rope_theta=1000000.0, sliding_window=None) | {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
GLM_AIR = config("glm4_moe", 4096, 10944, 46, 96, 8, 151552, 131072, head_dim=128, rope_theta=1000000) | {
    "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 1, "attention_bias": True, "use_qk_norm": False, "partial_rotary_factor": 0.5,
    "num_nextn_predict_layers": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
}  # fmt: skip
DEEPSEEK_V3 = config("deepseek_v3", 7168, 18432, 61, 128, 128, 129280, 163840, rope_theta=10000) | {
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "num_nextn_predict_layers": 1, "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "quantization_config": BLOCKS,
}  # fmt: skip
QWEN3_30B = config("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, 262144, head_dim=128, rope_theta=10000000) | {
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


def _gpt_oss() -> Tensors:
    tensors, hidden = ends(GPT_OSS), 2880
    for layer in range(24):
        at = f"model.layers.{layer}."
        tensors |= attention(f"{at}self_attn.", GPT_OSS, bias="qkvo") | norms(at, hidden, *NORMS)
        tensors |= linear(f"{at}mlp.router", 32, hidden, bias=True) | {f"{at}self_attn.sinks": (64,)}
        for name, outputs in (("gate_up_proj", 2 * 2880), ("down_proj", 2880)):
            each = f"{at}mlp.experts.{name}"
            tensors |= {f"{each}_blocks": (32, outputs, 90, 16), f"{each}_scales": (32, outputs, 90)}
            tensors |= {f"{each}_bias": (32, outputs)}
    return tensors


def _mixtral() -> Tensors:
    tensors = ends(MIXTRAL)
    for layer in range(32):
        at = f"model.layers.{layer}."
        tensors |= attention(f"{at}self_attn.", MIXTRAL) | norms(at, 4096, *NORMS)
        tensors |= linear(f"{at}block_sparse_moe.gate", 8, 4096)
        tensors |= experts(f"{at}block_sparse_moe.experts.", 8, 4096, 14336, ("w1", "w3", "w2"))
    return tensors


def _qwen3() -> Tensors:
    tensors = ends(QWEN3_30B)
    for layer in range(48):
        at = f"model.layers.{layer}."
        tensors |= attention(f"{at}self_attn.", QWEN3_30B, normed=128) | norms(at, 2048, *NORMS)
        tensors |= linear(f"{at}mlp.gate", 128, 2048) | experts(f"{at}mlp.experts.", 128, 2048, 768)
    return tensors


USUAL = ("gate_proj", "up_proj", "down_proj")


def sparse(at: str, c: dict[str, Any], names: tuple[str, str, str] = USUAL) -> Tensors:
    """DeepSeek-V3's experts: a router with a bias that corrects its scores, and a shared expert."""
    hidden, inner, count = c["hidden_size"], c["moe_intermediate_size"], c["n_routed_experts"]
    tensors = linear(f"{at}gate", count, hidden) | {f"{at}gate.e_score_correction_bias": (count,)}
    return (
        tensors | experts(f"{at}experts.", count, hidden, inner, names) | gated(f"{at}shared_experts.", hidden, inner)
    )


def _latent_attention(at: str) -> Tensors:
    """DeepSeek-V3's: queries, keys and values of low rank."""
    return (
        linear(f"{at}q_a_proj", 1536, 7168)
        | linear(f"{at}q_b_proj", 128 * 192, 1536)
        | linear(f"{at}kv_a_proj_with_mqa", 512 + 64, 7168)
        | linear(f"{at}kv_b_proj", 128 * 256, 512)
        | linear(f"{at}o_proj", 7168, 128 * 128)
        | norms(at, 1536, "q_a_layernorm")
        | norms(at, 512, "kv_a_layernorm")
    )


def _predicting(at: str, c: dict[str, Any]) -> Tensors:
    """What the layer that predicts a further token has beside a decoder layer."""
    hidden, vocab = c["hidden_size"], c["vocab_size"]
    tensors = linear(f"{at}eh_proj", hidden, 2 * hidden) | norms(at, hidden, "enorm", "hnorm", "shared_head.norm")
    return tensors | linear(f"{at}shared_head.head", vocab, hidden) | {f"{at}embed_tokens.weight": (vocab, hidden)}


def _deepseek() -> Headers:
    tensors = ends(DEEPSEEK_V3)
    for layer in range(62):
        at = f"model.layers.{layer}."
        tensors |= _latent_attention(f"{at}self_attn.") | norms(at, 7168, *NORMS)
        tensors |= gated(f"{at}mlp.", 7168, 18432) if layer < 3 else sparse(f"{at}mlp.", DEEPSEEK_V3)
    tensors |= _predicting("model.layers.61.", DEEPSEEK_V3)
    return headers(tensors, fp8_blocks, kept="eh_proj")


def _glm() -> Tensors:
    tensors = ends(GLM_AIR)
    for layer in range(47):
        at = f"model.layers.{layer}."
        tensors |= attention(f"{at}self_attn.", GLM_AIR, bias="qkv") | norms(at, 4096, *NORMS)
        tensors |= gated(f"{at}mlp.", 4096, 10944) if layer < 1 else sparse(f"{at}mlp.", GLM_AIR)
    return tensors | _predicting("model.layers.46.", GLM_AIR)


EXPERTS = (
    Published(
        "openai/gpt-oss-20b", "32 experts in mxfp4, sliding windows and sinks", GPT_OSS, lambda: headers(_gpt_oss()),
        CARD, 24 * 2 * 8 * 64 * 2, quantized=2 * 24,
    ),
    Published(
        "mistralai/Mixtral-8x7B-Instruct-v0.1", "8 experts", MIXTRAL, lambda: headers(_mixtral()), CARD,
        32 * 2 * 8 * 128 * 2, parameters=46_702_792_704,
    ),
    Published(
        "Qwen/Qwen3-30B-A3B-Instruct-2507", "128 experts", QWEN3_30B, lambda: headers(_qwen3()), CARD,
        48 * 2 * 4 * 128 * 2, parameters=30_532_122_624,
    ),
    Published(
        "zai-org/GLM-4.5-Air", "128 experts, one MTP layer", GLM_AIR, lambda: headers(_glm()), f"{CARD}; MTP: {SHARED}",
        46 * 2 * 8 * 128 * 2,
    ),
    Published(
        "deepseek-ai/DeepSeek-V3", "256 experts, latent attention, fp8 in blocks of 128 x 128, one MTP layer",
        DEEPSEEK_V3, _deepseek, f"{CARD}; MTP: {SHARED}", 61 * 128 * (192 + 128) * 2,
        quantized=5 * 61 + 3 * 3 + 3 * 58,
    ),
)  # fmt: skip
