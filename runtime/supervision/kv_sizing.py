"""How many KV blocks every worker holds: decided at the first start, and kept for workers that replace others."""

from collections.abc import Mapping

from protos.errors import EngineDeadError
from protos.kv_blocks import kv_summary, settle_blocks
from protos.messages import WorkerInfo
from protos.worker_messages import Allocate, Loaded, WorkerId

MIN_SHARE = 0.97
"""A replacement may have this share of the first worker's free memory: the memory that is kept free covers the rest."""


class KVSizing:
    """The number of KV blocks on every worker: the minimum over the workers of the first start."""

    def __init__(self) -> None:
        self._allocate: Allocate | None = None
        self._info: WorkerInfo | None = None

    def decide(self, loaded: Mapping[WorkerId, Loaded]) -> Allocate:
        """Decide the number of blocks from what the first workers loaded. Raises `ConfigError` if they are too few."""
        info = loaded[min(worker for worker in loaded if worker.role == "target")].info
        fitting = {str(worker): each.info.num_blocks for worker, each in loaded.items()}
        self._info, self._allocate = settle_blocks(info, fitting)
        return self._allocate

    def reuse(self, loaded: Mapping[WorkerId, Loaded]) -> Allocate:
        """Return the same number for replacements. Raises `EngineDeadError` if one has too little memory."""
        if self._allocate is None:
            raise EngineDeadError("a worker was replaced before the first one was ready")
        for worker, each in loaded.items():
            if each.info.num_blocks < MIN_SHARE * self._allocate.num_blocks:
                raise EngineDeadError(
                    f"{worker} has memory for {each.info.num_blocks} KV blocks, and "
                    f"{self._allocate.num_blocks} are in use: other processes took the rest"
                )
        return self._allocate

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
