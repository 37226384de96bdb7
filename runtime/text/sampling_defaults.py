"""Default sampling parameters from a checkpoint's `generation_config.json`."""

import json
import logging
from pathlib import Path
from typing import Any

from protos.config.engine import ModelConfig
from protos.errors import ConfigError, InvalidRequestError
from protos.hub import client_errors, folder_of, unreachable
from protos.sampling import SamplingParams
from protos.validation import shown

log = logging.getLogger("slipstream")

FILE = "generation_config.json"
AUTO, NONE = "auto", "vllm"
NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}
"""Keys that are used, as in vLLM, and their `SamplingParams` names."""
LONGEST = "max_new_tokens"


def sampling_defaults(config: ModelConfig) -> dict[str, Any]:
    """Return the default sampling parameters of *config*.

    `generation_config` is "auto" (the model's own), "vllm" (none), or a folder with such a file.

    Raises:
        ConfigError: the folder has no such file, or the values are invalid.
        ModelError: the model is a folder that does not exist.
    """
    stored = _stored(config)
    defaults = {name: stored[key] for key, name in NAMES.items() if stored.get(key) is not None}
    try:
        SamplingParams(**defaults)
    except InvalidRequestError as error:
        raise ConfigError(f"{FILE} of the model: {error}; leave it out with generation_config 'vllm'") from None
    return defaults


def default_max_tokens(config: ModelConfig) -> int | None:
    """Return the limit on generated tokens of requests that set none; None for the end of the context.

    Raises:
        ConfigError: as `sampling_defaults`, or it is not a positive integer.
    """
    longest = _stored(config).get(LONGEST)
    if longest is not None and (type(longest) is not int or longest < 1):
        raise ConfigError(
            f"{FILE} of the model: {LONGEST} must be an integer of at least 1, got {shown(longest)}; "
            "leave it out with generation_config 'vllm'"
        )
    return longest


def _stored(config: ModelConfig) -> dict[str, Any]:
    if config.generation_config == NONE:
        return {}
    path = _path(config)
    return {} if path is None else _read(path)


def _path(config: ModelConfig) -> Path | None:
    """Return the path of the file, None if the model has none."""
    if config.generation_config != AUTO:
        path = Path(config.generation_config).expanduser() / FILE
        if not path.is_file():
            raise ConfigError(
                f"generation_config must be auto, vllm or a folder with a {FILE}, got {shown(config.generation_config)}"
            )
        return path
    folder = folder_of(config.model)
    if folder is not None:
        return folder / FILE if (folder / FILE).is_file() else None
    return _from_hub(config)


def _from_hub(config: ModelConfig) -> Path | None:
    from huggingface_hub import hf_hub_download  # noqa: PLC0415 - slow to import, and not needed for folders

    offline = unreachable() is not None
    try:
        return Path(
            hf_hub_download(
                config.model,
                FILE,
                revision=config.revision,
                cache_dir=config.download_dir,
                local_files_only=offline,
            )
        )
    except client_errors() as error:  # there is no such file, or the Hub cannot be reached
        log.debug("%s: %s", config.model, error)
        return None


def _read(path: Path) -> dict[str, Any]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{FILE} of the model cannot be read ({type(error).__name__})") from None
    return stored if isinstance(stored, dict) else {}
