"""Reads a draft's and a target's `config.json` as data: numbers, booleans given as text, and old names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proposers.formats.shared.layout import refuse

Config = Mapping[str, Any]
TRUE, FALSE = ("true", "1"), ("false", "0")


@dataclass(frozen=True)
class TargetDims:
    """The target's dimensions, for readers.

    Attributes:
        hidden: width of the states its head reads.
        layers: number of decoder layers.
        vocab_size: rows of its head.
        max_model_len: most positions, 0 if not stated.
    """

    hidden: int
    layers: int
    vocab_size: int
    max_model_len: int


def text_config(config: Config) -> Config:
    """Return the config of the language model, with what stands beside it, of a multimodal one; else *config*."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, Mapping) else config


def target_of(config: Config) -> TargetDims:
    """Return the dimensions of a target; raises `ModelError` if its config does not state them."""
    return TargetDims(
        hidden=integer("target", config, "hidden_size", "n_embd", "d_model"),
        layers=integer("target", config, "num_hidden_layers", "n_layer"),
        vocab_size=integer("target", config, "vocab_size"),
        max_model_len=integer("target", config, "max_position_embeddings", "n_positions", default=0),
    )


def integer(title: str, config: Config, *keys: str, default: int | None = None) -> int:
    """Return the first of *keys* that has a value, or *default*.

    Raises:
        ModelError: none has and there is no default, or it is not a whole number of at least 0.
    """
    key = next((key for key in keys if config.get(key) is not None), None)
    if key is None:
        if default is None:
            refuse(title, f"its config has no {keys[0]}")
        return default
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int | str) or not str(value).isdecimal():
        refuse(title, f"{key} in its config must be a whole number, got {value!r}")
    return int(value)


def number(title: str, config: Config, key: str, default: float) -> float:
    """Return a real number, *default* if missing; raises `ModelError` for anything else."""
    value = config.get(key)
    if value is None:
        return default
    try:
        return float(value)
    except (TypeError, ValueError):
        refuse(title, f"{key} in its config must be a number, got {value!r}")


def flag(title: str, config: Config, *keys: str, default: bool) -> bool:
    """Return the first of *keys* that has a value, "False" and "true" read as such, or *default*.

    Raises:
        ModelError: it is neither true nor false.
    """
    key = next((key for key in keys if config.get(key) is not None), None)
    if key is None:
        return default
    word = str(config[key]).strip().lower()
    if word not in TRUE + FALSE:
        refuse(title, f"{key} in its config must be true or false, got {config[key]!r}")
    return word in TRUE


def integers(title: str, config: Config, key: str) -> tuple[int, ...]:
    """Return a list of whole numbers, empty if missing; raises `ModelError` for anything else."""
    value = config.get(key)
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
        refuse(title, f"{key} in its config must be a list of whole numbers, got {value!r}")
    return tuple(value)


def section(config: Config, key: str) -> Config:
    """Return the object under *key*, empty if missing."""
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def check_vocabulary(title: str, size: int, target: TargetDims) -> None:
    """Refuse a draft whose ids are not the target's; raises `ModelError` with both sizes."""
    if size != target.vocab_size:
        refuse(
            title,
            f"it was made for a vocabulary of {size}, but the target has {target.vocab_size}: "
            "use the one that was trained for this target",
        )


def check_width(title: str, key: str, size: int, target: TargetDims) -> None:
    """Refuse a draft that reads states of another width than the target's; raises `ModelError` with both."""
    if size != target.hidden:
        refuse(
            title,
            f"{key} is {size}, but the target's states are {target.hidden} wide: "
            "use the one that was trained for this target",
        )


def check_unquantised(title: str, config: Config) -> None:
    """Refuse quantised weights by the name of their method; raises `ModelError`."""
    for key in ("quantization_config", "compression_config"):
        described = config.get(key)
        if described:
            method = described.get("quant_method", "unknown") if isinstance(described, Mapping) else described
            refuse(title, f"its weights are quantised ({method}), which is not supported; use the unquantised ones")
