"""Engine arguments -> `EngineConfig`: vLLM's names for Python, flags and YAML alike.

An argument is one of four kinds: kept (it sets a field of the configuration), without meaning here (a warning, once),
one that would change results (refused by name), or unknown (refused with a hint). `trust_remote_code` is of the
second kind: checkpoints' own code is never run, so it can be promised neither effect nor harm.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from protos.config import aliases, speculation_arguments
from protos.config.engine import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    Placement,
    SchedulerConfig,
    SpeculativeConfig,
)
from protos.config.method import Detect, nothing_known
from protos.errors import ConfigError
from protos.validation import did_you_mean, shown, warn_once

Arguments = dict[str, Any]
_INTEGER = TypeAdapter(int)


@dataclass(frozen=True)
class Option:
    """One kept argument: `name` is what users write, `part.field` where it goes."""

    name: str
    part: str
    field: str
    help: str
    is_flag: bool = False


KEPT = (
    Option("model", "model", "model", "Hub id or folder of the model; default: the embedded demo pair"),
    Option("tokenizer", "model", "tokenizer", "Hub id or folder of the tokenizer, if not the model's"),
    Option("revision", "model", "revision", "branch, tag or commit of the model"),
    Option("tokenizer_revision", "model", "tokenizer_revision", "branch, tag or commit of the tokenizer"),
    Option("download_dir", "model", "download_dir", "where downloads are kept"),
    Option("dtype", "model", "dtype", "auto, float32, bfloat16 or float16"),
    Option("max_model_len", "model", "max_model_len", "context length in tokens; default: the model's"),
    Option("enforce_eager", "model", "enforce_eager", "never compile", is_flag=True),
    Option("batch_invariant", "model", "batch_invariant", "the same logits to the bit in any batch", is_flag=True),
    Option("skip_tokenizer_init", "model", "skip_tokenizer_init", "token ids in, token ids out", is_flag=True),
    Option("device", "model", "device", "auto, cpu or cuda"),
    Option("num_threads", "model", "num_threads", "CPU threads"),
    Option("generation_config", "model", "generation_config", "sampling defaults: auto (the model's), vllm, a folder"),
    Option("block_size", "cache", "block_size", "tokens in a block of the KV cache"),
    Option("num_gpu_blocks_override", "cache", "num_blocks", "blocks of the KV cache, instead of measuring memory"),
    Option("kv_cache_memory_bytes", "cache", "memory_bytes", "bytes of the KV cache, instead of measuring memory"),
    Option("gpu_memory_utilization", "cache", "memory_utilization", "share of the memory to use, 0 to 1"),
    Option("enable_prefix_caching", "cache", "enable_prefix_caching", "share equal prompt prefixes", is_flag=True),
    Option("max_num_seqs", "scheduler", "max_num_seqs", "sequences in a step at most"),
    Option("max_num_batched_tokens", "scheduler", "max_num_batched_tokens", "tokens in a step at most"),
    Option("enable_chunked_prefill", "scheduler", "enable_chunked_prefill", "split long prompts", is_flag=True),
    Option("tensor_parallel_size", "parallel", "tensor_parallel_size", "devices the model is split over"),
    Option("distributed_executor_backend", "parallel", "executor", "uni, ray, or mp (uni on one device, else ray)"),
    Option("placement_strategy", "parallel", "placement_strategy", "STRICT_PACK (one node), PACK or SPREAD, on ray"),
    Option("worker_resources", "parallel", "worker_resources", "JSON of what each worker asks ray for; default: 1 GPU"),
    Option("placement_timeout_s", "parallel", "placement_timeout_s", "seconds to wait for room in the ray cluster"),
    Option("rebuild_timeout_s", "parallel", "rebuild_timeout_s", "seconds a lost target group waits for room"),
    Option("seed", "engine", "seed", "makes the seeds of requests without one repeatable"),
    Option("served_model_name", "engine", "served_model_name", "the name, or names, the API gives the model"),
    Option("disable_log_stats", "engine", "disable_log_stats", "no summary lines", is_flag=True),
    Option("log_requests", "engine", "log_requests", "a log line for each request that ended", is_flag=True),
    Option("log_format", "engine", "log_format", "log lines as text or json"),
)
SPECULATIVE = speculation_arguments.KEY
PARTS: dict[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
}
ALIASES = {
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "sc": SPECULATIVE,
    "model_path": "model",
    "tokenizer_path": "tokenizer",
    "torch_dtype": "dtype",
    "max_seq_len": "max_model_len",
    "context_length": "max_model_len",
    "mem_fraction_static": "gpu_memory_utilization",
    "max_running_requests": "max_num_seqs",
    "random_seed": "seed",
    "executor": "distributed_executor_backend",
    "enable_log_requests": "log_requests",
}
IGNORED = frozenset({
    "swap_space", "cpu_offload_gb", "compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size",
    "max_seq_len_to_capture", "num_scheduler_steps", "max_parallel_loading_workers", "optimization_level",
    "attention_backend", "attention_config", "max_logprobs", "max_num_partial_prefills", "max_long_partial_prefills",
    "long_prefill_token_threshold", "num_lookahead_slots", "scheduling_policy", "num_gpu_blocks", "gpu_id",
    "prefix_caching_hash_algo", "hf_token", "code_revision", "config_format", "tokenizer_mode",
    "tokenizer_pool_size", "ray_workers_use_nsight", "kv_events_config", "observability_config",
    "limit_mm_per_prompt", "mm_processor_kwargs", "stream_interval", "safetensors_load_strategy",
    "preemption_mode", "guided_decoding_backend", "structured_outputs_config", "uvicorn_log_level",
})  # fmt: skip
IGNORED_FLAGS = frozenset({
    "trust_remote_code", "async_scheduling", "use_v2_block_manager", "disable_log_requests",
    "enable_expert_parallel", "disable_custom_all_reduce", "worker_use_ray", "disable_sliding_window",
    "disable_cascade_attn", "enable_sleep_mode", "disable_async_output_proc", "multi_step_stream_outputs",
    "enable_eplb", "use_tqdm_on_load", "disable_frontend_multiprocessing", "disable_hybrid_kv_cache_manager",
    "enable_prompt_tokens_details", "disable_mm_preprocessor_cache",
})  # fmt: skip
# name -> (values that ask for nothing, what to do instead)
REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "quantization": ((), "quantised weights are not supported; load the original checkpoint"),
    "kv_cache_dtype": (("auto",), "the KV cache has the model's dtype"),
    "calculate_kv_scales": ((False,), "the KV cache is not quantised"),
    "load_format": (("auto", "safetensors"), "weights are loaded from safetensors only"),
    "hf_overrides": (({},), "edit the checkpoint's config.json instead"),
    "rope_scaling": (({},), "edit the checkpoint's config.json instead"),
    "rope_theta": ((), "edit the checkpoint's config.json instead"),
    "hf_config_path": ((), "point model at a folder with that config.json"),
    "override_generation_config": (({},), "pass SamplingParams"),
    "logits_processors": (([], ()), "use logit_bias, bad_words or allowed_token_ids"),
    "enable_lora": ((False,), "adapters are not supported; merge the adapter into the model"),
    "lora_modules": (([], ()), "adapters are not supported; merge the adapter into the model"),
    "task": (("auto", "generate"), "only generation is served"),
    "runner": (("auto", "generate"), "only generation is served"),
    "convert": (("auto", "none"), "only generation is served"),
    "enable_prompt_embeds": ((False,), "prompts are text or token ids"),
    "model_impl": (("auto", "transformers"), "models are run through transformers"),
    "kv_transfer_config": (({},), "prefill and decoding share one cache"),
}
REFUSED_FLAGS = frozenset({"calculate_kv_scales", "enable_lora", "enable_prompt_embeds"})
SINGLE = {
    "pipeline_parallel_size": "split the model with tensor_parallel_size",
    "data_parallel_size": "run several servers",
    "decode_context_parallel_size": "split the model with tensor_parallel_size",
    "prefill_context_parallel_size": "split the model with tensor_parallel_size",
}
DTYPES = {"half": "float16", "fp16": "float16", "float": "float32", "fp32": "float32", "bf16": "bfloat16"}
_KEPT = {option.name: option for option in KEPT}
NAMES = (
    frozenset(_KEPT)
    | {SPECULATIVE}
    | IGNORED
    | IGNORED_FLAGS
    | frozenset(REFUSED)
    | frozenset(SINGLE)
    | frozenset(ALIASES)
    | aliases.NAMES
)
_KEPT_FLAGS = frozenset(option.name for option in KEPT if option.is_flag)
FLAGS = (
    _KEPT_FLAGS
    | frozenset(alias for alias, name in ALIASES.items() if name in _KEPT_FLAGS)
    | IGNORED_FLAGS
    | REFUSED_FLAGS
    | aliases.FLAGS
)


def parse(
    given: Mapping[str, Any], *, methods: Collection[str] | None = None, detect: Detect = nothing_known
) -> EngineConfig:
    """Return the configuration that the arguments *given* ask for; names with hyphens or underscores.

    *methods* are the speculative methods there are (None: any name is taken); *detect* describes checkpoints. A model
    that is a draft and names its target is served as the draft of that.

    Raises:
        ConfigError: names the argument, the value, and the limit or what to do instead; one line.
    """
    arguments = speculation_arguments.with_verifier(normalised(given), detect)
    speculative = speculation_arguments.read(arguments, methods, detect)
    _check_refused(arguments)
    _warn_ignored(arguments)
    fields = _fields(arguments)
    fields["parallel"]["executor"] = _executor(arguments, speculative)
    if speculative is not None and speculative.placement is None:
        speculative = replace(speculative, placement=_placement(fields["parallel"]["executor"], speculative))
    _check_budget(fields["scheduler"])
    if "model" not in fields["model"]:
        raise ConfigError("model is missing: a Hub id or a folder")
    parts = {part: _build(part, fields[part]) for part in PARTS}
    engine: EngineConfig = _named(EngineConfig, "engine", {**parts, "speculative": speculative, **fields["engine"]})
    return engine


def normalised(given: Mapping[str, Any]) -> Arguments:
    """Return *given* under today's underscored names; what is unknown or given twice is refused."""
    arguments: Arguments = {}
    for spelt, value in given.items():
        written = str(spelt).lstrip("-").replace("-", "_")
        name = ALIASES.get(written, written)
        if name not in NAMES:
            raise ConfigError(f"unknown argument {str(spelt)!r}{did_you_mean(name, NAMES)}")
        if name in arguments:
            raise ConfigError(f"{name} is given twice, once as {str(spelt)!r}")
        arguments[name] = value
    return arguments


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
            warn_once(f"{name} has no meaning here and is ignored")


def _fields(arguments: Arguments) -> dict[str, Arguments]:
    fields: dict[str, Arguments] = {part: {} for part in (*PARTS, "engine")}
    for name, option in _KEPT.items():
        if arguments.get(name) is not None:
            fields[option.part][option.field] = _read(name, arguments[name])
    return fields


def _read(name: str, value: Any) -> Any:
    if name == "dtype":  # torch.float16 says "torch.float16"
        word = str(value).removeprefix("torch.")
        return DTYPES.get(word, word)
    if name == "served_model_name":
        names = json.loads(value) if isinstance(value, str) and value.startswith("[") else value
        return (names,) if isinstance(names, str) else tuple(names)
    if name == "worker_resources" and isinstance(value, str):
        return _json(name, value)
    if name == "placement_strategy":
        return str(value).upper()
    return str(value) if name in ("model", "tokenizer", "download_dir", "generation_config") else value


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is not valid JSON ({error}): {shown(text)}") from None


def _executor(arguments: Arguments, speculative: SpeculativeConfig | None) -> str:
    """`mp` and no wish mean one process on one device, and Ray where there are several."""
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


def _placement(executor: str, speculative: SpeculativeConfig) -> Placement:
    """Say where a draft model lives if nobody did: by itself, wherever there are several processes anyway."""
    has_draft = speculative.model is not None or "mtp" in speculative.method  # a name, or names
    return "dedicated" if executor == "ray" and has_draft else "colocated"


def _check_budget(scheduler: Arguments) -> None:
    """A step must have room for a token of every sequence; the one not given follows the other."""
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
    try:
        return default if value is None else _INTEGER.validate_python(value)
    except ValidationError:
        raise ConfigError(f"{name} must be an integer, got {shown(value)}") from None


def _build(part: str, fields: Arguments) -> Any:
    return _named(PARTS[part], part, fields)


def _named(cls: type, part: str, fields: Arguments) -> Any:
    """Build *cls*; errors speak of the argument by the name the user wrote."""
    try:
        return cls(**fields)
    except ConfigError as error:
        field, _, rest = str(error).partition(" ")
        names = [option.name for option in KEPT if (option.part, option.field) == (part, field)]
        raise ConfigError(f"{names[0] if names else field} {rest}") from None
