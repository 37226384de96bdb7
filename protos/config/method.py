"""Infers the method from `speculative_config` and the checkpoint, and refuses contradictions."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from protos.config.kv_window import SELF_WINDOW
from protos.errors import ConfigError
from protos.validation import shown

Keys = Mapping[str, Any]
Methods = str | tuple[str, ...]


class Described(NamedTuple):
    """What a checkpoint's files state.

    Attributes:
        method: the method it is for; "draft_model" for a whole causal model; None if unknown.
        num_tokens: number of tokens it was trained to draft, if stated.
        source: where `num_tokens` stands, for messages.
        verifier: the target it is to be served with, if it names one.
        block_size: positions that it is fed in one forward, whatever the number of draft tokens; 0: as many as needed.
        is_whole: whether it holds a whole model beside the heads of *method*.
    """

    method: str | None = None
    num_tokens: int | None = None
    source: str = ""
    verifier: str | None = None
    block_size: int = 0
    is_whole: bool = False


UNKNOWN = Described()
Detect = Callable[[str, str | None], Described]
"""Describes the checkpoint of a Hub id or folder at a revision; `UNKNOWN` if it cannot be reached.

Raises `ModelError` for kinds of drafts that are not supported.
"""

NGRAM_MODELS = ("ngram", "[ngram]")
MODEL_FREE = frozenset({"ngram", "suffix", "rest", "lookahead"})
METHOD_ALIASES = {
    "ngram_gpu": "ngram",
    "[ngram]": "ngram",
    "prompt_lookup": "ngram",
    "suffix_decoding": "suffix",
    "arctic": "suffix",
    "lookahead_decoding": "lookahead",
    "standalone": "draft_model",
    "draft_target": "draft_model",
    "draft": "draft_model",
    "nextn": "mtp",
    "redrafter": "recurrent",
    "recurrent_drafter": "recurrent",
    "recurrent_drafting": "recurrent",
    "mlpspeculator": "mlp_speculator",
    "eagle1": "eagle",
    "eagle2": "eagle",
    "eagle_3": "eagle3",
    "peagle": "p_eagle",
}
PARALLEL = {"eagle3": "p_eagle", "draft_model": "pard"}
"""The parallel variants of autoregressive methods, chosen by `parallel_drafting`."""
ALREADY_PARALLEL = frozenset({*PARALLEL.values(), "dflash"})
RUNS_AS = {"p_eagle": "eagle3", "pard": "draft_model", "mtp": "draft_model"}
"""Methods of checkpoints that can also be used with another method, on request."""


def nothing_known(_model: str, _revision: str | None) -> Described:
    """A `Detect` that always returns `UNKNOWN`."""
    return UNKNOWN


def method_name(method: str) -> str:
    """Return the current name of *method*; `<family>_mtp` is `mtp`. Import paths are returned unchanged."""
    if is_import_path(method):
        return method.strip()
    name = method.strip().lower().replace("-", "_")
    return "mtp" if name.endswith("_mtp") else METHOD_ALIASES.get(name, name)


def names_of(method: Methods) -> tuple[str, ...]:
    """Return the names of a method or a cascade."""
    return (method,) if isinstance(method, str) else method


def is_import_path(method: str) -> bool:
    """Whether *method* is a user's class, `package.module:Class`, rather than the name of a method."""
    return ":" in method


def infer(keys: Keys, found: Described, target: str | None = None) -> Methods:
    """Return the method that *keys* name, or else the one implied by n-gram keys, the checkpoint, or a model.

    Args:
        keys: of `speculative_config`, normalised.
        found: description of its `model`; for `mtp` without one, of the target.
        target: the target's Hub id or folder. Another whole model drafts as one, whatever heads it has.

    Raises:
        ConfigError: no method is implied, or the checkpoint is for another one, which the message names.
    """
    method = keys.get("method")
    if isinstance(method, str):
        return _resolved(method_name(method), keys, found)
    if method is not None:
        names = _cascade(method)
        return tuple(_resolved(name, keys, found) if _has_checkpoint(name, keys) else name for name in names)
    if is_ngram(keys):
        return "ngram"
    if keys.get("model") is None:
        raise ConfigError("speculative_config needs a method or a draft model, got " + shown(dict(keys)))
    is_other = found.is_whole and keys["model"] != target
    return _resolved("draft_model" if is_other or found.method is None else found.method, keys, found)


def is_ngram(keys: Keys) -> bool:
    """Whether keys without a method imply prompt lookup."""
    model = keys.get("model")
    return model in NGRAM_MODELS or (model is None and bool({"prompt_lookup_max", "prompt_lookup_min"} & set(keys)))


def checkpoint(keys: Keys, target: str | None, target_revision: str | None) -> tuple[str, str | None] | None:
    """Return the Hub id or folder, and revision, of the checkpoint to describe.

    None if the draft has no weights, or only a user's class reads them.
    """
    model, method = keys.get("model"), keys.get("method")
    listed = [method] if isinstance(method, str) else method if isinstance(method, list | tuple) else []
    names = [method_name(name) for name in listed if isinstance(name, str)]
    if model is not None:
        is_described = not names or any(_has_checkpoint(name, keys) for name in names)
        return (str(model), keys.get("revision")) if is_described and model not in NGRAM_MODELS else None
    return (target, target_revision) if target is not None and "mtp" in names else None


def _has_checkpoint(name: str, keys: Keys) -> bool:
    """Whether method *name* has weights, other than the target's, in a public format."""
    if name in MODEL_FREE or name == SELF_WINDOW or is_import_path(name):
        return False
    return name == "mtp" or keys.get("model") is not None


def _cascade(method: object) -> tuple[str, ...]:
    if not isinstance(method, list | tuple) or not method or not all(isinstance(name, str) for name in method):
        raise ConfigError(f"speculative_config: method must be a name or a list of names, got {shown(method)}")
    return tuple(method_name(name) for name in method)


def _resolved(name: str, keys: Keys, found: Described) -> str:
    """Return method *name*, or its variant according to `parallel_drafting` and the checkpoint."""
    parallel = keys.get("parallel_drafting")
    if parallel is None and found.method == "p_eagle" and name == "eagle3":
        return "p_eagle"  # other engines call these checkpoints EAGLE-3
    if parallel:
        name = PARALLEL.get(name, name)
        if name not in ALREADY_PARALLEL:
            raise ConfigError(
                f"speculative_config: parallel_drafting is not possible with method {name!r}; it is with "
                f"{', '.join(sorted([*PARALLEL, *ALREADY_PARALLEL]))}"
            )
    elif parallel is False and name in PARALLEL.values():
        name = RUNS_AS[name]
    _check(name, keys, found)
    return name


def _check(name: str, keys: Keys, found: Described) -> None:
    """Raise if the checkpoint is for another method, unless that one may be used as *name*."""
    if not _has_checkpoint(name, keys) or found.method in (None, name) or RUNS_AS.get(str(found.method)) == name:
        return
    if keys.get("parallel_drafting") and PARALLEL.get(str(found.method)) == name:
        return
    if keys.get("model") is None:
        raise ConfigError(
            "speculative_config: method 'mtp' without a model needs heads in the target's own checkpoint,"
            " whose config names none (num_nextn_predict_layers)"
        )
    raise ConfigError(
        f"speculative_config: method {name!r} contradicts the checkpoint {keys['model']}, which is for "
        f"{found.method!r}: write that, or leave method out"
    )
