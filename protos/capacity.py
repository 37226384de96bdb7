"""What memory has room for: KV blocks, and the tokens of a step.

All workers hold the same number of KV blocks, because one block table serves them all.
"""

from collections.abc import Mapping

import msgspec

from protos.errors import ConfigError
from protos.messages import WorkerInfo
from protos.worker_messages import Allocate

LEAST_BLOCKS = 2
FIRST_PATIENCE, MOST_PATIENCE = 8, 1024
"""Steps that succeed before a token budget grows: after the first step that ran out of memory, and at most."""


class TokenBudget:
    """How many tokens a step may feed: *most*, and fewer after a step has run out of memory.

    It grows by an eighth after so many steps that succeed. Each step that runs out of memory doubles that number, until
    the budget is whole again: a load that does not fit costs ever fewer steps.

    Args:
        most: tokens.
        least: what it never shrinks below.

    Attributes:
        limit: the tokens that the next step may feed.
        is_reduced: whether that is less than usual.
    """

    def __init__(self, most: int, least: int = 1) -> None:
        self.limit, self._most, self._least = most, most, least
        self.is_reduced = False
        self._patience, self._num_good = FIRST_PATIENCE, 0

    def shrink(self, num_tokens: int) -> None:
        """Allow half of *num_tokens*, with which a step ran out of memory."""
        if self.is_reduced:
            self._patience = min(MOST_PATIENCE, 2 * self._patience)
        self.limit = max(self._least, min(self.limit, num_tokens // 2))
        self._num_good, self.is_reduced = 0, True

    def count_step(self, num_tokens: int) -> None:
        """Record that a step is planned, so that the one before it has succeeded; nothing if it feeds no tokens."""
        if not self.is_reduced or not num_tokens:
            return
        self._num_good += 1
        if self._num_good >= self._patience:
            self.limit, self._num_good = min(self._most, self.limit + max(1, self.limit // 8)), 0
            self.is_reduced = self.limit < self._most
            if not self.is_reduced:
                self._patience = FIRST_PATIENCE


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
