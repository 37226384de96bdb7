"""The number of KV blocks that each worker holds: the same on all, because one block table serves them all."""

from collections.abc import Mapping

import msgspec

from protos.errors import ConfigError
from protos.messages import WorkerInfo
from protos.worker_messages import Allocate

LEAST_BLOCKS = 2


def settle_blocks(target: WorkerInfo, fitting: Mapping[str, int]) -> tuple[WorkerInfo, Allocate]:
    """Return the info for the controller, and the message to every worker.

    Args:
        target: what target rank 0 reported.
        fitting: by worker, the number of blocks that fit in its memory.

    Raises:
        ConfigError: names the worker that has too little memory.
    """
    least = min(fitting, key=lambda worker: fitting[worker])
    num_blocks = fitting[least]
    if num_blocks < LEAST_BLOCKS:
        raise ConfigError(
            f"the KV cache of {least} holds {num_blocks} blocks of {target.block_size} tokens; "
            f"it needs {LEAST_BLOCKS} at least: give it more memory"
        )
    max_model_len = min(target.max_model_len, num_blocks * target.block_size)
    notes = target.notes
    if max_model_len < target.max_model_len:
        notes += (f"max_model_len is cut from {target.max_model_len} to {max_model_len}, what the KV cache holds",)
    info = msgspec.structs.replace(target, num_blocks=num_blocks, max_model_len=max_model_len, notes=notes)
    return info, Allocate(num_blocks, max_model_len, target.vocab_size, target.prefix_states or 0)


def kv_summary(info: WorkerInfo) -> str:
    """Return a line on the KV cache for the user."""
    held = info.num_blocks * info.block_size
    states = f"; {info.prefix_states} recurrent states for the prefix cache" if info.prefix_states else ""
    stored = f" in {info.kv_cache_dtype}" if info.kv_cache_dtype else ""
    return (
        f"KV cache: {info.num_blocks} blocks of {info.block_size} tokens{stored} on every worker, {held} tokens; "
        f"{held / info.max_model_len:.1f} sequences of {info.max_model_len} tokens at once{states}"
    )
