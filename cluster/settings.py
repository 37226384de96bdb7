"""Parses engine arguments, with the demo pair, the installed proposers and the formats of draft checkpoints."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import demo
from cluster.files import UTF8
from proposers import registry
from proposers.formats import detect
from proposers.formats.shared.peek import Peek
from protos.config import aliases, argument_names, arguments, speculation
from protos.config.engine import EngineConfig
from protos.config.method import Described
from protos.errors import ConfigError
from protos.hub import absolute, folder_of
from protos.validation import why_unreadable

DEMO_NAME = "demo"
NUM_TOKENS_KEY = "num_speculative_tokens"
DEMO_NUM_TOKENS = 3
"""Faster than 4 in a short run on two CPU cores."""
METHOD_KEYS = frozenset({"method", "model", "prompt_lookup_max", "prompt_lookup_min"})
"""Keys of speculative_config that choose a method: without them, the demo draft is used."""

SERVING = {"rebuild_timeout_s": 30.0}
"""Clients of a server are told early that there is no room, so that they ask another one. A cut of the network that
ends within half of that costs no request. `LLM`, whose caller has no other engine, waits ten times as long."""

MODEL_PATHS = ("model", "tokenizer", "download_dir")
SPECULATIVE_PATHS = ("model", "datastore")
"""Fields that may be paths, which workers on other machines or with other working folders read."""


def engine_config(given: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration of the arguments *given*; without a model, that of the demo pair.

    Raises:
        ConfigError: names the argument, its value, and the limit or the remedy.
        ModelError: the target or the draft is a folder that does not exist, or a kind that is not supported.
    """
    return _parsed(given, _describe_here)


def with_serving_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments *given* with the defaults of servers where they differ from those of `LLM`."""
    return {**SERVING, **argument_names.normalised(given)}


def remote_engine_config(given: Mapping[str, Any]) -> EngineConfig:
    """As `engine_config`, for an engine on other machines: its folders need not exist on this one."""
    return _parsed(given, detect.describe)


def _parsed(given: Mapping[str, Any], describe: Callable[..., Described]) -> EngineConfig:
    options = argument_names.normalised(given)
    if options.get("model") is None:
        options = _with_demo(options)
    cache = options.get("download_dir")
    described = functools.cache(functools.partial(describe, cache=None if cache is None else str(cache)))
    config = _with_absolute_paths(arguments.parse(options, methods=registry.names(), detect=described))
    _check_heads(config)
    return config


def _with_absolute_paths(config: EngineConfig) -> EngineConfig:
    """Return *config* with every folder and file that it names by a path that other processes understand, too."""
    model, speculative = config.model, config.speculative
    config = replace(config, model=replace(model, **_absolute(model, MODEL_PATHS)))
    if speculative is None:
        return config
    return replace(config, speculative=replace(speculative, **_absolute(speculative, SPECULATIVE_PATHS)))


def _absolute(part: object, names: tuple[str, ...]) -> dict[str, Any]:
    given = ((name, getattr(part, name)) for name in names)
    return {name: absolute(value) for name, value in given if value is not None}


def _describe_here(model: str, revision: str | None, *, cache: str | None) -> Described:
    folder_of(model)
    return detect.describe(model, revision, cache=cache)


def _check_heads(config: EngineConfig) -> None:
    """Refuse a number of ranks that cannot share the target's heads, before any worker is started."""
    ranks, name = config.parallel.tensor_parallel_size, config.model.model
    if ranks == 1:
        return
    described = Peek(name, config.model.revision, config.model.download_dir).config
    heads = described.get("num_attention_heads") or described.get("n_head")
    kv_heads = described.get("num_key_value_heads") or heads
    if not isinstance(heads, int) or not isinstance(kv_heads, int):  # the workers read more kinds of configs
        return
    fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if ranks not in fitting:
        raise ConfigError(
            f"tensor_parallel_size must be one of {', '.join(map(str, fitting))} for {name}, which has {heads} "
            f"attention heads and {kv_heads} key/value heads; got {ranks}"
        )


def _with_demo(options: dict[str, Any]) -> dict[str, Any]:
    """Fill in the demo target, and its draft unless speculation is off or another method is chosen."""
    target, draft = demo.pair()
    filled = {"served_model_name": DEMO_NAME, **options, "model": str(target)}
    speculative = options.get(argument_names.SPECULATIVE, {})
    keys = {str(key).replace("-", "_"): value for key, value in speculation.mapping(speculative).items()}
    named = {speculation.KEY_ALIASES.get(key, key) for key in keys} | aliases.collect(options).keys()
    is_off = argument_names.SPECULATIVE in options and not keys
    if not is_off and METHOD_KEYS.isdisjoint(named):
        num_tokens = {} if NUM_TOKENS_KEY in named else {NUM_TOKENS_KEY: DEMO_NUM_TOKENS}
        filled[argument_names.SPECULATIVE] = {**num_tokens, **keys, "model": str(draft)}
    return filled


def is_demo(config: EngineConfig) -> bool:
    """Whether the target is the demo's, which continues text, although it has a chat template."""
    return config.model.model == str(demo.pair()[0])


def chat_template_text(given: str | None) -> str | None:
    """Return a chat template: *given* itself if it looks like one, else the contents of that file.

    Raises:
        ConfigError: the file cannot be read.
    """
    if given is None or "{" in given or "\n" in given:
        return given
    try:
        return Path(given).read_text(encoding=UTF8)
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat_template: cannot read {given}: {why_unreadable(error)}") from None
