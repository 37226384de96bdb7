"""Finds the files of a checkpoint: in a folder, or fetched from the Hub, only those that are needed."""

import functools
import logging
import re
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from protos.config.engine import ModelConfig
from protos.errors import ModelError
from protos.hub import client_errors, folder_of, reason, unreachable
from workers.weights.described import CONFIG, MODEL_OPT, read_described, read_json
from workers.weights.wrapped import text_described

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SAFETENSORS = (INDEX, "model.safetensors")
WEIGHTS = (*SAFETENSORS, "pytorch_model.bin.index.json", "pytorch_model.bin")
"""Where the weights of a model are, the first that exists: an index of shards, or one file."""
CONFIGS = (CONFIG, MODEL_OPT)
TEXTS = ("*.json", "*.txt", "*.model", "*.jinja")
"""Configurations, indices, tokenizers and templates."""
WANTED_FILES = ("*.safetensors", *TEXTS)
SAVED_FILES = ("pytorch_model.bin", "pytorch_model-*.bin", *TEXTS)
HEADS = (*WANTED_FILES, "*.bin", "*.pt")
"""Files of checkpoints of heads; read by `workers.draft.weights`."""
UNWANTED_FILES = ("original/*", "consolidated*", "onnx/*")
OF_A_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(?P<layer>\d+)\.")


def read_config(config: ModelConfig) -> dict[str, Any]:
    """Return the `config.json` of a checkpoint, or of the language model inside it. Raises `ModelError`."""
    return text_described(read_described(_folder(config, CONFIGS), config.model))


def fetch(config: ModelConfig, patterns: Seq[str] = WANTED_FILES) -> Path:
    """Return the folder of a checkpoint; files that match *patterns* come from the Hub. Raises `ModelError`."""
    if folder_of(config.model) is None:
        logger.info("fetching %s", config.model)
    return _folder(config, patterns)


def _folder(config: ModelConfig, patterns: Seq[str]) -> Path:
    wanted = {"allow_patterns": list(patterns), "ignore_patterns": list(UNWANTED_FILES)}
    return folder_of(config.model) or _from_hub(config, functools.partial(snapshot_download, config.model, **wanted))


def fetch_model(config: ModelConfig) -> Path:
    """As `fetch`: safetensors, or what torch saved where there are none. Raises `ModelError`."""
    folder = fetch(config)
    return folder if any((folder / name).is_file() for name in SAFETENSORS) else fetch(config, SAVED_FILES)


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
    return fetch(config, (*TEXTS, *sorted(ends))) if ends else fetch_model(config)


def _is_of_a_layer(name: str, num_layers: int) -> bool:
    found = OF_A_LAYER.search(name)
    return found is not None and int(found["layer"]) < num_layers and "mtp" not in name


def shards_by_tensor(folder: Path, name: str) -> Mapping[str, str]:
    """Return the file of each tensor, from the index; empty if there is no index.

    Raises:
        ModelError: the index is damaged, or names files outside its folder.
    """
    index = _weights(folder)
    if index is None or index.suffix != ".json":
        return {}
    shards = read_json(index, name).get("weight_map")
    if not isinstance(shards, dict):
        raise ModelError(f"{name}: {index.name} has no weight_map")
    ending = Path(index.name.removesuffix(".index.json")).suffix
    for shard in sorted(set(map(str, shards.values()))):
        if "/" in shard or "\\" in shard or not shard.endswith(ending):
            raise ModelError(f"{name}: {index.name} names the shard {shard!r}; shards must be *{ending} next to it")
    return {str(tensor): str(shard) for tensor, shard in shards.items()}


def weight_files(folder: Path, name: str) -> list[Path]:
    """Return the files with a model's weights that are present: only some shards may have been fetched."""
    found = _weights(folder)
    if found is None or found.suffix != ".json":
        return [] if found is None else [found]
    shards = sorted(set(shards_by_tensor(folder, name).values()))
    return [folder / shard for shard in shards if (folder / shard).is_file()]


def _weights(folder: Path) -> Path | None:
    return next((path for file in WEIGHTS if (path := folder / file).is_file()), None)


def _from_hub(config: ModelConfig, fetch: Callable[..., str]) -> Path:
    """Call *fetch* of the Hub's client. Raises `ModelError` in one line for every way in which it fails."""
    where = config.model if config.revision is None else f"{config.model} at revision {config.revision}"
    unreached = unreachable()
    try:
        return Path(
            fetch(revision=config.revision, cache_dir=config.download_dir, local_files_only=unreached is not None)
        )
    except HFValidationError as error:
        raise ModelError(f"{where}: neither a folder nor a valid Hub id") from error
    except HfHubHTTPError as error:
        raise ModelError(f"{where}: the Hub answered: {str(error).strip().splitlines()[0]}") from error
    except LocalEntryNotFoundError as error:
        cause = unreached or reason(error.__cause__ or error)
        raise ModelError(f"{where}: not in the cache, and the Hub cannot be reached ({cause})") from error
    except client_errors() as error:
        raise ModelError(f"{where}: cannot be fetched from the Hub: {reason(error)}") from error
