"""Limits that contradict each other."""

from protos.config.engine import SchedulerConfig
from protos.errors import ConfigError
from protos.messages import WorkerInfo


def check_limits(config: SchedulerConfig, info: WorkerInfo) -> None:
    """Check that a sequence of the context length fits in the KV cache and in the steps. Raises `ConfigError`."""
    capacity = info.num_blocks * info.block_size
    if info.max_model_len > capacity:
        raise ConfigError(
            f"max_model_len {info.max_model_len} is more than the {capacity} tokens that {info.num_blocks} KV blocks "
            f"of {info.block_size} hold; lower max_model_len or give the cache more memory"
        )
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < info.max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens {config.max_num_batched_tokens} is less than max_model_len {info.max_model_len}, "
            "and without chunked prefill a prompt must fit in one step; raise it or enable chunked prefill"
        )
