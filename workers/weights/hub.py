"""Finds the files of a checkpoint: in a folder, or fetched from the Hub, only those that are needed."""

import json
import logging
import re
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from protos.config.engine import ModelConfig
from protos.errors import ModelError

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
TEXTS = ("*.json", "*.txt", "*.model", "*.jinja")
"""Configurations, indices, tokenizers and templates."""
WANTED_FILES = ("*.safetensors", *TEXTS)
HEADS = (*WANTED_FILES, "*.bin", "*.pt")
"""Files of checkpoints of heads; read by `workers.draft.weights`."""
UNWANTED_FILES = ("original/*", "consolidated*", "onnx/*")
OF_A_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(?P<layer>\d+)\.")


def read_config(config: ModelConfig) -> dict[str, Any]:
    """Return the `config.json` of a checkpoint, without its weights. Raises `ModelError`."""
    return read_json(_config_file(config), config.model)


def _config_file(config: ModelConfig) -> Path:
    path = Path(config.model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{config.model}: the folder has no config.json")
        return path / "config.json"
    if path.exists() or config.model.startswith(("/", "./", "../", "~")):
        raise ModelError(f"{config.model}: there is no such folder")
    name, revision, cache = config.model, config.revision, config.download_dir
    return Path(_from_hub(config, lambda: hf_hub_download(name, "config.json", revision=revision, cache_dir=cache)))


def fetch(config: ModelConfig, patterns: Seq[str] = WANTED_FILES) -> Path:
    """Return the folder of a checkpoint; files that match *patterns* come from the Hub. Raises `ModelError`."""
    path = Path(config.model).expanduser()
    if path.is_dir():
        return path
    logger.info("fetching %s", config.model)
    return Path(
        _from_hub(
            config,
            lambda: snapshot_download(
                config.model,
                revision=config.revision,
                cache_dir=config.download_dir,
                allow_patterns=list(patterns),
                ignore_patterns=list(UNWANTED_FILES),
            ),
        )
    )


def fetch_tokenizer(config: ModelConfig) -> Path:
    """Return the folder of the tokenizer that goes with a model; no weights are fetched. Raises `ModelError`."""
    if config.tokenizer is not None:
        config = replace(config, model=config.tokenizer, revision=config.tokenizer_revision)
    return fetch(config, TEXTS)


def fetch_without_layers(config: ModelConfig, described: Mapping[str, Any]) -> Path:
    """As `fetch`, without the shards that hold only decoder layers: a draft in another process needs none of them.

    Heads of the target (MTP) are numbered after its layers or have other names, and are fetched. *described* is the
    target's `config.json`.
    """
    shards = shards_by_tensor(fetch(config, TEXTS), config.model)
    num_layers = int(described.get("num_hidden_layers") or described.get("n_layer") or 0)
    ends = {shard for name, shard in shards.items() if not _is_of_a_layer(name, num_layers)}
    return fetch(config, (*TEXTS, *sorted(ends)) if ends else WANTED_FILES)


def _is_of_a_layer(name: str, num_layers: int) -> bool:
    found = OF_A_LAYER.search(name)
    return found is not None and int(found["layer"]) < num_layers and "mtp" not in name


def shards_by_tensor(folder: Path, name: str) -> Mapping[str, str]:
    """Return the file of each tensor, from the index; empty if there is no index.

    Raises:
        ModelError: the index is damaged, or names files outside its folder.
    """
    index = folder / INDEX
    if not index.is_file():
        return {}
    shards = read_json(index, name).get("weight_map")
    if not isinstance(shards, dict):
        raise ModelError(f"{name}: {index.name} has no weight_map")
    for shard in sorted(set(map(str, shards.values()))):
        if "/" in shard or "\\" in shard or not shard.endswith(".safetensors"):
            raise ModelError(f"{name}: {index.name} names the shard {shard!r}; shards must be *.safetensors next to it")
    return {str(tensor): str(shard) for tensor, shard in shards.items()}


def read_json(path: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in *path*. Raises `ModelError` with the model's *name*."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{name}: {path.name} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{name}: {path.name} holds no JSON object")
    return content


def _from_hub(config: ModelConfig, fetch: Callable[[], str]) -> str:
    where = config.model if config.revision is None else f"{config.model} at revision {config.revision}"
    try:
        return fetch()
    except LocalEntryNotFoundError as error:
        raise ModelError(f"{where}: not in the cache, and the Hub cannot be reached (or offline mode is on)") from error
    except HFValidationError as error:
        raise ModelError(f"{where}: neither a folder nor a valid Hub id") from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"{where}: the Hub answered: {str(error).strip().splitlines()[0]}") from error
