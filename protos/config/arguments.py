"""Builds an `EngineConfig` from engine arguments: the same names for Python, flags and YAML."""

import json
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from typing import Any

from pydantic import TypeAdapter, ValidationError

from protos.config import aliases, kv_cache_dtype, speculation
from protos.config.argument_names import (
    IGNORED,
    IGNORED_FLAGS,
    KEPT,
    REFUSED,
    SINGLE,
    SPECULATIVE,
    Arguments,
    normalised,
)
from protos.config.engine import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    Placement,
    SchedulerConfig,
    SpeculativeConfig,
)
from protos.config.kv_window import SELF_WINDOW
from protos.config.method import Detect, nothing_known
from protos.errors import ConfigError
from protos.validation import shown, warn_once

PARTS: dict[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
}
DTYPES = {"half": "float16", "fp16": "float16", "float": "float32", "fp32": "float32", "bf16": "bfloat16"}
LARGE = frozenset({"max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes"})
"""Arguments that may have a suffix, as in vLLM: k, m, g and t are powers of 1000, K, M, G and T of 1024."""
LARGE_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmgt])|([0-9]+)([KMGT])")
_INTEGER = TypeAdapter(int)


def parse(
    given: Mapping[str, Any], *, methods: Collection[str] | None = None, detect: Detect = nothing_known
) -> EngineConfig:
    """Return the configuration for the arguments *given*; their names may have hyphens or underscores.

    If the model is a draft whose checkpoint names its target, the target is served with that draft.

    Args:
        given: the arguments.
        methods: the available speculative methods; None accepts any name.
        detect: describes checkpoints.

    Raises:
        ConfigError: names the argument, the value, and the limit or what to do instead; one line.
    """
    arguments = _with_verifier(normalised(given), detect)
    speculative = _speculative(arguments, methods, detect)
    _check_refused(arguments)
    _warn_ignored(arguments)
    fields = _fields(arguments)
    fields["parallel"]["executor"] = _executor(arguments, speculative)
    if speculative is not None and speculative.placement is None:
        ranks = _integer(arguments, "tensor_parallel_size", 1)
        speculative = replace(speculative, placement=_placement(fields["parallel"]["executor"], ranks, speculative))
    _check_budget(fields["scheduler"])
    if "model" not in fields["model"]:
        raise ConfigError("model is missing: a Hub id or a folder")
    parts = {part: _build(part, fields[part]) for part in PARTS}
    engine: EngineConfig = _named(EngineConfig, "engine", {**parts, "speculative": speculative, **fields["engine"]})
    return engine


def _with_verifier(arguments: Arguments, detect: Detect) -> Arguments:
    """If the model is a `speculators` checkpoint that names its target, make the target the model, and it the draft.

    As in vLLM, requests may still use the checkpoint's name as the name of the model.
    """
    target = _target(arguments)
    verifier = detect(*target).verifier if target else None
    if target is None or verifier is None:
        return arguments
    draft, revision = target
    warn_once(f"{draft} is a draft: it is served with the target that it names, {verifier}")
    given = speculation.mapping(arguments.get(SPECULATIVE))
    changed = {"served_model_name": draft, **arguments, "model": verifier, "revision": None}
    if given or arguments.get(SPECULATIVE) is None:
        changed[SPECULATIVE] = {"model": draft, **({"revision": revision} if revision else {}), **given}
    return changed


def _speculative(
    arguments: Mapping[str, Any], methods: Collection[str] | None, detect: Detect
) -> SpeculativeConfig | None:
    """Merge `speculative_config` with the arguments that set one of its keys.

    Raises:
        ConfigError: they contradict each other, or a value is invalid.
    """
    keys = dict(speculation.mapping(arguments.get(SPECULATIVE)))
    for key, value in aliases.collect(arguments).items():
        if keys.setdefault(key, value) != value:
            raise ConfigError(f"{SPECULATIVE} sets {key} to {shown(keys[key])}, another argument to {shown(value)}")
    return speculation.read(keys, methods, detect, _target(arguments))


def _target(arguments: Mapping[str, Any]) -> tuple[str, str | None] | None:
    """Return the model and its revision."""
    model, revision = arguments.get("model"), arguments.get("revision")
    return None if model is None else (str(model), None if revision is None else str(revision))


def _check_refused(arguments: Arguments) -> None:
    for name, instead in SINGLE.items():
        if (count := _integer(arguments, name, 1)) != 1:
            raise ConfigError(f"{name} must be 1, got {count}: {instead}")
    for name, (neutral, instead) in REFUSED.items():
        value = arguments.get(name)
        if value is not None and value not in neutral and str(value).lower() not in ("none", "null"):
            raise ConfigError(f"{name} is not supported, got {shown(value)}: {instead}")


def _warn_ignored(arguments: Arguments) -> None:
    if str(arguments.get("trust_remote_code")).lower() in ("true", "1"):
        warn_once("trust_remote_code is never honoured: code from checkpoints is not run")
    for name in (IGNORED | IGNORED_FLAGS) & arguments.keys():
        if arguments[name] is not None and name != "trust_remote_code":
            warn_once(f"{name} has no effect here and is ignored")


def _fields(arguments: Arguments) -> dict[str, Arguments]:
    fields: dict[str, Arguments] = {part: {} for part in (*PARTS, "engine")}
    for option in KEPT:
        if arguments.get(option.name) is not None:
            fields[option.part][option.field] = _read(option.name, arguments[option.name])
    return fields


def _without_suffix(value: Any) -> Any:
    """Return the number that text like `25.6k` or `32K` stands for; other values as they are."""
    if not isinstance(value, str) or (found := LARGE_NUMBER.fullmatch(value)) is None:
        return value
    number, suffix = (group for group in found.groups() if group is not None)
    base = 1000 if suffix.islower() else 1024
    return int(Fraction(number) * base ** ("kmgt".index(suffix.lower()) + 1))


def _read(name: str, value: Any) -> Any:
    if name == "dtype":  # may be a torch.dtype
        word = str(value).removeprefix("torch.")
        return DTYPES.get(word, word)
    if name == "kv_cache_dtype":
        return kv_cache_dtype.canonical(value)
    if name == "served_model_name":
        names = json.loads(value) if isinstance(value, str) and value.startswith("[") else value
        return (names,) if isinstance(names, str) else tuple(names)
    if name == "worker_resources" and isinstance(value, str):
        return _json(name, value)
    if name == "placement_strategy":
        return str(value).upper()
    if name in LARGE:
        value = _without_suffix(value)
    return str(value) if name in ("model", "tokenizer", "download_dir", "generation_config") else value


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is not valid JSON ({error}): {shown(text)}") from None


def _executor(arguments: Arguments, speculative: SpeculativeConfig | None) -> str:
    """Return "uni" or "ray"; `mp` and None choose "uni" for one device and "ray" for several."""
    size = _integer(arguments, "tensor_parallel_size", 1)
    backend = arguments.get("distributed_executor_backend")
    alone = size == 1 and (speculative is None or speculative.placement != "dedicated")
    if backend in (None, "mp"):
        return "uni" if alone else "ray"
    if backend not in ("uni", "ray"):
        raise ConfigError(f"distributed_executor_backend must be uni, ray or mp, got {shown(backend)}")
    if backend == "uni" and not alone:
        raise ConfigError(
            f"distributed_executor_backend 'uni' is one process on one device, got tensor_parallel_size {size}"
            " or a dedicated draft; use ray"
        )
    return str(backend)


def _placement(executor: str, ranks: int, speculative: SpeculativeConfig) -> Placement:
    """Return the default placement: a draft model gets its own process if there are several processes anyway.

    A target that drafts for itself does not, unless it is split over several ranks: there is nothing to share then.
    """
    has_draft = speculative.model is not None or "mtp" in speculative.method  # a name, or names
    has_draft |= SELF_WINDOW in speculative.methods and ranks > 1
    return "dedicated" if executor == "ray" and has_draft else "colocated"


def _check_budget(scheduler: Arguments) -> None:
    """Check that a step has room for a token of every sequence; a limit not given is derived from the other."""
    tokens = _integer(scheduler, "max_num_batched_tokens", 0)
    if tokens and "max_num_seqs" not in scheduler:
        scheduler["max_num_seqs"] = min(SchedulerConfig().max_num_seqs, tokens)
    seqs = _integer(scheduler, "max_num_seqs", SchedulerConfig().max_num_seqs)
    if not tokens:
        scheduler["max_num_batched_tokens"] = max(SchedulerConfig().max_num_batched_tokens, seqs)
    elif 0 < tokens < seqs:
        raise ConfigError(f"max_num_batched_tokens must be at least max_num_seqs ({seqs}), got {tokens}")


def _integer(arguments: Arguments, name: str, default: int) -> int:
    value = arguments.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        with suppress(ValidationError):
            return _INTEGER.validate_python(value)
    raise ConfigError(f"{name} must be an integer, got {shown(value)}")


def _build(part: str, fields: Arguments) -> Any:
    return _named(PARTS[part], part, fields)


def _named(cls: type, part: str, fields: Arguments) -> Any:
    """Build *cls*; errors name the argument, not the field."""
    try:
        return cls(**fields)
    except ConfigError as error:
        field, _, rest = str(error).partition(" ")
        names = [option.name for option in KEPT if (option.part, option.field) == (part, field)]
        raise ConfigError(f"{names[0] if names else field} {rest}") from None
