"""How many KV blocks every worker holds: decided at the first start, and kept for workers that replace others.

A target group of fewer ranks may hold fewer blocks.
"""

from collections.abc import Mapping

import msgspec

from protos.capacity import kv_summary, settle_blocks
from protos.errors import EngineDeadError
from protos.messages import WorkerInfo
from protos.worker_messages import Allocate, Loaded, WorkerId

MIN_SHARE = 0.97
"""A replacement may have this share of the first worker's free memory: the memory that is kept free covers the rest."""


class KVSizing:
    """The number of KV blocks on every worker: the minimum over the workers of the first start."""

    def __init__(self) -> None:
        self._first: Allocate | None = None
        self._allocate: Allocate | None = None
        self._info: WorkerInfo | None = None
        self._targets: list[Loaded] = []  # what the ranks of the group that served last reported

    def decide(self, loaded: Mapping[WorkerId, Loaded]) -> Allocate:
        """Decide the number of blocks from what the first workers loaded. Raises `ConfigError` if they are too few."""
        first = loaded[min(worker for worker in loaded if worker.role == "target")].info
        info = msgspec.structs.replace(first, prefix_states=_fewest_states(_of_targets(loaded)))
        fitting = {str(worker): each.info.num_blocks for worker, each in loaded.items()}
        self._info, self._allocate = settle_blocks(info, fitting)
        self._first = self._allocate
        self._targets = _of_targets(loaded)
        return self._allocate

    def refit(self, loaded: Mapping[WorkerId, Loaded]) -> Allocate:
        """Decide the number for a group of more or fewer ranks: at most the first number, as the draft has no more.

        Raises:
            EngineDeadError: a sequence of the context length does not fit.
        """
        if self._first is None:
            raise EngineDeadError("the target group changed its size before the first one was ready")
        num_blocks = min(self._first.num_blocks, *(each.info.num_blocks for each in loaded.values()))
        if num_blocks < self._least_blocks():
            raise EngineDeadError(
                f"{len(loaded)} target ranks have memory for {num_blocks} KV blocks, and a sequence of "
                f"{self._first.max_model_len} tokens takes {self._least_blocks()}"
            )
        states = _fewest_states(list(loaded.values()), self._first.prefix_states)
        self._allocate = msgspec.structs.replace(self._first, num_blocks=num_blocks, prefix_states=states or 0)
        self._info = msgspec.structs.replace(self.info, num_blocks=num_blocks, prefix_states=states)
        self._targets = _of_targets(loaded)
        return self._allocate

    def fewer_ranks(self, most: int, least: int) -> int | None:
        """Return the largest number of ranks from *least* to *most* that can share the model and hold it; or None."""
        splits = self._targets[0].splits if self._targets else ()
        return max((n for n in splits if least <= n <= most and self._hold(n)), default=None)

    def _hold(self, ranks: int) -> bool:
        """Whether so many ranks hold the weights and a sequence of the context length, by what ranks reported."""
        share = len(self._targets) / ranks
        weights = share * max(each.weight_bytes for each in self._targets)
        cache = share * self._targets[0].block_bytes * self._least_blocks()
        return weights + cache <= min(each.weight_bytes + each.cache_bytes for each in self._targets)

    def _least_blocks(self) -> int:
        return -(-self.info.max_model_len // self.info.block_size)

    def reuse(self, loaded: Mapping[WorkerId, Loaded]) -> Allocate:
        """Return the same number for replacements. Raises `EngineDeadError` if one has too little memory."""
        return _held(self._allocate, loaded)

    def for_draft(self, loaded: Mapping[WorkerId, Loaded]) -> Allocate:
        """Return the first number for a draft, as `reuse`: the target group may have as many again."""
        return _held(self._first, loaded)

    @property
    def info(self) -> WorkerInfo:
        """Rank 0's description of the target, with the decided number of blocks."""
        if self._info is None:
            raise EngineDeadError("the workers are ready, but the number of KV blocks was never decided")
        return self._info

    @property
    def summary(self) -> str:
        """A line for the user."""
        return kv_summary(self.info)


def _held(allocate: Allocate | None, loaded: Mapping[WorkerId, Loaded]) -> Allocate:
    """Return *allocate* if all that are *loaded* have memory for it."""
    if allocate is None:
        raise EngineDeadError("a worker was replaced before the first one was ready")
    for worker, each in loaded.items():
        if each.info.num_blocks < MIN_SHARE * allocate.num_blocks:
            raise EngineDeadError(
                f"{worker} has memory for {each.info.num_blocks} KV blocks, and {allocate.num_blocks} are in use: "
                "other processes took the rest"
            )
    return allocate


def _fewest_states(targets: list[Loaded], *limits: int) -> int | None:
    """Return how many recurrent states all *targets* can keep for the prefix cache; None if they have none."""
    reported = [each.info.prefix_states for each in targets if each.info.prefix_states is not None]
    return min([*reported, *limits]) if reported else None


def _of_targets(loaded: Mapping[WorkerId, Loaded]) -> list[Loaded]:
    return [each for worker, each in loaded.items() if worker.role == "target"]
