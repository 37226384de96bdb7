"""Engine arguments: vLLM's names, and refusals that name the argument."""

import logging
from typing import Any

import pytest

from protos.config import arguments
from protos.config.engine import from_json, to_json
from protos.errors import ConfigError
from tests.support.engine_arguments import parse, refusal


def test_every_kept_argument_lands_where_it_belongs() -> None:
    config = parse(
        tokenizer="t", revision="r", tokenizer_revision="tr", download_dir="d", dtype="half", max_model_len=99,
        seed=42, block_size=32, num_gpu_blocks_override=7, kv_cache_memory_bytes=10**9, gpu_memory_utilization=0.8,
        enable_prefix_caching=False, max_num_seqs=3, max_num_batched_tokens=77, enable_chunked_prefill=True,
        enforce_eager=True, tensor_parallel_size=1, served_model_name="x", disable_log_stats=True,
        log_format="json", enable_log_requests=True,
        skip_tokenizer_init=True,
    )  # fmt: skip
    assert config.model.dtype == "float16"
    assert (config.model.tokenizer, config.model.revision, config.model.tokenizer_revision) == ("t", "r", "tr")
    assert (config.model.max_model_len, config.model.enforce_eager) == (99, True)
    assert config.model.skip_tokenizer_init is True
    assert (config.cache.block_size, config.cache.num_blocks, config.cache.memory_bytes) == (32, 7, 10**9)
    assert (config.cache.memory_utilization, config.cache.enable_prefix_caching) == (0.8, False)
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (3, 77)
    assert (config.seed, config.served_model_name, config.disable_log_stats) == (42, ("x",), True)
    assert (config.log_format, config.log_requests) == ("json", True)
    assert (config.parallel.executor, config.speculative) == ("uni", None)


def test_values_may_be_text_as_flags_and_yaml_give_them() -> None:
    given = {"--gpu-memory-utilization": "0.5", "-tp": "1", "max-num-seqs": "4", "enable_prefix_caching": "False"}
    config = arguments.parse({"model": "m", **given})
    assert (config.cache.memory_utilization, config.scheduler.max_num_seqs) == (0.5, 4)
    assert config.cache.enable_prefix_caching is False


@pytest.mark.parametrize(
    ("written", "kept"),
    [("4096", 4096), ("32K", 32768), ("32k", 32000), ("25.6k", 25600), ("1M", 1 << 20), ("1m", 10**6)],
)
def test_large_numbers_may_have_vllms_suffixes(written: str, kept: int) -> None:
    config = parse(max_model_len=written, max_num_batched_tokens=written, kv_cache_memory_bytes=written)
    assert config.model.max_model_len == config.scheduler.max_num_batched_tokens == config.cache.memory_bytes == kept


@pytest.mark.parametrize(
    ("written", "kept"),
    [("float", "float32"), ("half", "float16"), ("bfloat16", "bfloat16"), ("torch.float16", "float16"), ("auto",) * 2],
)
def test_dtype_names(written: str, kept: str) -> None:
    assert parse(dtype=written).model.dtype == kept


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("auto", "auto"),
        ("bfloat16", "bfloat16"),
        ("fp8", "fp8"),
        ("fp8_e4m3", "fp8"),
        ("torch.float8_e4m3fn", "fp8"),
        ("fp8_per_token_head", "fp8"),
        ("int8", "int8"),
        ("int8_per_token_head", "int8"),
    ],
)
def test_names_of_the_kv_cache_dtype(written: str, kept: str) -> None:
    config = parse(kv_cache_dtype=written, speculative_config={"model": "d", "kv_cache_dtype": written})
    assert config.model.kv_cache_dtype == kept
    assert config.speculative is not None
    assert config.speculative.kv_cache_dtype == kept


@pytest.mark.parametrize(
    ("given", "executor"),
    [
        ({}, "uni"),
        ({"distributed_executor_backend": "mp"}, "uni"),
        ({"distributed_executor_backend": "mp", "tensor_parallel_size": 4}, "ray"),
        ({"tensor_parallel_size": 2}, "ray"),
        ({"distributed_executor_backend": "ray"}, "ray"),
        ({"distributed_executor_backend": "uni"}, "uni"),
        ({"speculative_config": {"model": "d", "placement": "dedicated"}}, "ray"),
    ],
)
def test_executor_follows_from_the_devices(given: dict[str, Any], executor: str) -> None:
    assert parse(**given).parallel.executor == executor


@pytest.mark.parametrize(
    ("given", "placement"),
    [
        ({"speculative_config": {"model": "d"}}, "colocated"),
        ({"speculative_config": {"model": "d"}, "tensor_parallel_size": 2}, "dedicated"),
        ({"speculative_config": {"model": "d"}, "distributed_executor_backend": "ray"}, "dedicated"),
        ({"speculative_config": {"model": "d", "placement": "colocated"}, "tensor_parallel_size": 2}, "colocated"),
        ({"speculative_config": {"method": "ngram"}, "tensor_parallel_size": 2}, "colocated"),
    ],
)
def test_a_draft_model_lives_by_itself_on_ray(given: dict[str, Any], placement: str) -> None:
    speculative = parse(**given).speculative
    assert speculative is not None
    assert speculative.placement == placement


def test_what_is_placed_how() -> None:
    given = {"worker_resources": '{"GPU": 0.5, "CPU": 1}', "placement_strategy": "spread", "rebuild_timeout_s": "5"}
    parallel = parse(**given).parallel
    assert parallel.worker_resources == {"GPU": 0.5, "CPU": 1}
    assert (parallel.placement_strategy, parallel.rebuild_timeout_s) == ("SPREAD", 5.0)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"worker_resources": "{GPU"}, "worker_resources is not valid JSON"),
        ({"worker_resources": {"GPU": 0}}, r"worker_resources['GPU'] must be greater than 0.0, got 0"),
        ({"placement_strategy": "near"}, "placement_strategy must be one of 'STRICT_PACK', 'PACK' or 'SPREAD'"),
        ({"max_modl_len": 5}, "unknown argument 'max_modl_len', did you mean 'max_model_len'"),
        ({"dtype": "int8"}, "dtype must be one of 'auto', 'float32', 'bfloat16' or 'float16', got 'int8'"),
        ({"max_model_len": 0}, "max_model_len must be greater than 0, got 0"),
        ({"max_model_len": "1.5K"}, "max_model_len must be a valid integer"),
        ({"reasoning_parser": "qwen3"}, "reasoning_parser is not supported, got 'qwen3': reasoning is part of"),
        ({"logprobs_mode": "processed_logprobs"}, "log-probabilities are those of the raw logits"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be at most 1"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization must be finite"),
        ({"num_gpu_blocks_override": -1}, "num_gpu_blocks_override must be greater than 0"),
        ({"model": ""}, "model must have at least 1 character(s), got ''"),
        ({"max_num_seqs": 10**12}, "max_num_seqs must be at most 8192"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 8}, "max_num_batched_tokens must be at least max_num_seqs"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"quantization": "ascend"}, "quantization must be one of 'int8', 'int4', 'fp8'"),
        (
            {"kv_cache_dtype": "fp8_e5m2"},
            "kv_cache_dtype must be one of 'auto', 'bfloat16', 'fp8' or 'int8'",
        ),
        ({"load_format": "dummy"}, "load_format is not supported"),
        ({"hf_overrides": {"a": 1}}, "hf_overrides is not supported"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size must be 1, got 2: split the model"),
        ({"data_parallel_size": 2}, "data_parallel_size must be 1, got 2"),
        ({"tensor_parallel_size": "two"}, "tensor_parallel_size must be an integer, got 'two'"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size must be an integer, got True"),
        ({"pipeline_parallel_size": True}, "pipeline_parallel_size must be an integer, got True"),
        ({"num_gpu_blocks_override": True}, "num_gpu_blocks_override must be a valid integer, got True"),
        ({"gpu_memory_utilization": True}, "gpu_memory_utilization must be a valid number, got True"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be greater than 0"),
        ({"distributed_executor_backend": "uni", "tensor_parallel_size": 2}, "use ray"),
        ({"distributed_executor_backend": "slurm"}, "must be uni, ray or mp"),
        ({"enable_lora": True}, "enable_lora is not supported"),
        ({"tp": 1, "tensor-parallel-size": 1}, "given twice, as tp and as tensor-parallel-size"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_refusals_name_what_the_user_wrote(given: dict[str, Any], says: str) -> None:
    assert says in refusal(**given)


def test_neutral_values_of_refused_arguments_pass() -> None:
    neutral = {
        "quantization": None,
        "load_format": "safetensors",
        "data_parallel_size": 1,
        "logprobs_mode": "raw_logprobs",
    }
    assert parse(**neutral) == parse()


def test_arguments_without_meaning_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="slipstream"):
        given = {"swap_space": 4, "enable_eplb": True, "trust_remote_code": True, "compilation_config": {"a": 1}}
        assert parse(**given) == parse(**given) == parse()
    said = sorted(record.message for record in caplog.records)
    assert len(said) == 4
    assert "never honoured" in said[-1]


def test_model_is_needed() -> None:
    with pytest.raises(ConfigError, match="model is missing"):
        arguments.parse({})


def test_it_crosses_processes_as_json() -> None:
    config = parse(speculative_config={"model": "d", "num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 9, 0]]})
    assert from_json(to_json(config)) == config


def test_the_least_ranks_are_at_most_all() -> None:
    assert parse(tensor_parallel_size=2, min_tensor_parallel_size="1").parallel.min_tensor_parallel_size == 1
    with pytest.raises(
        ConfigError, match=r"min_tensor_parallel_size must be at most tensor_parallel_size \(2\), got 3"
    ):
        parse(tensor_parallel_size=2, min_tensor_parallel_size=3)
