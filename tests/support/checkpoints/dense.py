"""Published checkpoints of models with attention in every layer and one MLP each."""

from typing import Any

from tests.support.checkpoints.entry import CARD, Published
from tests.support.checkpoints.stored import (
    awq,
    compressed,
    described,
    fp8_blocks,
    fp8_rows,
    fp8_static,
    gptq,
    headers,
    w4a16,
)
from tests.support.checkpoints.tensors import (
    NORMS,
    Tensors,
    attention,
    dense,
    ends,
    gated,
    linear,
    norms,
)


def config(kind: str, *sizes: int, **more: Any) -> dict[str, Any]:
    """*sizes*: hidden, MLP, layers, heads, heads of K and V, vocabulary, positions."""
    hidden, inner, layers, heads, kv_heads, vocab, positions = sizes
    return {
        "model_type": kind, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
        "max_position_embeddings": positions, "torch_dtype": "bfloat16", "tie_word_embeddings": False, **more,
    }  # fmt: skip


LLAMA3_ROPE = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip
LLAMA_1B = config("llama", 2048, 8192, 16, 32, 8, 128256, 131072, head_dim=64, **LLAMA3_ROPE) | {
    "tie_word_embeddings": True
}
LLAMA_8B = config("llama", 4096, 14336, 32, 32, 8, 128256, 131072, **LLAMA3_ROPE)
LLAMA_70B = config("llama", 8192, 28672, 80, 64, 8, 128256, 131072, **LLAMA3_ROPE)
QWEN3_8B = config("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, head_dim=128, rope_theta=1000000)
QWEN25_7B = config("qwen2", 3584, 18944, 28, 28, 4, 152064, 32768, rope_theta=1000000.0, torch_dtype="float16")
SMOLLM3 = config("smollm3", 2048, 11008, 36, 16, 4, 128256, 65536, rope_theta=5000000.0) | {
    "tie_word_embeddings": True,
    "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(36)],
}
OLMO2 = config("olmo2", 4096, 11008, 32, 32, 32, 100352, 4096, rope_theta=500000)
OLMO3 = config("olmo3", 4096, 11008, 32, 32, 32, 100278, 65536, rope_theta=500000, sliding_window=4096) | {
    "layer_types": ["full_attention" if layer % 4 == 3 else "sliding_attention" for layer in range(32)],
    "rope_scaling": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0,
        "beta_slow": 1.0, "attention_factor": 1.2079441541679836,
    },
}  # fmt: skip
PHI4_MINI = config("phi3", 3072, 8192, 32, 24, 8, 200064, 131072, partial_rotary_factor=0.75) | {
    "tie_word_embeddings": True,
    "original_max_position_embeddings": 4096,
    "sliding_window": 262144,
    "pad_token_id": 199999,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 48},
    "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True, "actorder": None}
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
FP8_ROWS = FP8 | {"strategy": "channel"}
FP8_TOKENS = FP8 | {"strategy": "token", "dynamic": True}
BLOCKS = described("fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])


def _olmo(c: dict[str, Any]) -> Tensors:
    tensors, hidden = ends(c), 4096
    for layer in range(32):
        at = f"model.layers.{layer}."
        tensors |= attention(f"{at}self_attn.", c, normed=hidden) | gated(f"{at}mlp.", hidden, 11008)
        tensors |= norms(at, hidden, "post_attention_layernorm", "post_feedforward_layernorm")
    return tensors


def _phi4() -> Tensors:
    tensors, hidden = ends(PHI4_MINI), 3072
    for layer in range(32):
        at = f"model.layers.{layer}."
        tensors |= linear(f"{at}self_attn.qkv_proj", (24 + 2 * 8) * 128, hidden)
        tensors |= linear(f"{at}self_attn.o_proj", hidden, hidden) | norms(at, hidden, *NORMS)
        tensors |= linear(f"{at}mlp.gate_up_proj", 2 * 8192, hidden) | linear(f"{at}mlp.down_proj", hidden, 8192)
    return tensors


DENSE = (
    Published(
        "meta-llama/Llama-3.2-1B-Instruct", "dense, tied head", LLAMA_1B, lambda: headers(dense(LLAMA_1B)), CARD,
        16 * 2 * 8 * 64 * 2, parameters=1_235_814_400,
    ),
    Published(
        "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8", "fp8, a scale per tensor (compressed-tensors)",
        LLAMA_8B | {"quantization_config": compressed("float-quantized", FP8, FP8)},
        lambda: headers(dense(LLAMA_8B), fp8_static), CARD, 32 * 2 * 8 * 128 * 2, quantized=7 * 32,
        parameters=8_030_261_248,
    ),
    Published(
        "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic", "fp8, a scale per row (compressed-tensors)",
        LLAMA_8B | {"quantization_config": compressed("float-quantized", FP8_ROWS, FP8_TOKENS)},
        lambda: headers(dense(LLAMA_8B), fp8_rows), CARD, 32 * 2 * 8 * 128 * 2, quantized=7 * 32,
        parameters=8_030_261_248,
    ),
    Published(
        "RedHatAI/Llama-3.3-70B-Instruct-quantized.w4a16", "int4, groups of 128 (compressed-tensors)",
        LLAMA_70B | {"quantization_config": compressed("pack-quantized", INT4, None)},
        lambda: headers(dense(LLAMA_70B), w4a16), CARD, 80 * 2 * 8 * 128 * 2, quantized=7 * 80,
        parameters=70_553_706_496,
    ),
    Published(
        "Qwen/Qwen3-8B-FP8", "fp8, blocks of 128 x 128", QWEN3_8B | {"quantization_config": BLOCKS},
        lambda: headers(dense(QWEN3_8B, normed=128), fp8_blocks), CARD, 36 * 2 * 8 * 128 * 2, quantized=7 * 36,
    ),
    Published(
        "Qwen/Qwen3-8B-AWQ", "int4 (AWQ)",
        QWEN3_8B | {
            "torch_dtype": "float16",
            "quantization_config": described("awq", bits=4, group_size=128, version="gemm", zero_point=True,
                                             modules_to_not_convert=None),
        },
        lambda: headers(dense(QWEN3_8B, normed=128), awq), CARD, 36 * 2 * 8 * 128 * 2, quantized=7 * 36,
    ),
    Published(
        "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "int4 (GPTQ)",
        QWEN25_7B | {
            "quantization_config": described("gptq", bits=4, group_size=128, desc_act=False, sym=True,
                                             true_sequential=True, damp_percent=0.01, static_groups=False),
        },
        lambda: headers(dense(QWEN25_7B), gptq), CARD, 28 * 2 * 4 * 128 * 2, quantized=7 * 28,
        parameters=7_615_616_512,
    ),
    Published(
        "microsoft/Phi-4-mini-instruct", "dense, rotary scaling longrope", PHI4_MINI, lambda: headers(_phi4()), CARD,
        32 * 2 * 8 * 128 * 2, serve="--max-model-len 4096", max_model_len=4096, parameters=3_836_021_760,
    ),
    Published(
        "allenai/OLMo-2-1124-7B-Instruct", "dense, norms after the blocks", OLMO2, lambda: headers(_olmo(OLMO2)), CARD,
        32 * 2 * 32 * 128 * 2, parameters=7_298_617_344,
    ),
    Published(
        "allenai/Olmo-3-7B-Instruct", "dense, sliding windows", OLMO3, lambda: headers(_olmo(OLMO3)), CARD,
        32 * 2 * 32 * 128 * 2,
    ),
    Published(
        "HuggingFaceTB/SmolLM3-3B", "dense, no positions in every fourth layer", SMOLLM3,
        lambda: headers(dense(SMOLLM3)), CARD, 36 * 2 * 4 * 128 * 2,
    ),
)  # fmt: skip
