"""Runs the module of a learned proposer over paged KV."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from protos.config.kv_window import KVWindow
from protos.layers import LayerShape
from workers.attention.backend import run_with
from workers.attention.batch import AttentionMetadata, Batch, Ints
from workers.attention.kv import KVCache
from workers.attention.latent import with_latents
from workers.compile import Weights
from workers.compiled.recipe import recipe
from workers.device import free_memory, weight_bytes
from workers.gpu.attention import attention_of
from workers.model.methods import Methods
from workers.slots import SlotTable


@dataclass(frozen=True)
class LoadedModule:
    """The module of a learned proposer, ready to run.

    Attributes:
        module: a `protos.draft_module.Module`.
        kv_dtype: of its cached K and V, see `workers.attention.kv`.
        folders: checkpoints that its weights were read from: its own, and the target's.
        options: what else its computation depends on.
    """

    module: Any
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    folders: tuple[Path, ...] = ()
    options: tuple[object, ...] = ()

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """K and V of each attention layer."""
        return with_latents(self.module, self.module.layers)

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

    With *kv_window*, it attends to no more than that.
    """

    def __init__(
        self,
        loaded: LoadedModule,
        slots: SlotTable,
        num_blocks: int,
        block_size: int,
        kv_window: KVWindow | None = None,
    ) -> None:
        self.kv_window = kv_window
        self.loaded, self.slots, self.num_blocks, self.block_size = loaded, slots, num_blocks, block_size
        self.module = Methods(loaded.module)
        self.cache = KVCache(loaded.layers, num_blocks, block_size, loaded.kv_dtype, loaded.device)
        self.attention = attention_of(self.cache) if loaded.layers else None

    def forward(self, batch: Batch, wanted_N: Ints, features_TX: torch.Tensor | None = None) -> torch.Tensor:
        """See `DraftForward`; hidden states `[N, X]`."""
        attention = self.attention
        with torch.inference_mode():
            tokens_1T, positions_1T = self._tensor(batch.tokens_T), self._tensor(batch.positions_T)
            features_1TX = None if features_TX is None else features_TX.unsqueeze(0)

            def run_module() -> torch.Tensor:
                output_1TX: torch.Tensor = self.module(tokens_1T, positions_1T, features_1TX)
                return output_1TX[0]

            if attention is None:
                return run_module()[self._index(wanted_N)]
            attention.plan(AttentionMetadata.of(batch, self.slots.blocks, self.block_size, self.kv_window))
            return run_with(attention, run_module, len(batch.tokens_T))[self._index(wanted_N)]

    def resumes_at(self, slots_R: Ints, generations_R: Ints, held_R: Ints) -> Ints:
        """See `DraftForward`."""
        return held_R

    def key(self) -> str | None:
        """See `workers.compiled.warming.Compilable`."""
        if self.loaded.device.type != "cpu" or not self.module.names:
            return None
        return recipe(self.loaded.folders, self.loaded.dtype, type(self.loaded.module).__name__, *self.loaded.options)

    def compile_into(self, folder: Path, trial: Callable[[], None]) -> None:
        """See `workers.compiled.warming.Compilable`."""
        with self.module.watched():
            trial()
        self.module.compile_into(folder, Weights(self.loaded.dtype, weight_bytes(self.loaded.module), free_memory()))

    def load_compiled(self, folder: Path) -> None:
        """See `workers.compiled.warming.Compilable`."""
        self.module.load(folder, self._on_one_row, self.loaded.dtype)

    def _on_one_row(self, call: Callable[..., Any], num_tokens: int) -> Any:
        """Call *call* with attention of its own, which takes one row of tokens."""
        with torch.inference_mode():
            if not self.loaded.layers:
                return call()
            cache = KVCache(self.loaded.layers, 1, self.block_size, self.loaded.dtype, self.loaded.device)
            attention, start = attention_of(cache), np.zeros(1, np.int64)
            batch = Batch(start, start, np.array([num_tokens]), np.zeros(num_tokens, np.int64))
            attention.plan(AttentionMetadata.of(batch, np.zeros((1, num_tokens), np.int32), self.block_size))
            return run_with(attention, call, num_tokens)

    def measure(self, max_tokens: int) -> Iterator[tuple[int, float]]:
        """Measure nothing: most of the cost is in the heads, which the proposer calls."""
        return iter(())

    def _tensor(self, array_T: Ints) -> torch.Tensor:
        return self._index(array_T).unsqueeze(0)

    def _index(self, array_N: Ints) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array_N)).to(self.loaded.device, non_blocking=True)
