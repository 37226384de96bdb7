"""Twenty published checkpoints: `config.json`, as far as models are built from it, and the names and shapes of tensors.

Written down from published configs and checkpoints to the best of our knowledge, not fetched. Numbers of parameters are
those of the Hub where they are known. What a config leaves out is the default of its class in `transformers`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tests.support.models.published_models import BASES
from tests.support.published.tensors import (
    Header,
    Store,
    attention,
    awq,
    bf16,
    biases,
    fp8_blocks,
    fp8_rows,
    gated,
    gptq,
    linears,
    norms,
    qkv,
    under,
    vectors,
    whole,
)

Config = dict[str, Any]
NORMS = ("input_layernorm", "post_attention_layernorm")
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
COMPRESSED_FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {
                "num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True,
            },
        }
    },
}  # fmt: skip


class Published(NamedTuple):
    """A checkpoint.

    Attributes:
        config: its `config.json`.
        header: its tensors.
        kv_elements: numbers of keys and values of one token, in all layers.
        kept: linear layers that stay quantised in memory on CPUs.
        unread: prefixes of tensors of other parts: vision, MTP layers.
        parameters: of the language model, where the Hub states them.
        options: of the command that serves it.
    """

    config: Config
    header: Header
    kv_elements: int
    kept: int = 0
    unread: tuple[str, ...] = ()
    parameters: int | None = None
    options: str = ""


def sized(kind: str, *sizes: int, tied: bool = False, **more: Any) -> Config:
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "vocab_size")  # fmt: skip
    return {
        "model_type": kind,
        **dict(zip(keys, sizes, strict=True)),
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,
        "dtype": "bfloat16",
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


def dense(config: Config, store: Store = bf16, *, extra: Header | None = None, names: tuple[str, ...] = NORMS,
          prefix: str = "model", head: str | None = None) -> Header:  # fmt: skip
    """A model of Llama's form; *extra* are more tensors of each layer."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    layer = {
        **norms(hidden, *names),
        **attention(hidden, heads, config["num_key_value_heads"], size, store),
        **gated("mlp", hidden, config["intermediate_size"], store),
        **(extra or {}),
    }
    head = None if config["tie_word_embeddings"] else head or "lm_head"
    return whole([layer] * config["num_hidden_layers"], hidden, config["vocab_size"], prefix=prefix, head=head)


def qwen3_8b(store: Store, quantization: Config) -> Published:
    config = sized("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128, quantization_config=quantization)
    header = dense(config, store, extra=vectors(self_attn__q_norm__weight=128, self_attn__k_norm__weight=128))
    return Published(config, header, 36 * 2 * 8 * 128, kept=36 * 7)


def llama_31_8b() -> Published:
    config = sized("llama", 4096, 14336, 32, 32, 8, 128256, quantization_config=COMPRESSED_FP8)
    return Published(config, dense(config, fp8_rows), 32 * 2 * 8 * 128, kept=32 * 7)


def llama_32_1b() -> Published:
    config = sized("llama", 2048, 8192, 16, 32, 8, 128256, tied=True, head_dim=64)
    return Published(config, dense(config), 16 * 2 * 8 * 64, parameters=1_235_814_400)


def qwen25_7b_gptq() -> Published:
    config = sized("qwen2", 3584, 18944, 28, 28, 4, 152064, quantization_config=GPTQ)
    bias = under("self_attn", biases(linears(qkv(3584, 28, 4, 128))))
    return Published(config, dense(config, gptq, extra=bias), 28 * 2 * 4 * 128, kept=28 * 7)


def mixtral() -> Published:
    config = sized("mixtral", 4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2)
    experts = linears({"gate": (8, 4096)})
    for i in range(8):
        experts |= gated(f"experts.{i}", 4096, 14336, names="w1 w3 w2")
    layer = norms(4096, *NORMS) | attention(4096, 32, 8, 128) | under("block_sparse_moe", experts)
    return Published(config, whole([layer] * 32, 4096, 32000), 32 * 2 * 8 * 128, parameters=46_702_792_704)


def qwen3_moe() -> Published:
    config = sized(
        "qwen3_moe", 2048, 6144, 48, 32, 4, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip
    experts = linears({"gate": (128, 2048)})
    for i in range(128):
        experts |= gated(f"experts.{i}", 2048, 768)
    norm = vectors(self_attn__q_norm__weight=128, self_attn__k_norm__weight=128)
    layer = norms(2048, *NORMS) | attention(2048, 32, 4, 128) | norm | under("mlp", experts)
    return Published(config, whole([layer] * 48, 2048, 151936), 48 * 2 * 4 * 128, parameters=30_532_122_624)


def gpt_oss() -> Published:
    config = sized(
        "gpt_oss", 2880, 2880, 24, 64, 8, 201088, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
        sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 12,
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    )  # fmt: skip
    projections = attention(2880, 64, 8, 64)
    router = linears({"router": (32, 2880)})
    experts: Header = {}
    for name, outputs in (("gate_up_proj", 5760), ("down_proj", 2880)):
        experts[f"{name}_blocks"] = ("U8", (32, outputs, 90, 16))
        experts[f"{name}_scales"] = ("U8", (32, outputs, 90))
        experts[f"{name}_bias"] = ("BF16", (32, outputs))
    layer = {
        **norms(2880, *NORMS), **projections, **biases(projections), **vectors(self_attn__sinks=64),
        **under("mlp", router, biases(router), under("experts", experts)),
    }  # fmt: skip
    return Published(config, whole([layer] * 24, 2880, 201088), 24 * 2 * 8 * 64)


def mla(hidden: int, heads: int, store: Store) -> Header:
    """DeepSeek-V3's attention: ranks 1536 and 512, heads of 128 + 64, values of 128."""
    shapes = {
        "q_a_proj": (1536, hidden), "q_b_proj": (heads * 192, 1536), "kv_a_proj_with_mqa": (576, hidden),
        "kv_b_proj": (heads * 256, 512), "o_proj": (hidden, heads * 128),
    }  # fmt: skip
    return under("self_attn", linears(shapes, store), vectors(q_a_layernorm__weight=1536, kv_a_layernorm__weight=512))


def routed(hidden: int, inner: int, count: int, store: Store) -> Header:
    """Experts of DeepSeek-V3 and GLM-4.5, one of them shared."""
    experts = linears({"gate": (count, hidden)}) | {"gate.e_score_correction_bias": ("F32", (count,))}
    for i in range(count):
        experts |= gated(f"experts.{i}", hidden, inner, store)
    return under("mlp", experts, gated("shared_experts", hidden, inner, store))


def mtp(hidden: int, vocabulary: int) -> Header:
    """What the layer of DeepSeek-V3's and GLM-4.5's heads has besides those of the target."""
    shapes = {"eh_proj": (hidden, 2 * hidden), "embed_tokens": (vocabulary, hidden)}
    head = {"shared_head.head": (vocabulary, hidden)}
    return linears({**shapes, **head}) | norms(hidden, "enorm", "hnorm", "shared_head.norm")


def deepseek_v3() -> Published:
    config = {**BASES["deepseek-v3.2"], "dtype": "bfloat16", "quantization_config": FP8}
    shared = norms(7168, *NORMS) | mla(7168, 128, fp8_blocks)
    sparse = shared | routed(7168, 2048, 256, fp8_blocks)
    layers = [shared | gated("mlp", 7168, 18432, fp8_blocks)] * 3 + [sparse] * 58 + [sparse | mtp(7168, 129280)]
    kept = 61 * 5 + 61 * 3
    header = whole(layers, 7168, 129280)
    return Published(config, header, 61 * 128 * (192 + 128), kept=kept, unread=("model.layers.61.",))


def glm_45_air() -> Published:
    config = sized(
        "glm4_moe", 4096, 10944, 46, 96, 8, 151552, head_dim=128, n_routed_experts=128, n_shared_experts=1,
        num_experts_per_tok=8, moe_intermediate_size=1408, first_k_dense_replace=1, attention_bias=True,
        use_qk_norm=False, num_nextn_predict_layers=1,
    )  # fmt: skip
    shared = (
        norms(4096, *NORMS) | attention(4096, 96, 8, 128) | under("self_attn", biases(linears(qkv(4096, 96, 8, 128))))
    )
    sparse = shared | routed(4096, 1408, 128, bf16)
    layers = [shared | gated("mlp", 4096, 10944)] + [sparse] * 45 + [sparse | mtp(4096, 151552)]
    header = whole(layers, 4096, 151552)
    return Published(config, header, 46 * 2 * 8 * 128, unread=("model.layers.46.",))


def gemma3_12b() -> Published:
    text = {
        "model_type": "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360, "num_attention_heads": 16,
        "num_hidden_layers": 48, "num_key_value_heads": 8, "sliding_window": 1024,
    }  # fmt: skip
    config = {"model_type": "gemma3", "dtype": "bfloat16", "text_config": text, "vision_config": {"image_size": 896}}
    names = (*NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
    norm = vectors(self_attn__q_norm__weight=256, self_attn__k_norm__weight=256)
    sizes = {**text, "head_dim": 256, "vocab_size": 262208, "tie_word_embeddings": True}
    header = dense(sizes, extra=norm, names=names, prefix="language_model.model")
    vision = {"vision_tower.vision_model.post_layernorm.weight": ("BF16", (1152,)),
              "multi_modal_projector.mm_input_projection_weight": ("BF16", (1152, 3840))}  # fmt: skip
    return Published(config, header | vision, 48 * 2 * 8 * 256, unread=("vision_tower.", "multi_modal_projector."))


def mistral_small() -> Published:
    text = sized("mistral", 5120, 32768, 40, 32, 8, 131072, head_dim=128, sliding_window=None)
    config = {
        "model_type": "mistral3",
        "dtype": "bfloat16",
        "text_config": text,
        "vision_config": {"model_type": "pixtral"},
    }
    header = dense(text, prefix="language_model.model", head="language_model.lm_head")
    return Published(config, header, 40 * 2 * 8 * 128, parameters=23_572_403_200)


def phi4_mini() -> Published:
    rope = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 48}  # the published factors differ
    config = sized(
        "phi3", 3072, 8192, 32, 24, 8, 200064, tied=True, partial_rotary_factor=0.75, rope_scaling=rope,
        original_max_position_embeddings=4096, max_position_embeddings=131072,
    )  # fmt: skip
    projections = {"self_attn.qkv_proj": (5120, 3072), "self_attn.o_proj": (3072, 3072),
                   "mlp.gate_up_proj": (16384, 3072), "mlp.down_proj": (3072, 8192)}  # fmt: skip
    header = whole([norms(3072, *NORMS) | linears(projections)] * 32, 3072, 200064, head=None)
    return Published(config, header, 32 * 2 * 8 * 128, parameters=3_836_021_760, options="--max-model-len 4096")


def olmo(kind: str, vocabulary: int, parameters: int | None = None, **more: Any) -> Published:
    config = sized(kind, 4096, 11008, 32, 32, 32, vocabulary, **more)
    names = ("post_attention_layernorm", "post_feedforward_layernorm")
    norm = vectors(self_attn__q_norm__weight=4096, self_attn__k_norm__weight=4096)
    header = dense(config, extra=norm, names=names)
    return Published(config, header, 32 * 2 * 32 * 128, parameters=parameters)


OLMO3_LAYERS = (["sliding_attention"] * 3 + ["full_attention"]) * 8
DENSE_AND_MIXED: Mapping[str, Published] = {
    "openai/gpt-oss-20b": gpt_oss(),
    "Qwen/Qwen3-8B-FP8": qwen3_8b(fp8_blocks, FP8),
    "Qwen/Qwen3-8B-AWQ": qwen3_8b(awq, AWQ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic": llama_31_8b(),
    "deepseek-ai/DeepSeek-V3": deepseek_v3(),
    "google/gemma-3-12b-it": gemma3_12b(),
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": mistral_small(),
    "meta-llama/Llama-3.2-1B": llama_32_1b(),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": qwen25_7b_gptq(),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": mixtral(),
    "Qwen/Qwen3-30B-A3B": qwen3_moe(),
    "microsoft/Phi-4-mini-instruct": phi4_mini(),
    "zai-org/GLM-4.5-Air": glm_45_air(),
    "allenai/OLMo-2-1124-7B-Instruct": olmo("olmo2", 100352, 7_298_617_344),
    "allenai/Olmo-3-7B-Instruct": olmo("olmo3", 100278, sliding_window=4096, layer_types=OLMO3_LAYERS),
}
"""Models with attention alone."""
