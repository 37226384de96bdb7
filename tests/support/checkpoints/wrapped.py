"""Published multimodal checkpoints, whose language model is served alone."""

from typing import Any

from tests.support.checkpoints.dense import config
from tests.support.checkpoints.entry import CARD, DEFAULTS, Published
from tests.support.checkpoints.stored import headers
from tests.support.checkpoints.tensors import NORMS, Tensors, attention, dense, ends, gated, linear, norms, siglip

GEMMA3_TEXT = {
    "model_type": "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 8, "sliding_window": 1024,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
}  # fmt: skip
"""As published: everything else is the default of its class."""
GEMMA3: dict[str, Any] = {
    "model_type": "gemma3", "torch_dtype": "bfloat16", "eos_token_id": [1, 106], "image_token_index": 262144,
    "mm_tokens_per_image": 256, "text_config": GEMMA3_TEXT,
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
        "num_attention_heads": 16, "image_size": 896, "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip
MISTRAL_TEXT = config("mistral", 5120, 32768, 40, 32, 8, 131072, 131072, head_dim=128, rope_theta=1000000000.0) | {
    "sliding_window": None
}
MISTRAL_SMALL: dict[str, Any] = {
    "model_type": "mistral3", "torch_dtype": "bfloat16", "image_token_index": 10, "spatial_merge_size": 2,
    "projector_hidden_act": "gelu", "multimodal_projector_bias": False, "vision_feature_layer": -1,
    "text_config": MISTRAL_TEXT,
    "vision_config": {
        "model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
        "num_attention_heads": 16, "head_dim": 64, "image_size": 1540, "patch_size": 14, "rope_theta": 10000.0,
    },
}  # fmt: skip
GEMMA_NORMS = (*NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def _gemma3() -> Tensors:
    c = GEMMA3_TEXT | {"head_dim": 256, "vocab_size": 262208, "tie_word_embeddings": True}
    tensors = ends(c, "language_model.model.")
    for layer in range(48):
        at = f"language_model.model.layers.{layer}."
        tensors |= attention(f"{at}self_attn.", c, normed=256) | gated(f"{at}mlp.", 3840, 15360)
        tensors |= norms(at, 3840, *GEMMA_NORMS)
    tensors |= siglip("vision_tower.vision_model.", 27, 1152, 4304)
    tensors["multi_modal_projector.mm_input_projection_weight"] = (1152, 3840)
    return tensors | norms("multi_modal_projector.", 1152, "mm_soft_emb_norm")


def _mistral() -> Tensors:
    tensors = dense(MISTRAL_TEXT, "language_model.model.", "language_model.lm_head")
    for layer in range(24):
        at = f"vision_tower.transformer.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors |= linear(f"{at}attention.{name}", 1024, 1024)
        tensors |= gated(f"{at}feed_forward.", 1024, 4096) | norms(at, 1024, "attention_norm", "ffn_norm")
    tensors |= linear("multi_modal_projector.linear_1", 5120, 1024) | linear(
        "multi_modal_projector.linear_2", 5120, 5120
    )
    return tensors | {"vision_tower.patch_conv.weight": (1024, 3, 14, 14), "vision_tower.ln_pre.weight": (1024,)}


WRAPPED = (
    Published(
        "google/gemma-3-12b-it", "text of a multimodal checkpoint, sliding windows", GEMMA3,
        lambda: headers(_gemma3()), f"{CARD}; the rest of text_config: {DEFAULTS}", 48 * 2 * 8 * 256 * 2,
    ),
    Published(
        "mistralai/Mistral-Small-3.2-24B-Instruct-2506", "text of a multimodal checkpoint", MISTRAL_SMALL,
        lambda: headers(_mistral()), CARD, 40 * 2 * 8 * 128 * 2, parameters=23_572_403_200,
    ),
)  # fmt: skip
