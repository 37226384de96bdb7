"""How many KV blocks all workers of a gang hold: settled once, by what the first of them found room for."""

from collections.abc import Mapping

from protos.errors import EngineDeadError
from protos.kv_blocks import kv_summary, settle_blocks
from protos.messages import WorkerInfo
from protos.worker_messages import Allocate, Loaded, WorkerId

ENOUGH = 0.97
"""A worker that replaces another may find a little less free memory: the part that is kept free makes up for it."""


class KVSizing:
    """The blocks that everybody holds: the minimum over the workers of the first start; later ones get as many."""

    def __init__(self) -> None:
        self._allocate: Allocate | None = None
        self._info: WorkerInfo | None = None

    def settle(self, loaded: Mapping[WorkerId, Loaded]) -> Allocate:
        """Settle the blocks by what the workers of a first start say; raises `ConfigError` where they are too few."""
        info = loaded[min(worker for worker in loaded if worker.role == "target")].info
        fitting = {str(worker): each.info.num_blocks for worker, each in loaded.items()}
        self._info, self._allocate = settle_blocks(info, fitting)
        return self._allocate

    def as_before(self, loaded: Mapping[WorkerId, Loaded]) -> Allocate:
        """Give workers that replace others the same blocks; raises `EngineDeadError` where they have no room."""
        if self._allocate is None:
            raise EngineDeadError("a worker was replaced before the first one was ready")
        for worker, said in loaded.items():
            if said.info.num_blocks < ENOUGH * self._allocate.num_blocks:
                raise EngineDeadError(
                    f"{worker} has memory for {said.info.num_blocks} KV blocks, and "
                    f"{self._allocate.num_blocks} are in use: other processes took the rest"
                )
        return self._allocate

    @property
    def info(self) -> WorkerInfo:
        """What the controller is to know: rank 0's word, with the blocks that all hold."""
        if self._info is None:
            raise EngineDeadError("the workers are ready, but were never told how many blocks they hold")
        return self._info

    @property
    def summary(self) -> str:
        """A line for the user."""
        return kv_summary(self.info)
