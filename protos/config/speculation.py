"""Builds a `SpeculativeConfig` from `speculative_config`: vLLM's keys, with removed and other engines' names."""

import json
from collections.abc import Collection, Mapping
from typing import Any, get_args

from protos.config import kv_cache_dtype
from protos.config.engine import PROBABILISTIC_RULES, RejectionSampleMethod, SpeculativeConfig
from protos.config.kv_window import SELF_WINDOW
from protos.config.method import (
    MODEL_FREE,
    NGRAM_MODELS,
    UNKNOWN,
    Detect,
    Methods,
    checkpoint,
    infer,
    is_import_path,
    names_of,
    nothing_known,
)
from protos.config.num_tokens import by_batch_size, has_default_shape, num_tokens
from protos.config.tree import STEPS, TOKENS, TOPK, TREE, shaped
from protos.errors import ConfigError
from protos.validation import did_you_mean, shown, warn_once

Keys = dict[str, Any]
NEEDS_MODEL = frozenset({
    "draft_model", "medusa", "hydra", "mlp_speculator", "recurrent", "eagle", "eagle3", "p_eagle", "pard", "dflash",
})  # fmt: skip
KEY_ALIASES = {
    "decoding_type": "method",
    "algorithm": "method",
    "speculative_model": "model",
    "max_draft_len": "num_speculative_tokens",
    "num_draft_tokens": "num_speculative_tokens",
    "draft_tp": "draft_tensor_parallel_size",
    # trees: the authors of Medusa, Hydra and EAGLE; SGLang; TensorRT-LLM; ReDrafter
    "medusa_choices": TREE,
    "hydra_choices": TREE,
    "eagle_choices": TREE,
    "topk": TOPK,
    "speculative_eagle_topk": TOPK,
    "dynamic_tree_max_topK": TOPK,
    "num_beams": TOPK,
    "beam_width": TOPK,
    "speculative_num_steps": STEPS,
    "beam_length": STEPS,
    # TensorRT-LLM's lookahead
    "max_window_size": "lookahead_window",
    "max_ngram_size": "lookahead_ngram",
    "max_verification_set_size": "lookahead_guesses",
}
BOOLEANS = frozenset({
    "enforce_eager", "parallel_drafting", "use_heterogeneous_vocab", "disable_padded_drafter_batch",
    "disable_eagle_block_drop", "disable_lookahead_block_hashes", "use_local_argmax_reduction",
    "enable_adaptive_verification", "disable_logprobs", "disable_mqa_scorer",
})  # fmt: skip
# Have no effect here, or none with the chosen method, and cannot change the answer.
HARMLESS = frozenset({
    "disable_padded_drafter_batch", "disable_eagle_block_drop", "disable_lookahead_block_hashes",
    "use_local_argmax_reduction", "enable_adaptive_verification", "disable_logprobs", "disable_mqa_scorer",
    "attention_backend", "moe_backend", "code_revision", "posterior_threshold",
    "posterior_alpha", "fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k", "dspark_draft_topk",
    "xpress_topc", "index_share_for_mtp_iteration", "token_map",
})  # fmt: skip
REFUSED = {
    "tensor_parallel_size": "pass draft_tensor_parallel_size",
    "draft_load_config": "drafts are loaded as they are stored: safetensors, and heads that torch saved",
    "draft_lm_head_quantization": "quantised heads are not supported",
}
NEUTRAL: tuple[object, ...] = (None, False, "auto", {}, [], ())
LOSSY = ("fly", "typical", "typical_acceptance_sampler", "typical_acceptance")
RULES: tuple[RejectionSampleMethod, ...] = get_args(RejectionSampleMethod)
KNOWN = frozenset(SpeculativeConfig.__dataclass_fields__) - {"draft_block_size", "has_default_shape"}
AUTO = "auto"
AUTO_TOKENS = 5
"""Draft tokens with heads in the target's checkpoint, whose own number is that of the heads alone."""
SETTLED = frozenset({"parallel_drafting"})
"""Keys that only choose the method."""


def read(
    given: Mapping[str, Any] | str | None,
    methods: Collection[str] | None,
    detect: Detect = nothing_known,
    target: tuple[str, str | None] | None = None,
) -> SpeculativeConfig | None:
    """Return the configuration for *given*, None if that is empty.

    Args:
        given: `speculative_config`, as a dict or JSON text.
        methods: the available methods; None accepts any name. Import paths are accepted, and checked when loaded.
        detect: describes checkpoints.
        target: the target's Hub id or folder, and its revision.

    Raises:
        ConfigError: names the key, the value, and what is allowed.
    """
    keys = normalised(mapping(given))
    if not keys:
        return None
    keys = _chosen_for(keys, detect, target)
    where = checkpoint(keys, *(target or (None, None)))
    found = detect(*where) if where else UNKNOWN
    method = infer(keys, found, None if target is None else target[0])
    _check_available(method, methods)
    keys = _with_acceptance_rule(keys)
    _check_draft_tensor_parallel_size(keys)
    _check_keys(keys)
    keys = shaped(method, keys)
    fields = {key: value for key, value in keys.items() if key in KNOWN}
    fields |= _lookup_lengths(keys)
    fields |= {"method": method, "model": _model(method, keys, target), TOKENS: num_tokens(method, keys, found)}
    if "kv_cache_dtype" in fields:
        fields["kv_cache_dtype"] = kv_cache_dtype.canonical(fields["kv_cache_dtype"])
    fields["has_default_shape"] = has_default_shape(method, keys, found)
    fields |= by_batch_size(keys, fields[TOKENS])
    if found.method in names_of(method):
        fields["draft_block_size"] = found.block_size
    try:
        return SpeculativeConfig(**fields)
    except ConfigError as error:
        raise ConfigError(f"speculative_config: {error}") from None


def _chosen_for(keys: Keys, detect: Detect, target: tuple[str, str | None] | None) -> Keys:
    """Return *keys* with the method that "auto" stands for: what needs no weights but those of the target.

    The policy then chooses among its draft tokens and none. Suffix trees contain every match that n-grams find.
    """
    if keys.get("method") != AUTO:
        return keys
    if keys.get("model") is not None:
        raise ConfigError(f"speculative_config: method 'auto' uses no draft model, got model {shown(keys['model'])}")
    if target is None or detect(*target).method != "mtp":
        return keys | {"method": "suffix"}
    return {TOKENS: AUTO_TOKENS, **keys, "method": ("suffix", "mtp")}


def mapping(given: Mapping[str, Any] | str | None) -> Mapping[str, Any]:
    """Return *given*, parsed from JSON if it is text; empty for None."""
    if isinstance(given, str):
        given = _json(given)
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"speculative_config must be a dict or a JSON object, got {shown(given)}{_instead(given)}")
    return given


def _instead(given: object) -> str:
    """Return what to write for a method's name alone."""
    return f'; write {{"method": "{given}"}}' if isinstance(given, str) and given.isidentifier() else ""


def _json(text: str) -> Any:
    word = text.strip().strip('"').lower()
    if word in ("", "none", AUTO):
        return {"method": AUTO} if word == AUTO else None
    if word.isidentifier() and word not in {"null", "true", "false"}:
        return word  # a method's name
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"speculative_config is not valid JSON ({error}): {shown(text)}") from None


def normalised(given: Mapping[str, Any]) -> Keys:
    """Return *given* under current names, with string booleans parsed and None values dropped.

    Raises:
        ConfigError: two names are of one key.
    """
    keys: Keys = {}
    for spelt, value in given.items():
        name = str(spelt).replace("-", "_")
        key = KEY_ALIASES.get(name, name)
        if key in keys:
            raise ConfigError(f"speculative_config names {key} twice")
        if value is not None:
            keys[key] = _boolean(key, value) if key in BOOLEANS else value
    return keys


def _boolean(key: str, value: object) -> bool:
    word = str(value).strip().lower()
    if word not in ("true", "false", "1", "0"):
        raise ConfigError(f"speculative_config: {key} must be true or false, got {shown(value)}")
    return word in ("true", "1")


def _check_available(method: Methods, methods: Collection[str] | None) -> None:
    names = names_of(method)
    for name in names:
        if methods is not None and name not in methods and not is_import_path(name):
            raise ConfigError(
                f"speculative method {shown(name)} is not available; choose one of: "
                f"{', '.join(sorted({*methods, AUTO}))}, or package.module:Class for one of your own"
            )


def _with_acceptance_rule(keys: Keys) -> Keys:
    """Return *keys* with one `rejection_sample_method`; lossy ones are refused, except "synthetic", with a warning."""
    given = {key: str(keys[key]) for key in ("acceptance_method", "rejection_sample_method") if key in keys}
    for key, rule in given.items():
        if rule in LOSSY:
            raise ConfigError(f"speculative_config: {key} {rule!r} is lossy: it changes the answer; leave it out")
        if rule not in (*RULES, "rejection_sampler"):
            raise ConfigError(
                f"speculative_config: {key} {shown(rule)} is not available; choose one of: {', '.join(RULES)}"
            )
    rules = {rule for rule in given.values() if rule != "rejection_sampler"}
    if len(rules) > 1:
        raise ConfigError(
            f"speculative_config: acceptance_method is {shown(given['acceptance_method'])}, "
            f"rejection_sample_method {shown(given['rejection_sample_method'])}; give one"
        )
    rule = rules.pop() if rules else RULES[0]
    if rule == "synthetic":
        warn_once(
            "rejection_sample_method 'synthetic' CHANGES THE ANSWER: draft tokens are accepted at a given rate, "
            "right or wrong; for load tests only"
        )
    if "draft_sample_method" in keys and rule not in PROBABILISTIC_RULES:
        warn_once(
            f"speculative_config: draft_sample_method has no effect with rejection_sample_method {rule!r} and "
            "is ignored"
        )
    return {key: value for key, value in keys.items() if key not in given} | {"rejection_sample_method": rule}


def _check_draft_tensor_parallel_size(keys: Keys) -> None:
    size = keys.get("draft_tensor_parallel_size", 1)
    if str(size) != "1":
        raise ConfigError(
            f"speculative_config: draft_tensor_parallel_size must be 1, got {shown(size)}: the draft runs on one "
            "device, because splitting so small a model makes it slower"
        )


def _check_keys(keys: Keys) -> None:
    for key, value in keys.items():
        if key in REFUSED:
            if value not in NEUTRAL:
                raise ConfigError(f"speculative_config: {key} is not supported, got {shown(value)}: {REFUSED[key]}")
        elif key in HARMLESS:
            warn_once(f"speculative_config: {key} has no effect here and is ignored")
        elif key not in KNOWN | SETTLED:
            raise ConfigError(f"speculative_config: unknown key {key!r}{did_you_mean(key, KNOWN)}")


def _lookup_lengths(keys: Keys) -> Keys:
    """Return the n-gram range: an end that is missing equals the other; empty (the defaults) if both are."""
    given = [keys[key] for key in ("prompt_lookup_min", "prompt_lookup_max") if key in keys]
    if not given:
        return {}
    return {"prompt_lookup_min": given[0], "prompt_lookup_max": given[-1]}


def _model(method: Methods, keys: Keys, target: tuple[str, str | None] | None) -> str | None:
    """Return the Hub id or folder of the draft's checkpoint; None if there is none, or it is the target's own."""
    model = keys.get("model")
    names = names_of(method)
    if model in NGRAM_MODELS:
        model = None
    if SELF_WINDOW in names:
        _check_is_target(keys, target)
        return None
    if "mtp" in names and target is not None and (str(model), keys.get("revision")) == target:
        return None
    needing = sorted(NEEDS_MODEL.intersection(names))
    if model is None and needing:
        raise ConfigError(f"speculative_config: method {needing[0]!r} needs a model: a Hub id or a folder")
    if model is not None and MODEL_FREE.issuperset(names):
        raise ConfigError(
            f"speculative_config: method {shown(method)} uses no draft model, got model {shown(str(model))}"
        )
    if "rest" in names and not keys.get("datastore"):
        raise ConfigError(
            "speculative_config: method 'rest' needs a datastore: the file that `slipstream build-datastore` wrote"
        )
    return None if model is None else str(model)


def _check_is_target(keys: Keys, target: tuple[str, str | None] | None) -> None:
    """Refuse another model than *target*, which drafts for itself."""
    model = keys.get("model")
    if model is not None and target is not None and (str(model), keys.get("revision")) != target:
        raise ConfigError(
            f"speculative_config: method {SELF_WINDOW!r} drafts with the target, {target[0]}, got model "
            f"{shown(str(model))}; leave it out, or use method 'draft_model'"
        )
