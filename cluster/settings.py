"""Engine arguments with what only an installation knows: the demo pair, the proposers there are, draft checkpoints."""

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
TOKENS, DEMO_GUESSES = "num_speculative_tokens", 3  # of 3 and 4 the faster in a short run on two CPU cores
IMPLYING = frozenset({"method", "model", "prompt_lookup_max", "prompt_lookup_min"})


def engine_config(given: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration that the arguments *given* ask for; without a model, that of the demo pair.

    Raises:
        ConfigError: names the argument, the value, and the limit or what to do instead.
    """
    wanted = argument_names.normalised(given)
    if wanted.get("model") is None:
        wanted = _with_demo(wanted)
    cache = wanted.get("download_dir")
    described = functools.cache(functools.partial(detect.describe, cache=None if cache is None else str(cache)))
    return arguments.parse(wanted, methods=registry.names(), detect=described)


def _with_demo(wanted: dict[str, Any]) -> dict[str, Any]:
    """Fill in the demo target, and its draft unless speculation is turned off or goes another way."""
    target, draft = demo.pair()
    filled = {"served_model_name": DEMO_NAME, **wanted, "model": str(target)}
    asked = wanted.get(argument_names.SPECULATIVE, {})
    keys = {str(key).replace("-", "_"): value for key, value in speculation.mapping(asked).items()}
    named = keys.keys() | aliases.collect(wanted).keys()
    is_off = argument_names.SPECULATIVE in wanted and not keys
    if not is_off and IMPLYING.isdisjoint(named):
        guesses = {} if TOKENS in named else {TOKENS: DEMO_GUESSES}
        filled[argument_names.SPECULATIVE] = {**guesses, **keys, "model": str(draft)}
    return filled


def chat_template_text(given: str | None) -> str | None:
    """Return a chat template: *given* itself, if it looks like one, else what the file of that name holds.

    Raises:
        ConfigError: it cannot be read.
    """
    if given is None or "{" in given or "\n" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat_template: cannot read {given}: {type(error).__name__}") from None
