"""Which method is meant: what users call it, what the checkpoint says, and what to say where the two disagree."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from protos.errors import ConfigError
from protos.validation import shown

Keys = Mapping[str, Any]
Methods = str | tuple[str, ...]


class Described(NamedTuple):
    """What a checkpoint says of itself.

    Attributes:
        method: what it is for; "draft_model" for a whole causal model; None where that cannot be told.
        num_tokens: how many tokens it was made to guess, where it says so.
        source: the words that say so, for messages.
        verifier: the target it was made for, where it names one that is meant to be served with it.
    """

    method: str | None = None
    num_tokens: int | None = None
    source: str = ""
    verifier: str | None = None


UNKNOWN = Described()
Detect = Callable[[str, str | None], Described]
"""Describes the checkpoint of a Hub id or a folder, at a revision: unknown where it cannot be reached.

Raises `ModelError` for drafts of kinds that are not available.
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
"""What `parallel_drafting` makes of methods that can draft one token after another, too."""
ALREADY_PARALLEL = frozenset({*PARALLEL.values(), "dflash"})
RUNS_AS = {"p_eagle": "eagle3", "pard": "draft_model", "mtp": "draft_model"}
"""Methods of checkpoints that can also be used otherwise, where that is asked for."""


def nothing_known(_model: str, _revision: str | None) -> Described:
    """A `Detect` that knows nothing."""
    return UNKNOWN


def method_name(method: str) -> str:
    """Return today's name of *method*; `<family>_mtp` is `mtp` for every family. Import paths stay as they are."""
    if is_import_path(method):
        return method.strip()
    name = method.strip().lower().replace("-", "_")
    return "mtp" if name.endswith("_mtp") else METHOD_ALIASES.get(name, name)


def names_of(method: Methods) -> tuple[str, ...]:
    """Return the names of a method or a cascade."""
    return (method,) if isinstance(method, str) else method


def is_import_path(method: str) -> bool:
    """Whether *method* is a class of the user's own, `package.module:Class`, and no name of ours."""
    return ":" in method


def infer(keys: Keys, found: Described) -> Methods:
    """Return the method that *keys* name, or else imply: by n-gram keys, by the checkpoint, by there being a model.

    Args:
        keys: of `speculative_config`, normalised.
        found: what its `model` says of itself; for `mtp` without one, what the target says.

    Raises:
        ConfigError: nothing implies a method, or the checkpoint is for another; names that.
    """
    method = keys.get("method")
    if isinstance(method, str):
        return _settled(method_name(method), keys, found)
    if method is not None:
        names = _cascade(method)
        return tuple(_settled(name, keys, found) if _has_checkpoint(name, keys) else name for name in names)
    if is_ngram(keys):
        return "ngram"
    if keys.get("model") is None:
        raise ConfigError("speculative_config needs a method or a draft model, got " + shown(dict(keys)))
    return _settled(found.method or "draft_model", keys, found)


def is_ngram(keys: Keys) -> bool:
    """Whether keys without a method ask for prompt lookup."""
    model = keys.get("model")
    return model in NGRAM_MODELS or (model is None and bool({"prompt_lookup_max", "prompt_lookup_min"} & set(keys)))


def checkpoint(keys: Keys, target: str | None, target_revision: str | None) -> tuple[str, str | None] | None:
    """Return the Hub id or folder, and its revision, of the draft's weights; None where nobody needs to look at them:
    there are none, or what they are for is known to a class of the user's alone.
    """
    model, method = keys.get("model"), keys.get("method")
    listed = [method] if isinstance(method, str) else method if isinstance(method, list | tuple) else []
    names = [method_name(name) for name in listed if isinstance(name, str)]
    if model is not None:
        is_looked_at = not names or any(_has_checkpoint(name, keys) for name in names)
        return (str(model), keys.get("revision")) if is_looked_at and model not in NGRAM_MODELS else None
    return (target, target_revision) if target is not None and "mtp" in names else None


def _has_checkpoint(name: str, keys: Keys) -> bool:
    """Whether *name* has weights of a public format."""
    if name in MODEL_FREE or is_import_path(name):
        return False
    return name == "mtp" or keys.get("model") is not None


def _cascade(method: object) -> tuple[str, ...]:
    if not isinstance(method, list | tuple) or not method or not all(isinstance(name, str) for name in method):
        raise ConfigError(f"speculative_config: method must be a name or a list of names, got {shown(method)}")
    return tuple(method_name(name) for name in method)


def _settled(name: str, keys: Keys, found: Described) -> str:
    """Return *name* as `parallel_drafting` and the checkpoint turn it."""
    parallel = keys.get("parallel_drafting")
    if parallel is None and found.method == "p_eagle" and name == "eagle3":
        return "p_eagle"  # whose checkpoints are called EAGLE-3 elsewhere, and draft in parallel by themselves
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
    """Refuse to use a checkpoint for what it is not; what it lacks to be used in parallel, its reader can name."""
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
