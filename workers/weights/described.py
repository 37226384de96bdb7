"""What a checkpoint says about itself: its `config.json`, as JSON and as a `transformers` config."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from protos.errors import ModelError
from workers.weights.files import open_file
from workers.weights.wrapped import WRAPPERS, language_config

READ_AS = {"kimi_k2": "deepseek_v3"}
"""Model types that `transformers` lacks, whose own code differs in nothing, and the types that they are read as."""
CONFIG, MODEL_OPT = "config.json", "hf_quant_config.json"


def read_described(folder: Path, name: str) -> dict[str, Any]:
    """Return the `config.json` in *folder*, with the `quantization_config` that older ModelOpt wrote beside it.

    Raises:
        ModelError: a file is missing or damaged; names the model as *name*.
    """
    return _described(folder, name, _as_stored(folder, name))


def _as_stored(folder: Path, name: str) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{name}: there is no {CONFIG}")
    return read_json(folder / CONFIG, name)


def _described(folder: Path, name: str, stored: dict[str, Any]) -> dict[str, Any]:
    described = _known(stored)
    if described.get("quantization_config") or not (folder / MODEL_OPT).is_file():
        return described
    quantization = read_json(folder / MODEL_OPT, name).get("quantization")
    if not isinstance(quantization, dict) or not quantization.get("quant_algo"):  # weights are not quantised
        return described
    return described | {"quantization_config": {"quant_method": "modelopt", "quantization": quantization}}


def _known(described: dict[str, Any]) -> dict[str, Any]:
    """Return a `config.json` with the type that `transformers` has for it, and without its repository's code."""
    kind = READ_AS.get(str(described.get("model_type")))
    if kind is None:
        return described
    return {key: value for key, value in described.items() if key != "auto_map"} | {"model_type": kind}


def read_json(path: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in *path*. Raises `ModelError` with the model's *name*."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{name}: {path.name} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{name}: {path.name} holds no JSON object")
    return content


def read_language_config(folder: Path) -> Any:
    """Return the `transformers` config of the language model in *folder*. Raises what `AutoConfig` raises."""
    from transformers import AutoConfig  # noqa: PLC0415 - slow to import, and rarely needed

    stored = _as_stored(folder, folder.name)
    described = _described(folder, folder.name, stored)
    config = (
        AutoConfig.for_model(**described)
        if stored.get("model_type") in READ_AS
        else AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    )
    quantization = described.get("quantization_config")
    if quantization:
        config.quantization_config = quantization
    return language_config(config, _names(folder)) if config.model_type in WRAPPERS else config


def _names(folder: Path) -> frozenset[str]:
    found: set[str] = set()
    for path in [*folder.glob("*.safetensors")] or folder.glob("pytorch_model*.bin"):
        with suppress(ModelError), open_file(path) as file:  # reported when weights are read
            found.update(file.keys())
    return frozenset(found)
