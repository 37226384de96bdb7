"""Arguments outside `speculative_config` that configure speculation: vLLM's removed ones, and other engines'.

Each becomes one or two keys of `speculative_config`, with a warning that names them.
"""

from collections.abc import Callable, Mapping
from typing import Any

from protos.errors import ConfigError
from protos.validation import shown, warn_once

Keys = dict[str, Any]

# vLLM's own short forms, accepted without a warning.
SHORTCUTS = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
RENAMED = {
    # vLLM until 0.8
    "speculative_model": "model",
    "num_speculative_tokens": "num_speculative_tokens",
    "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "spec_draft_tp": "draft_tensor_parallel_size",
    "speculative_max_model_len": "max_model_len",
    "speculative_model_quantization": "quantization",
    "speculative_disable_by_batch_size": "disable_by_batch_size",
    "speculative_disable_mqa_scorer": "disable_mqa_scorer",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "spec_decoding_acceptance_method": "acceptance_method",
    "typical_acceptance_sampler_posterior_threshold": "posterior_threshold",
    "typical_acceptance_sampler_posterior_alpha": "posterior_alpha",
    "disable_logprobs_during_spec_decoding": "disable_logprobs",
    # SGLang and LMDeploy
    "speculative_algorithm": "method",
    "speculative_draft_model_path": "model",
    "speculative_draft_model": "model",
    "speculative_draft_model_revision": "revision",
    "speculative_draft_model_quantization": "quantization",
    "speculative_draft_kv_cache_dtype": "kv_cache_dtype",
    "speculative_draft_attention_backend": "attention_backend",
    "speculative_num_steps": "num_steps",
    "speculative_eagle_topk": "eagle_topk",
    "speculative_num_draft_tokens": "num_speculative_tokens",
    "speculative_token_map": "token_map",
    "speculative_draft_window_size": "draft_kv_window",
    "speculative_draft_sink_size": "draft_kv_sinks",
    # llama.cpp
    "model_draft": "model",
    "spec_draft_n_max": "num_speculative_tokens",
    "draft_max": "num_speculative_tokens",
    # transformers
    "assistant_model": "model",
    "num_assistant_tokens": "num_speculative_tokens",
    "assistant_confidence_threshold": "assistant_confidence_threshold",
}
DRAFT_TOKENS = "speculative_num_draft_tokens"
FLAGS = frozenset(
    {
        "speculative_disable_mqa_scorer",
        "disable_logprobs_during_spec_decoding",
        "speculative_use_rejection_sampling",
        "speculative_use_block_verification",
    }
)


def _lossless(value: object) -> Keys:
    if str(value) not in ("1", "1.0"):
        raise ConfigError(f"an acceptance threshold below 1.0 is lossy: it changes the answer, got {shown(value)}")
    return {}


def _lookup(value: object) -> Keys:
    return {"method": "ngram", "num_speculative_tokens": value}


def _rule(name: str) -> Callable[[object], Keys]:
    return lambda value: {"rejection_sample_method": name} if str(value).lower() in ("true", "1") else {}


TRANSLATED: dict[str, Callable[[object], Keys]] = {
    "speculative_accept_threshold_single": _lossless,
    "speculative_accept_threshold_acc": _lossless,
    "speculative_use_rejection_sampling": _rule("standard"),
    "speculative_use_block_verification": _rule("block"),
    "prompt_lookup_num_tokens": _lookup,
    "speculate": _lookup,
}
NAMES = frozenset(SHORTCUTS) | frozenset(RENAMED) | frozenset(TRANSLATED)


def collect(arguments: Mapping[str, Any]) -> Keys:
    """Return the `speculative_config` keys that *arguments* (names with underscores) set outside of it.

    Raises:
        ConfigError: two of them contradict each other, or one would be lossy.
    """
    keys: Keys = {}
    for name in sorted(NAMES & arguments.keys(), key=_rank):
        if arguments[name] is None:
            continue
        for key, value in _translate(name, arguments[name]).items():
            if name != DRAFT_TOKENS and keys.setdefault(key, value) != value:
                raise ConfigError(f"{name} sets {key} to {shown(value)}, another argument to {shown(keys[key])}")
            keys.update(_counted(keys, value) if name == DRAFT_TOKENS else {})
    return keys


def _rank(name: str) -> tuple[bool, str]:
    """Sort SGLang's number of draft tokens last: its meaning depends on the others."""
    return name == DRAFT_TOKENS, name


def _counted(keys: Keys, tokens: object) -> Keys:
    """Return K for SGLang's number of draft tokens (a tree's root counts); for chains its steps take precedence."""
    if "num_speculative_tokens" in keys:
        return {}
    if str(keys.get("eagle_topk", 1)) != "1" and str(tokens).isdecimal():
        return {"num_speculative_tokens": int(str(tokens)) - 1}
    return {} if "num_steps" in keys else {"num_speculative_tokens": tokens}


def _translate(name: str, value: object) -> Keys:
    if name in SHORTCUTS:
        return {SHORTCUTS[name]: value}
    if name in TRANSLATED:
        keys = TRANSLATED[name](value)
        warn_once(f"{name} is not an argument of Slipstream; it was translated to speculative_config={shown(keys)}")
        return keys
    warn_once(f"{name} is deprecated; write speculative_config={{{RENAMED[name]!r}: ...}}")
    return {RENAMED[name]: value}
