"""Which model families can be served, and why others cannot. Decided from `config.json`, before weights are read."""

from collections.abc import Mapping
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from protos.errors import ModelError
from workers.weights import mimo
from workers.weights.wrapped import WRAPPERS

RECURRENT = frozenset({
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear", "lfm2", "lfm2_moe",
    "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "lfm3", "jamba", "mamba", "mamba2", "falcon_mamba",
})  # fmt: skip
"""Those whose layers keep recurrent state (`workers.recurrent`). All are tested."""

TESTED = frozenset({
    "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma2", "gemma3_text", "phi", "phi3", "mixtral", "olmo2",
    "olmoe", "granite", "starcoder2", "cohere", "stablelm", "gpt_oss", "opt", "gpt2", "gpt_neox", "gpt_bigcode",
    "deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "minicpm3", "youtu", mimo.KIND,
}) | RECURRENT  # fmt: skip

_ALIBI = "it adds position biases (alibi) to its attention scores, which paged attention does not"
_RECURRENT = "its recurrent state is of a kind that is not kept for several sequences and rolled back"
_OWN_ATTENTION = "its attention does not go through transformers' attention interface"
_CHUNKED = "it masks its attention in chunks, which paged attention does not"
_SPARSE = "it selects keys sparsely, which paged attention does not"

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("bloom", "mpt"), _ALIBI),
    **dict.fromkeys(
        (
            "zamba", "zamba2", "recurrent_gemma", "rwkv", "xlstm", "minimax", "bailing_hybrid",
        ),
        _RECURRENT,
    ),
    **dict.fromkeys(
        ("falcon", "gptj", "codegen", "ctrl", "xlnet", "xlm", "reformer", "openai-gpt", "gpt_neo"), _OWN_ATTENTION
    ),
    **dict.fromkeys(("llama4", "llama4_text"), _CHUNKED),
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "glm_moe_dsa"), _SPARSE),
}  # fmt: skip

SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
RECURRENT_LAYER_TYPES = frozenset({"linear_attention", "mamba", "mamba2", "attention", "conv", "hybrid", "mlp", "moe"})
"""What `layer_types` of the families in `RECURRENT` may have besides."""


def check(config: Mapping[str, Any], name: str, max_model_len: int | None) -> None:
    """Raise an error if the model cannot be served exactly.

    Args:
        config: the checkpoint's `config.json`.
        name: the model as the user named it, for messages.
        max_model_len: the limit that the user set, if any.

    Raises:
        ModelError: names the model, its type and the reason.
    """
    kind = str(config.get("model_type", ""))
    reason = _family_reason(config, kind) or _rope_reason(config, max_model_len)
    if reason:
        raise ModelError(f"{name} (model_type {kind!r}) cannot be served: {reason}")


def _family_reason(config: Mapping[str, Any], kind: str) -> str | None:
    if config.get("is_encoder_decoder"):
        return "it is an encoder-decoder; only decoder-only models are served"
    if kind in REFUSED:
        return REFUSED[kind]
    if config.get("alibi"):
        return _ALIBI
    if "text_config" in config or "ForConditionalGeneration" in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, ""):
        return f"it is a multimodal checkpoint; of those, the text models of {', '.join(sorted(WRAPPERS))} are served"
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind != mimo.KIND:
        return _not_native(config)
    return _checkpoint_reason(config)


def _checkpoint_reason(config: Mapping[str, Any]) -> str | None:
    # Gemma 4's "vision" is about the tokens of images, which are not served.
    if config.get("use_bidirectional_attention") not in {None, False, "vision"}:
        return "its attention is bidirectional"
    served = SERVED_LAYER_TYPES
    if config.get("model_type") in RECURRENT:
        served |= RECURRENT_LAYER_TYPES
    unknown = sorted(set(config.get("layer_types") or ()) - served)
    if unknown:
        return f"it has layers of type {', '.join(unknown)}; only full and sliding attention are served"
    return None


def _not_native(config: Mapping[str, Any]) -> str:
    if config.get("auto_map"):
        return "it needs code from its repository (auto_map), which is never run; this transformers has no class for it"
    return "this transformers has no causal language model class for it"


def _rope_reason(config: Mapping[str, Any], max_model_len: int | None) -> str | None:
    """Return why a rotary scaling is unsupported: some depend on the longest sequence of the batch."""
    ropes = config.get("rope_parameters") or config.get("rope_scaling") or {}
    by_layer_type = [value for value in ropes.values() if isinstance(value, Mapping)]
    reasons = (_one_rope_reason(rope, config, max_model_len) for rope in (ropes, *by_layer_type))
    return next((reason for reason in reasons if reason), None)


def _one_rope_reason(rope: Mapping[str, Any], config: Mapping[str, Any], max_model_len: int | None) -> str | None:
    kind = rope.get("rope_type") or rope.get("type")
    if kind == "dynamic" and not config.get("max_position_embeddings"):
        return "its rotary scaling ('dynamic') depends on the longest sequence in the batch"
    if kind not in {"longrope", "su"}:
        return None
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    if original and max_model_len and max_model_len <= original:
        return None
    return (
        f"its rotary scaling ({kind!r}) depends on the longest sequence in the batch beyond {original} tokens: "
        f"set max_model_len to at most {original}"
    )


def hold_frequencies(model: Any) -> None:
    """Keep the rotary frequencies of 'dynamic' scaling: they change beyond the context length alone.

    Otherwise every forward would wait for the device to compare the largest position with it.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and "dynamic" in kinds:
            module.rope_type = "static"
