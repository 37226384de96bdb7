"""Configs of published bases and drafts.

Bases and EAGLE heads have the dimensions of their published configs; EAGLE heads are checked against the published
sizes. Accelerators take `emb_dim` and the vocabulary from their base; their widths and numbers of heads are to the best
of our knowledge where no published notes state them.
"""

from typing import Any, NamedTuple


def llama(*sizes: int, **more: Any) -> dict[str, Any]:
    hidden, inner, layers, heads, kv_heads, vocab = sizes
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        **more,
    }


def opt(hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "opt",
        "hidden_size": hidden,
        "word_embed_proj_dim": hidden,
        "ffn_dim": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }


BASES: dict[str, dict[str, Any]] = {
    "facebook/opt-6.7b": opt(4096, 16384, 32, 32),
    "llama-7b": llama(4096, 11008, 32, 32, 32, 32000),
    "llama-13b": llama(5120, 13824, 40, 40, 40, 32000),
    "vicuna-33b": llama(6656, 17920, 60, 52, 52, 32000),
    "llama2-70b": llama(8192, 28672, 80, 64, 8, 32000),
    "codellama-34b": llama(8192, 22016, 48, 64, 8, 32000),
    "llama3-8b": llama(4096, 14336, 32, 32, 8, 128256),
    "llama3-70b": llama(8192, 28672, 80, 64, 8, 128256),
    "mixtral-8x7b": llama(4096, 14336, 32, 32, 8, 32000, model_type="mixtral", num_local_experts=8,
                          num_experts_per_tok=2),
    "qwen2-7b": llama(3584, 18944, 28, 28, 4, 152064, model_type="qwen2"),
    "qwen2-72b": llama(8192, 29568, 80, 64, 8, 152064, model_type="qwen2"),
    "granite-3b-code": llama(2560, 10240, 32, 32, 32, 49152, attention_bias=True, mlp_bias=True,
                             tie_word_embeddings=True),
    "granite-8b-code": llama(4096, 14336, 36, 32, 8, 49152, attention_bias=True, mlp_bias=True,
                             tie_word_embeddings=True),
    "granite-7b": llama(4096, 11008, 32, 32, 32, 32008),
    "granite-20b-code": {"model_type": "gpt_bigcode", "n_embd": 6144, "n_inner": 24576, "n_layer": 52, "n_head": 48,
                         "n_positions": 8192, "vocab_size": 49152, "multi_query": True, "tie_word_embeddings": True,
                         "bos_token_id": 0, "eos_token_id": 0},
    "deepseek-v3.2": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "vocab_size": 129280, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "num_nextn_predict_layers": 1,
    },
}  # fmt: skip
"""DeepSeek-V3.2-Exp with V3's type: its own type is not supported (sparse attention)."""
PUBLISHED = {
    "facebook/opt-6.7b": 6_658_473_984,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
}
"""Numbers of parameters, from the Hub."""


class Draft(NamedTuple):
    """A draft: its base and its config."""

    base: str
    config: dict[str, Any]
    billions: float = 0.0


def accelerator(base: str, inner: int, heads: int, *, tied: bool) -> Draft:
    theirs = BASES[base]
    return Draft(
        base,
        {
            "model_type": "mlp_speculator",
            "emb_dim": theirs.get("hidden_size") or theirs["n_embd"],
            "inner_dim": inner,
            "n_predict": heads,
            "vocab_size": theirs["vocab_size"],
            "tie_weights": tied,
            "scale_input": tied,
        },
    )


def eagle_head(base: str, billions: float, **more: Any) -> Draft:
    theirs = {**BASES[base], "model_type": "llama", "num_hidden_layers": 1}
    return Draft(base, {**theirs, **more}, billions)


ACCELERATORS = {
    "llama-13b-accelerator": accelerator("llama-13b", 4096, 3, tied=False),
    "llama3-8b-accelerator": accelerator("llama3-8b", 3072, 4, tied=False),
    "codellama-34b-accelerator": accelerator("codellama-34b", 8192, 5, tied=True),
    "llama2-70b-accelerator": accelerator("llama2-70b", 8192, 4, tied=True),
    "llama3-70b-accelerator": accelerator("llama3-70b", 8192, 4, tied=True),
    "granite-3b-code-instruct-accelerator": accelerator("granite-3b-code", 3072, 5, tied=True),
    "granite-8b-code-instruct-accelerator": accelerator("granite-8b-code", 4096, 5, tied=True),
    "granite-7b-instruct-accelerator": accelerator("granite-7b", 4096, 5, tied=False),
    "granite-20b-code-instruct-accelerator": accelerator("granite-20b-code", 4096, 4, tied=True),
}
EAGLES = {
    "EAGLE-Vicuna-7B-v1.3": eagle_head("llama-7b", 0.24),
    "EAGLE-Vicuna-13B-v1.3": eagle_head("llama-13b", 0.37),
    "EAGLE-Vicuna-33B-v1.3": eagle_head("vicuna-33b", 0.56),
    "EAGLE-llama2-chat-7B": eagle_head("llama-7b", 0.24),
    "EAGLE-llama2-chat-13B": eagle_head("llama-13b", 0.37),
    "EAGLE-llama2-chat-70B": eagle_head("llama2-70b", 0.99),
    "EAGLE-mixtral-instruct-8x7B": eagle_head("mixtral-8x7b", 0.28, num_key_value_heads=32),
    "EAGLE-LLaMA3-Instruct-8B": eagle_head("llama3-8b", 0.25, bias=False),
    "EAGLE-LLaMA3-Instruct-70B": eagle_head("llama3-70b", 0.99, bias=False),
    "EAGLE-LLaMA3.1-Instruct-8B": eagle_head("llama3-8b", 0.25, bias=False),
    "EAGLE-Qwen2-7B-Instruct": eagle_head("qwen2-7b", 0.26),
    "EAGLE-Qwen2-72B-Instruct": eagle_head("qwen2-72b", 1.05),
}
