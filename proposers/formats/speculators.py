"""The `speculators` format: a config with a section for the draft's layers, which names its target."""

from typing import Any

from proposers.formats.shared.layout import refuse
from proposers.formats.shared.values import Config, integer, section

TYPE = "speculators_model_type"
METHODS = {"eagle3": "eagle3", "peagle": "p_eagle", "dflash": "dflash", "mtp": "mtp"}
LAYERS = "transformer_layer_config"
_OWN = frozenset({TYPE, LAYERS, "speculators_config", "speculators_version", "model_type", "architectures", "auto_map"})


def is_speculators(config: Config) -> bool:
    """Whether *config* is of this format."""
    return TYPE in config


def method_of(config: Config) -> str:
    """Return the method of a config of this format; raises `ModelError` if it is not supported."""
    kind = str(config[TYPE])
    if kind not in METHODS:
        refuse("speculators", f"its type {kind!r} is not supported; supported are {', '.join(sorted(METHODS))}")
    return METHODS[kind]


def flattened(config: Config) -> dict[str, Any]:
    """Return *config* with its layers' section at the top level, as in other formats; other configs unchanged."""
    layers = section(config, LAYERS)
    if not is_speculators(config):
        return dict(config)
    top = {key: value for key, value in config.items() if key not in _OWN and value is not None}
    return {**layers, **top}


def verifier_of(config: Config) -> str | None:
    """Return the target that the checkpoint was made for, a Hub id or a folder; None if not stated."""
    name = section(section(config, "speculators_config"), "verifier").get("name_or_path")
    return str(name) if name else None


def tokens_of(config: Config) -> int | None:
    """Return the number of draft tokens, if stated; raises `ModelError` if it is not a number."""
    proposals = section(config, "speculators_config").get("proposal_methods")
    first = proposals[0] if isinstance(proposals, list) and proposals and isinstance(proposals[0], dict) else {}
    return integer("speculators", first, "speculative_tokens", default=0) or None
