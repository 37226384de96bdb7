"""Engine arguments with what only an installation knows: the demo pair, the proposers there are, draft checkpoints."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import demo
from proposers import registry
from protos import arguments, speculation, speculation_aliases
from protos.config import EngineConfig

DEMO_NAME = "demo"
TOKENS, DEMO_GUESSES = "num_speculative_tokens", 3  # of 3 and 4 the faster in a short run on two CPU cores
IMPLYING = frozenset({"method", "model", "prompt_lookup_max", "prompt_lookup_min"})
# Looked for in this order, in the config.json's model type and architectures, then in the checkpoint's own name.
METHOD_MARKS = {"eagle3": "eagle3", "eagle-3": "eagle3", "eagle": "eagle", "medusa": "medusa",
                "mlp_speculator": "mlp_speculator", "mlpspeculator": "mlp_speculator"}  # fmt: skip
ACCELERATOR_OWNERS = ("ibm-ai-platform/", "ibm-fms/", "ibm-granite/")


def engine_config(given: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration that the arguments *given* ask for; without a model, that of the demo pair.

    Raises:
        ConfigError: names the argument, the value, and the limit or what to do instead.
    """
    wanted = arguments.normalised(given)
    if wanted.get("model") is None:
        wanted = _with_demo(wanted)
    return arguments.parse(wanted, methods=registry.names(), detect=detect_method)


def _with_demo(wanted: dict[str, Any]) -> dict[str, Any]:
    """Fill in the demo target, and its draft unless speculation is turned off or goes another way."""
    target, draft = demo.pair()
    filled = {"served_model_name": DEMO_NAME, **wanted, "model": str(target)}
    asked = wanted.get(arguments.SPECULATIVE, {})
    keys = {str(key).replace("-", "_"): value for key, value in speculation.mapping(asked).items()}
    named = keys.keys() | speculation_aliases.collect(wanted).keys()
    is_off = arguments.SPECULATIVE in wanted and not keys
    if not is_off and IMPLYING.isdisjoint(named):
        guesses = {} if TOKENS in named else {TOKENS: DEMO_GUESSES}
        filled[arguments.SPECULATIVE] = {**guesses, **keys, "model": str(draft)}
    return filled


def detect_method(model: str) -> str | None:
    """Return the method a draft checkpoint was made for, None for a plain model.

    A folder's config.json is read as data; a Hub id is judged by its name alone.
    """
    name = Path(model).name.lower()
    for text in (_described(Path(model)), name):
        found = next((method for mark, method in METHOD_MARKS.items() if mark in text), None)
        if found is not None:
            return found
    if name.endswith("-accelerator") and model.startswith(ACCELERATOR_OWNERS):
        return "mlp_speculator"
    return None


def _described(folder: Path) -> str:
    """Return what the folder's config.json says the checkpoint is, in lower case; nothing where it says nothing."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""  # a Hub id, or a folder the loader will have more to say about
    if not isinstance(config, dict):
        return ""
    return f"{config.get('model_type')} {config.get('architectures')}".lower()
