"""Gemma 4: sliding layers with heads of 256, and full ones with heads of 512.

In the large models the keys of full layers are the values, too. The small ones add an embedding of each token to every
layer, and their last layers use the keys and values of earlier ones; the unused projections are in the checkpoint.
"""

from typing import Any

from tests.support.checkpoints.entry import DEFAULTS, QUOTED, Published
from tests.support.checkpoints.stored import headers
from tests.support.checkpoints.tensors import NORMS, Tensors, gated, linear, norms

GEMMA_NORMS = (*NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
EXPERT_NORMS = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
AT = "model.language_model."


def _whole(hidden: int, inner: int, layers: int, heads: tuple[int, int, int], **more: Any) -> dict[str, Any]:
    """*heads*: of queries, of K and V in sliding layers, of K and V in full ones; 0: as many as in sliding ones."""
    period = 6 if heads[2] else 5
    text = {
        "model_type": "gemma4_text", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1],
        "num_global_key_value_heads": heads[2] or None,
        "head_dim": 256, "global_head_dim": 512, "attention_k_eq_v": True, "sliding_window": 1024,
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "final_logit_softcapping": 30.0,
        "use_bidirectional_attention": "vision", "vocab_size": 262144, "max_position_embeddings": 262144,
        "tie_word_embeddings": True, "dtype": "bfloat16",
        "layer_types": [
            "full_attention" if layer % period == period - 1 else "sliding_attention" for layer in range(layers)
        ],
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        }, **more,
    }  # fmt: skip
    return {
        "model_type": "gemma4", "dtype": "bfloat16", "eos_token_id": [1, 106], "tie_word_embeddings": True,
        "image_token_id": 258880, "audio_config": None, "text_config": text,
        "vision_config": {
            "model_type": "gemma4_vision", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
            "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 72, "standardize": True,
        },
    }  # fmt: skip


GEMMA4_31B = _whole(5376, 21504, 60, (32, 16, 4), enable_moe_block=False)
GEMMA4_26B = _whole(
    2816, 2112, 30, (16, 8, 2), enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704
)
PER_LAYER = 256
GEMMA4_E2B = _whole(
    1536, 6144, 35, (8, 1, 0), enable_moe_block=False, attention_k_eq_v=False, sliding_window=512,
    hidden_size_per_layer_input=PER_LAYER, vocab_size_per_layer_input=262144, num_kv_shared_layers=20,
    use_double_wide_mlp=True, use_bidirectional_attention=None, max_position_embeddings=131072,
) | {"audio_config": {"model_type": "gemma4_audio"}}  # fmt: skip


def _attention(at: str, c: dict[str, Any], *, is_full: bool) -> Tensors:
    hidden, size = c["hidden_size"], 512 if is_full else 256
    rows = ((is_full and c["num_global_key_value_heads"]) or c["num_key_value_heads"]) * size
    tensors = linear(f"{at}q_proj", c["num_attention_heads"] * size, hidden) | linear(f"{at}k_proj", rows, hidden)
    tensors |= linear(f"{at}o_proj", hidden, c["num_attention_heads"] * size) | norms(at, size, "q_norm", "k_norm")
    return tensors if is_full and c["attention_k_eq_v"] else tensors | linear(f"{at}v_proj", rows, hidden)


def _experts(at: str, hidden: int) -> Tensors:
    tensors = norms(at, hidden, *EXPERT_NORMS) | linear(f"{at}router.proj", 128, hidden)
    tensors |= {f"{at}router.scale": (hidden,), f"{at}router.per_expert_scale": (128,)}
    return tensors | {
        f"{at}experts.gate_up_proj": (128, 2 * 704, hidden),
        f"{at}experts.down_proj": (128, hidden, 704),
    }


def _per_layer(layers: int, hidden: int) -> Tensors:
    """The embeddings of tokens for every layer, and what adds them."""
    tensors: Tensors = {f"{AT}embed_tokens_per_layer.weight": (262144, layers * PER_LAYER)}
    tensors |= linear(f"{AT}per_layer_model_projection", layers * PER_LAYER, hidden)
    tensors |= norms(AT, PER_LAYER, "per_layer_projection_norm")
    for layer in range(layers):
        at = f"{AT}layers.{layer}."
        tensors |= linear(f"{at}per_layer_input_gate", PER_LAYER, hidden)
        tensors |= linear(f"{at}per_layer_projection", hidden, PER_LAYER)
        tensors |= norms(at, hidden, "post_per_layer_input_norm")
    return tensors | linear("model.audio_tower.output_proj", 1536, 1024, bias=True)


def _tensors(whole: dict[str, Any]) -> Tensors:
    c = whole["text_config"]
    hidden = c["hidden_size"]
    tensors: Tensors = {f"{AT}embed_tokens.weight": (262144, hidden), f"{AT}norm.weight": (hidden,)}
    for layer, kind in enumerate(c["layer_types"]):
        at = f"{AT}layers.{layer}."
        tensors |= _attention(f"{at}self_attn.", c, is_full=kind == "full_attention")
        is_wide = layer >= c["num_hidden_layers"] - c["num_kv_shared_layers"]
        tensors |= gated(f"{at}mlp.", hidden, c["intermediate_size"] * (2 if is_wide else 1))
        tensors |= norms(at, hidden, *GEMMA_NORMS)
        tensors |= {f"{at}layer_scalar": (1,)} | (_experts(at, hidden) if c["enable_moe_block"] else {})
    if c["hidden_size_per_layer_input"]:
        tensors |= _per_layer(c["num_hidden_layers"], hidden)
    for layer in range(27):
        at = f"model.vision_tower.encoder.layers.{layer}.self_attn."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors |= linear(f"{at}{name}.linear", 1152, 1152)
    return tensors | linear("model.embed_vision.embedding_projection", hidden, 1152)


GEMMA4 = (
    Published(
        "google/gemma-4-E2B-it", "text of a multimodal checkpoint, sliding windows, embeddings in each layer",
        GEMMA4_E2B, lambda: headers(_tensors(GEMMA4_E2B)), f"{QUOTED}, and {DEFAULTS}",
        28 * 2 * 256 * 2 + 7 * 2 * 512 * 2, unread=r"layers\.(1[5-9]|[23]\d)\.self_attn\.(k|v)_",
    ),
    Published(
        "google/gemma-4-31B-it", "text of a multimodal checkpoint, sliding windows", GEMMA4_31B,
        lambda: headers(_tensors(GEMMA4_31B)), f"{QUOTED}, and {DEFAULTS}",
        50 * 2 * 16 * 256 * 2 + 10 * 2 * 4 * 512 * 2,
    ),
    Published(
        "google/gemma-4-26B-A4B-it", "text of a multimodal checkpoint, sliding windows, 128 experts", GEMMA4_26B,
        lambda: headers(_tensors(GEMMA4_26B)), f"{QUOTED}, and {DEFAULTS}",
        25 * 2 * 8 * 256 * 2 + 5 * 2 * 2 * 512 * 2,
    ),
)  # fmt: skip
