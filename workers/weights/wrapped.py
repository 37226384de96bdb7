"""The language model inside a multimodal checkpoint, which is served alone: text in, text out.

Its config is the part `text_config`, completed with the defaults of its class in `transformers`. Its weights have the
prefixes in `PREFIXES`.
"""

from collections.abc import Collection, Mapping
from typing import Any

WRAPPERS = frozenset({
    "gemma3", "gemma4", "mistral3", "llava", "llava_next", "llava_onevision", "internvl", "aya_vision",
    "cohere2_vision", "smolvlm", "idefics3", "lighton_ocr", "kimi_k25", "exaone4_5", "qwen3_5", "qwen3_5_moe",
    "lfm2_vl",
})  # fmt: skip
"""Those whose language model computes the same for text alone as within the wrapper; held by tests."""

PREFIXES = ("model.language_model.", "language_model.model.", "model.text_model.")
"""What stands for the base model's prefix in the names of such checkpoints."""
HEADS = ("lm_head.weight", "language_model.lm_head.weight")


def is_wrapped(described: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` is of a multimodal checkpoint whose language model can be served."""
    return described.get("model_type") in WRAPPERS and "text_config" in described


def text_described(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `config.json` of the language model inside; *described* itself if nothing is wrapped around it."""
    if not is_wrapped(described):
        return dict(described)
    from transformers import AutoConfig  # noqa: PLC0415 - slow to import, and rarely needed

    given = {key: value for key, value in described.items() if key != "model_type"}
    whole = AutoConfig.for_model(described["model_type"], **given)
    shared = {key: described[key] for key in ("eos_token_id", "quantization_config") if described.get(key) is not None}
    dtype = described.get("dtype") or described.get("torch_dtype")
    text = language_config(whole, ()).to_dict()
    return {**text, **shared, "dtype": text.get("dtype") or dtype}


def language_config(config: Any, names: Collection[str]) -> Any:
    """Return the `transformers` config of the language model inside; *config* itself if nothing is wrapped around it.

    *names* are the checkpoint's tensors: without a head among them, the head is the embedding.
    """
    if config.model_type not in WRAPPERS:
        return config
    text = config.get_text_config(decoder=True)
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        text.quantization_config = quantization
    text.tie_word_embeddings = not any(head in names for head in HEADS)
    return text
