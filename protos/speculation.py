"""What users write about speculation -> `SpeculativeConfig`: vLLM's keys, and the names of yesterday and next door."""

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from protos.config import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from protos.errors import ConfigError
from protos.validation import did_you_mean, shown, warn_once

Keys = dict[str, Any]
Detect = Callable[[str], str | None]
"""Tells the method of a draft checkpoint (a Hub id or a folder), or None where it is a plain model."""

DEFAULT_TOKENS = 5
NGRAM_MODELS = ("ngram", "[ngram]")
METHOD_ALIASES = {
    "ngram_gpu": "ngram",
    "[ngram]": "ngram",
    "prompt_lookup": "ngram",
    "standalone": "draft_model",
    "draft_target": "draft_model",
    "draft": "draft_model",
    "nextn": "mtp",
    "deepseek_mtp": "mtp",
    "glm4_moe_mtp": "mtp",
    "mimo_mtp": "mtp",
    "ernie_mtp": "mtp",
    "qwen3_next_mtp": "mtp",
}
KEY_ALIASES = {
    "decoding_type": "method",
    "algorithm": "method",
    "speculative_model": "model",
    "max_draft_len": "num_speculative_tokens",
    "num_draft_tokens": "num_speculative_tokens",
    "draft_tp": "draft_tensor_parallel_size",
}
BOOLEANS = frozenset({
    "enforce_eager", "parallel_drafting", "use_heterogeneous_vocab", "disable_padded_drafter_batch",
    "disable_eagle_block_drop", "disable_lookahead_block_hashes", "use_local_argmax_reduction",
    "enable_adaptive_verification", "disable_logprobs", "disable_mqa_scorer",
})  # fmt: skip
# Cannot change the answer, and steer nothing that exists here (or nothing of the chosen method).
HARMLESS = frozenset({
    "disable_padded_drafter_batch", "disable_eagle_block_drop", "disable_lookahead_block_hashes",
    "use_local_argmax_reduction", "enable_adaptive_verification", "disable_logprobs", "disable_mqa_scorer",
    "attention_backend", "moe_backend", "code_revision", "draft_sample_method", "posterior_threshold",
    "posterior_alpha", "fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k", "dspark_draft_topk",
    "xpress_topc", "index_share_for_mtp_iteration", "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob",
    "num_steps", "token_map",
})  # fmt: skip
REFUSED = {
    "tensor_parallel_size": "pass draft_tensor_parallel_size",
    "quantization": "quantised drafts are not supported",
    "kv_cache_dtype": "the draft's KV cache has the draft's dtype",
    "draft_load_config": "drafts are loaded from safetensors only",
    "draft_lm_head_quantization": "quantised drafts are not supported",
    "parallel_drafting": "no proposer drafts in parallel yet",
    "use_heterogeneous_vocab": "the draft must have the target's tokenizer",
    "synthetic_acceptance_rates": "forced acceptance is not available",
    "synthetic_acceptance_length": "forced acceptance is not available",
    "speculative_token_tree": "drafts are chains; leave it out",
}
NEUTRAL: tuple[object, ...] = (None, False, "auto", {}, [], ())
LOSSY = ("fly", "typical", "typical_acceptance_sampler", "typical_acceptance")
KNOWN = frozenset(SpeculativeConfig.__dataclass_fields__)


def read(given: Mapping[str, Any] | str | None, methods: Collection[str] | None, detect: Detect) -> (
    SpeculativeConfig | None
):  # fmt: skip
    """Return the configuration that *given* (a dict or JSON text) asks for, None where it asks for none.

    *methods* are the proposers there are, None to take any name.

    Raises:
        ConfigError: names the key, the value, and what would be right.
    """
    keys = _normalised(mapping(given))
    if not keys:
        return None
    method = infer_method(keys, detect)
    _check_available(method, methods)
    _check_rule(keys)
    _check_draft_tensor_parallel_size(keys)
    _check_keys(keys)
    fields = {key: value for key, value in keys.items() if key in KNOWN}
    fields |= _lookup_lengths(keys)
    fields |= {"method": method, "model": _model(method, keys), "num_speculative_tokens": _tokens(keys)}
    fields |= _by_batch_size(keys, fields["num_speculative_tokens"])
    try:
        return SpeculativeConfig(**fields)
    except ConfigError as error:
        raise ConfigError(f"speculative_config: {error}") from None


def infer_method(keys: Mapping[str, Any], detect: Detect = lambda model: None) -> str | tuple[str, ...]:
    """Return the method that *keys* name, or else imply: by n-gram keys, by the checkpoint, by there being a model."""
    method, model = keys.get("method"), keys.get("model")
    if isinstance(method, str):
        return _method_name(method)
    if method is not None:
        return _cascade(method)
    if model in NGRAM_MODELS or (model is None and {"prompt_lookup_max", "prompt_lookup_min"} & set(keys)):
        return "ngram"
    if model is None:
        raise ConfigError("speculative_config needs a method or a draft model, got " + shown(dict(keys)))
    return detect(str(model)) or "draft_model"


def mapping(given: Mapping[str, Any] | str | None) -> Mapping[str, Any]:
    """Return *given*, read from JSON if it is text; empty for None."""
    if isinstance(given, str):
        given = _json(given)
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"speculative_config must be a dict or a JSON object, got {shown(given)}")
    return given


def _json(text: str) -> Any:
    if text.strip().lower() in ("", "none"):
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"speculative_config is not valid JSON ({error}): {shown(text)}") from None


def _normalised(given: Mapping[str, Any]) -> Keys:
    """Return *given* with today's names, string booleans read, and nothing for what is None."""
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


def _method_name(method: str) -> str:
    name = method.strip().lower().replace("-", "_")
    return METHOD_ALIASES.get(name, name)


def _cascade(method: object) -> tuple[str, ...]:
    if not isinstance(method, list | tuple) or not method or not all(isinstance(name, str) for name in method):
        raise ConfigError(f"speculative_config: method must be a name or a list of names, got {shown(method)}")
    return tuple(_method_name(name) for name in method)


def _check_available(method: str | tuple[str, ...], methods: Collection[str] | None) -> None:
    names = (method,) if isinstance(method, str) else method
    for name in names:
        if methods is not None and name not in methods:
            raise ConfigError(
                f"speculative method {shown(name)} is not available; choose one of: {', '.join(sorted(methods))}"
            )


def _check_rule(keys: Keys) -> None:
    """Take the one release rule there is; everything lossy is refused as such."""
    for key in ("acceptance_method", "rejection_sample_method"):
        rule = str(keys.pop(key, "coupled"))
        if rule in LOSSY:
            raise ConfigError(f"speculative_config: {key} {rule!r} is lossy: it changes the answer; leave it out")
        if rule not in ("coupled", "rejection_sampler"):
            raise ConfigError(f"speculative_config: {key} {shown(rule)} is not available; the one there is: coupled")


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
            warn_once(f"speculative_config: {key} has no meaning here and is ignored")
        elif key not in KNOWN:
            raise ConfigError(f"speculative_config: unknown key {key!r}{did_you_mean(key, KNOWN)}")


def _lookup_lengths(keys: Keys) -> Keys:
    """Mirror whichever end of the n-gram range was left out; both left out are the defaults."""
    given = [keys[key] for key in ("prompt_lookup_min", "prompt_lookup_max") if key in keys]
    if not given:
        return {}
    return {"prompt_lookup_min": given[0], "prompt_lookup_max": given[-1]}


def _model(method: str | tuple[str, ...], keys: Keys) -> str | None:
    model = keys.get("model")
    names = (method,) if isinstance(method, str) else method
    if model in NGRAM_MODELS:
        model = None
    if model is None and "draft_model" in names:
        raise ConfigError("speculative_config: method 'draft_model' needs a model: a Hub id or a folder")
    if model is not None and set(names) == {"ngram"}:
        raise ConfigError(f"speculative_config: method 'ngram' uses no draft model, got model {shown(str(model))}")
    return None if model is None else str(model)


def _tokens(keys: Keys) -> object:
    """K: as given, else the most the table by batch size asks for, else 5."""
    table = keys.get("num_speculative_tokens_per_batch_size")
    if "num_speculative_tokens" not in keys and table:
        return max(1, *(k for _, _, k in _table(table, MAX_SPECULATIVE_TOKENS)))
    return keys.get("num_speculative_tokens", DEFAULT_TOKENS)


def _by_batch_size(keys: Keys, most: object) -> Keys:
    value = keys.get("num_speculative_tokens_per_batch_size")
    if value is None:
        return {}
    if "disable_by_batch_size" in keys:
        raise ConfigError(
            "speculative_config: disable_by_batch_size and num_speculative_tokens_per_batch_size both say when to "
            "speculate less; give one"
        )
    limit = most if isinstance(most, int) else MAX_SPECULATIVE_TOKENS
    return {"num_speculative_tokens_per_batch_size": _table(value, limit)}


def _table(value: object, limit: int) -> tuple[tuple[int, int, int], ...]:
    """Check rows `[first batch size, last, K]`: from 1 on, rising, without overlap; gaps keep the K before."""
    name = "speculative_config: num_speculative_tokens_per_batch_size"
    if not isinstance(value, list | tuple) or not value:
        raise ConfigError(f"{name} must be a list of [start, end, K], got {shown(value)}")
    rows: list[tuple[int, int, int]] = []
    for row in value:
        if not isinstance(row, list | tuple) or len(row) != 3 or not all(type(number) is int for number in row):
            raise ConfigError(f"{name}: each row must be three integers [start, end, K], got {shown(row)}")
        start, end, k = row
        if start > end or (start != 1 if not rows else start <= rows[-1][1]):
            raise ConfigError(f"{name}: rows must start at batch size 1 and rise without overlap, got {shown(row)}")
        if not 0 <= k <= limit:
            raise ConfigError(f"{name}: K must be from 0 to {limit}, got {k} in {shown(row)}")
        rows.append((start, end, k))
    return tuple(rows)
