"""Where engine arguments say what to speculate with: `speculative_config`, arguments beside it, the model itself."""

from collections.abc import Collection, Mapping
from typing import Any

from protos.config import aliases, speculation
from protos.config.engine import SpeculativeConfig
from protos.config.method import Detect
from protos.errors import ConfigError
from protos.validation import shown, warn_once

KEY = "speculative_config"
Arguments = dict[str, Any]


def with_verifier(arguments: Arguments, detect: Detect) -> Arguments:
    """Put the target that a `speculators` checkpoint names in its place, and the checkpoint into `speculative_config`.

    As in vLLM, requests may go on calling the model by the checkpoint's name.
    """
    target = _target(arguments)
    verifier = detect(*target).verifier if target else None
    if target is None or verifier is None:
        return arguments
    draft, revision = target
    warn_once(f"{draft} is a draft: it is served with the target that it names, {verifier}")
    given = speculation.mapping(arguments.get(KEY))
    changed = {"served_model_name": draft, **arguments, "model": verifier, "revision": None}
    if given or arguments.get(KEY) is None:
        changed[KEY] = {"model": draft, **({"revision": revision} if revision else {}), **given}
    return changed


def read(arguments: Mapping[str, Any], methods: Collection[str] | None, detect: Detect) -> SpeculativeConfig | None:
    """Put together what `speculative_config` and the removed arguments say.

    Raises:
        ConfigError: they contradict each other, or what they say is wrong.
    """
    keys = dict(speculation.mapping(arguments.get(KEY)))
    for key, value in aliases.collect(arguments).items():
        if keys.setdefault(key, value) != value:
            raise ConfigError(f"{KEY} says {key} {shown(keys[key])}, an argument beside it {shown(value)}")
    return speculation.read(keys, methods, detect, _target(arguments))


def _target(arguments: Mapping[str, Any]) -> tuple[str, str | None] | None:
    """Return the model and its revision."""
    model, revision = arguments.get("model"), arguments.get("revision")
    return None if model is None else (str(model), None if revision is None else str(revision))
