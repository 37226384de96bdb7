"""Parses engine arguments, with the demo pair, the installed proposers and the formats of draft checkpoints."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import demo
from proposers import registry
from proposers.formats import detect
from protos.config import aliases, argument_names, arguments, speculation
from protos.config.engine import EngineConfig
from protos.errors import ConfigError

DEMO_NAME = "demo"
NUM_TOKENS_KEY = "num_speculative_tokens"
DEMO_NUM_TOKENS = 3
"""Faster than 4 in a short run on two CPU cores."""
METHOD_KEYS = frozenset({"method", "model", "prompt_lookup_max", "prompt_lookup_min"})
"""Keys of speculative_config that choose a method: without them, the demo draft is used."""


def engine_config(given: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration of the arguments *given*; without a model, that of the demo pair.

    Raises:
        ConfigError: names the argument, its value, and the limit or the remedy.
    """
    options = argument_names.normalised(given)
    if options.get("model") is None:
        options = _with_demo(options)
    cache = options.get("download_dir")
    described = functools.cache(functools.partial(detect.describe, cache=None if cache is None else str(cache)))
    return arguments.parse(options, methods=registry.names(), detect=described)


def _with_demo(options: dict[str, Any]) -> dict[str, Any]:
    """Fill in the demo target, and its draft unless speculation is off or another method is chosen."""
    target, draft = demo.pair()
    filled = {"served_model_name": DEMO_NAME, **options, "model": str(target)}
    speculative = options.get(argument_names.SPECULATIVE, {})
    keys = {str(key).replace("-", "_"): value for key, value in speculation.mapping(speculative).items()}
    named = keys.keys() | aliases.collect(options).keys()
    is_off = argument_names.SPECULATIVE in options and not keys
    if not is_off and METHOD_KEYS.isdisjoint(named):
        num_tokens = {} if NUM_TOKENS_KEY in named else {NUM_TOKENS_KEY: DEMO_NUM_TOKENS}
        filled[argument_names.SPECULATIVE] = {**num_tokens, **keys, "model": str(draft)}
    return filled


def chat_template_text(given: str | None) -> str | None:
    """Return a chat template: *given* itself if it looks like one, else the contents of that file.

    Raises:
        ConfigError: the file cannot be read.
    """
    if given is None or "{" in given or "\n" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat_template: cannot read {given}: {type(error).__name__}") from None
