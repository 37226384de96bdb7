"""Runs the module of a learned proposer over paged KV."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from protos.layers import LayerShape
from workers.attention.backend import run_with
from workers.attention.batch import AttentionMetadata, Batch, Ints
from workers.attention.kv import KVCache
from workers.attention.native import pick_attention
from workers.compile import Weights
from workers.device import free_memory, weight_bytes
from workers.model.methods import Methods
from workers.slots import SlotTable


@dataclass(frozen=True)
class LoadedModule:
    """The module of a learned proposer, ready to run.

    Attributes:
        module: a `protos.draft_module.Module`.
    """

    module: Any
    dtype: torch.dtype
    device: torch.device

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """K and V of each attention layer."""
        return tuple(self.module.layers)

    @property
    def max_model_len(self) -> int:
        """The longest context it supports."""
        return int(self.module.max_model_len)

    @property
    def vocab_size(self) -> int:
        """Size of its vocabulary."""
        return int(self.module.vocab_size)


class ModuleRunner:
    """One module, its KV cache and its attention. Reads block tables from *slots*. See `DraftForward`.

    Attributes:
        is_eager: its methods are not to be compiled.
    """

    def __init__(
        self, loaded: LoadedModule, slots: SlotTable, num_blocks: int, block_size: int, *, is_eager: bool = True
    ) -> None:
        self.is_eager = is_eager or loaded.device.type != "cpu"
        self.loaded, self.slots, self.num_blocks, self.block_size = loaded, slots, num_blocks, block_size
        self.module = Methods(loaded.module)
        self.cache = KVCache(loaded.layers, num_blocks, block_size, loaded.dtype, loaded.device)
        self._attention = pick_attention(self.cache) if loaded.layers else None

    def forward(self, batch: Batch, wanted_N: Ints, features_TX: torch.Tensor | None = None) -> torch.Tensor:
        """See `DraftForward`; hidden states `[N, X]`."""
        attention = self._attention
        with torch.inference_mode():
            tokens_1T, positions_1T = self._tensor(batch.tokens_T), self._tensor(batch.positions_T)
            features_1TX = None if features_TX is None else features_TX.unsqueeze(0)

            def run_module() -> torch.Tensor:
                output_1TX: torch.Tensor = self.module(tokens_1T, positions_1T, features_1TX)
                return output_1TX[0]

            if attention is None:
                return run_module()[self._index(wanted_N)]
            attention.plan(AttentionMetadata.of(batch, self.slots.blocks, self.block_size))
            return run_with(attention, run_module, len(batch.tokens_T))[self._index(wanted_N)]

    def warm_up(self, propose: Callable[[], None]) -> str:
        """Compile the methods that *propose* calls; return a line for the user."""
        with self.module.compiling(Weights(self.loaded.dtype, weight_bytes(self.loaded.module), free_memory())):
            propose()
        return self.module.summary()

    def measure(self, max_tokens: int) -> dict[int, float]:
        """Measure nothing: most of the cost is in the heads, which the proposer calls."""
        return {}

    def _tensor(self, array_T: Ints) -> torch.Tensor:
        return self._index(array_T).unsqueeze(0)

    def _index(self, array_N: Ints) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array_N)).to(self.loaded.device, non_blocking=True)
