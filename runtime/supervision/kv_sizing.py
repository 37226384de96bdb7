"""How many KV blocks all workers of a gang hold: settled once, by what the first of them found room for."""

from collections.abc import Mapping

import msgspec

from protos.errors import ConfigError, EngineDeadError
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
        num_blocks = min(said.info.num_blocks for said in loaded.values())
        if num_blocks < 2:
            least = min(loaded, key=lambda worker: loaded[worker].info.num_blocks)
            raise ConfigError(
                f"the KV cache of {least} holds {num_blocks} blocks of {info.block_size} tokens; it "
                "needs 2 at least: give it more memory"
            )
        max_model_len = min(info.max_model_len, num_blocks * info.block_size)
        self._info = msgspec.structs.replace(info, num_blocks=num_blocks, max_model_len=max_model_len)
        self._allocate = Allocate(num_blocks, max_model_len, info.vocab_size)
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
        info = self.info
        held = info.num_blocks * info.block_size
        return (
            f"KV cache: {info.num_blocks} blocks of {info.block_size} tokens on every worker, {held} tokens; "
            f"{held / info.max_model_len:.1f} sequences of {info.max_model_len} tokens at once"
        )
