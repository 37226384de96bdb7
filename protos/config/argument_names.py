"""The names of engine arguments: vLLM's, with aliases, and what becomes of those that set nothing here.

An argument is one of four kinds: kept (it sets a field of the configuration), ignored (it has no effect here, and is
warned of once), refused (it would change results: an error that names it), or unknown (an error with a suggestion).
`trust_remote_code` is ignored: checkpoints' own code is never run.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from protos.config import aliases
from protos.errors import ConfigError
from protos.validation import did_you_mean

Arguments = dict[str, Any]
SPECULATIVE = "speculative_config"


@dataclass(frozen=True)
class Option:
    """One kept argument: `name` as users write it, and the field of the configuration that it sets, `part.field`."""

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
    Option("kv_cache_dtype", "model", "kv_cache_dtype", "auto (the model's), bfloat16, fp8 or int8"),
    Option("quantization", "model", "quantization", "int8, int4 or fp8: quantise the weights while they are loaded"),
    Option("max_model_len", "model", "max_model_len", "context length in tokens, such as 32K; default: the model's"),
    Option("enforce_eager", "model", "enforce_eager", "never compile", is_flag=True),
    Option("batch_invariant", "model", "batch_invariant", "bitwise the same logits in any batch", is_flag=True),
    Option("skip_self_check", "model", "skip_self_check", "do not compare the target with transformers", is_flag=True),
    Option("skip_tokenizer_init", "model", "skip_tokenizer_init", "token ids in, token ids out", is_flag=True),
    Option("device", "model", "device", "auto, cpu or cuda"),
    Option("num_threads", "model", "num_threads", "CPU threads"),
    Option("generation_config", "model", "generation_config", "sampling defaults: auto (the model's), vllm, a folder"),
    Option("max_logprobs", "model", "max_logprobs", "log-probabilities a request may have at a position; -1: no limit"),
    Option("block_size", "cache", "block_size", "tokens in a block of the KV cache"),
    Option("num_gpu_blocks_override", "cache", "num_blocks", "blocks of the KV cache, instead of measuring memory"),
    Option("kv_cache_memory_bytes", "cache", "memory_bytes", "bytes of the KV cache, instead of measuring memory"),
    Option("gpu_memory_utilization", "cache", "memory_utilization", "share of the memory to use, 0 to 1"),
    Option("enable_prefix_caching", "cache", "enable_prefix_caching", "share equal prompt prefixes", is_flag=True),
    Option("max_num_seqs", "scheduler", "max_num_seqs", "sequences in a step at most"),
    Option("max_num_batched_tokens", "scheduler", "max_num_batched_tokens", "tokens in a step at most"),
    Option("enable_chunked_prefill", "scheduler", "enable_chunked_prefill", "split long prompts", is_flag=True),
    Option("async_scheduling", "scheduler", "async_scheduling", "begin steps on a GPU ahead", is_flag=True),
    Option("tensor_parallel_size", "parallel", "tensor_parallel_size", "devices the model is split over"),
    Option(
        "min_tensor_parallel_size",
        "parallel",
        "min_tensor_parallel_size",
        "ranks that a lost target group is rebuilt over at least where there is no room for all; default: all",
    ),
    Option("distributed_executor_backend", "parallel", "executor", "uni, ray, or mp (uni on one device, else ray)"),
    Option("placement_strategy", "parallel", "placement_strategy", "STRICT_PACK (one node), PACK or SPREAD, on ray"),
    Option(
        "worker_resources", "parallel", "worker_resources", "JSON of the ray resources of each worker; default: 1 GPU"
    ),
    Option("placement_timeout_s", "parallel", "placement_timeout_s", "seconds to wait for room in the ray cluster"),
    Option(
        "rebuild_timeout_s",
        "parallel",
        "rebuild_timeout_s",
        "seconds a lost target group waits for room before requests are refused; default: 30 in servers, 300 in LLM",
    ),
    Option("spare_workers", "parallel", "spare_workers", "processes that wait to replace a lost target rank, on ray"),
    Option("seed", "engine", "seed", "makes the seeds of requests without one repeatable"),
    Option("served_model_name", "engine", "served_model_name", "name of the model in the API; may be repeated"),
    Option("disable_log_stats", "engine", "disable_log_stats", "no summary lines", is_flag=True),
    Option("log_requests", "engine", "log_requests", "a log line for each request that ended", is_flag=True),
    Option("log_format", "engine", "log_format", "log lines as text or json"),
)
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
    "attention_backend", "attention_config", "max_num_partial_prefills", "max_long_partial_prefills",
    "long_prefill_token_threshold", "num_lookahead_slots", "scheduling_policy", "num_gpu_blocks", "gpu_id",
    "prefix_caching_hash_algo", "hf_token", "code_revision", "config_format", "tokenizer_mode",
    "tokenizer_pool_size", "ray_workers_use_nsight", "kv_events_config", "observability_config",
    "limit_mm_per_prompt", "mm_processor_kwargs", "stream_interval", "safetensors_load_strategy",
    "preemption_mode", "guided_decoding_backend", "structured_outputs_config", "uvicorn_log_level",
})  # fmt: skip
IGNORED_FLAGS = frozenset({
    "trust_remote_code", "use_v2_block_manager", "disable_log_requests",
    "enable_expert_parallel", "disable_custom_all_reduce", "worker_use_ray", "disable_sliding_window",
    "disable_cascade_attn", "enable_sleep_mode", "disable_async_output_proc", "multi_step_stream_outputs",
    "enable_eplb", "use_tqdm_on_load", "disable_frontend_multiprocessing", "disable_hybrid_kv_cache_manager",
    "enable_prompt_tokens_details", "disable_mm_preprocessor_cache", "calculate_kv_scales",
})  # fmt: skip
# name -> (values that are accepted because they change nothing, what to do instead)
REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "load_format": (("auto", "safetensors"), "weights are safetensors, or pytorch_model.bin where there are none"),
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
    "reasoning_parser": (("",), "reasoning is part of the text"),
    "logprobs_mode": (("raw_logprobs",), "log-probabilities are those of the raw logits"),
}
REFUSED_FLAGS = frozenset({"enable_lora", "enable_prompt_embeds"})
SINGLE = {
    "pipeline_parallel_size": "split the model with tensor_parallel_size",
    "data_parallel_size": "run several servers",
    "decode_context_parallel_size": "split the model with tensor_parallel_size",
    "prefill_context_parallel_size": "split the model with tensor_parallel_size",
}
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


def spellings(given: Iterable[Any]) -> dict[str, Any]:
    """Return the options of *given* by their current names, with underscores, each as it is spelt there.

    Raises:
        ConfigError: one is given twice, in two spellings.
    """
    found: dict[str, Any] = {}
    for spelt in given:
        written = str(spelt).lstrip("-").replace("-", "_")
        name = ALIASES.get(written, written)
        if name in found:
            raise ConfigError(f"{name} is given twice, as {found[name]} and as {spelt}")
        found[name] = spelt
    return found


def normalised(given: Mapping[str, Any]) -> Arguments:
    """Return *given* under current names, with underscores.

    Raises:
        ConfigError: a name is unknown, or given twice.
    """
    found = spellings(given)
    for name, spelt in found.items():
        if name not in NAMES:
            raise ConfigError(f"unknown argument {str(spelt)!r}{did_you_mean(name, NAMES)}")
    return {name: given[spelt] for name, spelt in found.items()}
