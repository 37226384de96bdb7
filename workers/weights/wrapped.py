"""The language model inside a multimodal checkpoint, which is served alone: text in, text out.

Its config is the part `text_config`, completed with the defaults of its class in `transformers`. Its weights have the
prefixes in `PREFIXES`.
"""

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from protos.errors import ModelError
from workers.weights.files import open_file

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


def read_language_config(folder: Path) -> Any:
    """Return the `transformers` config of the language model in *folder*. Raises what `AutoConfig` raises."""
    from transformers import AutoConfig  # noqa: PLC0415 - as above

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return language_config(config, _names(folder)) if config.model_type in WRAPPERS else config


def _names(folder: Path) -> frozenset[str]:
    found: set[str] = set()
    for path in [*folder.glob("*.safetensors")] or folder.glob("pytorch_model*.bin"):
        with suppress(ModelError), open_file(path) as file:  # reported when weights are read
            found.update(file.keys())
    return frozenset(found)
