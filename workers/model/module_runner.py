"""Runs the module of a learned proposer over paged KV: entries in, what comes behind them out."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from protos.layers import LayerShape
from workers.attention.backend import Rows, run_with
from workers.attention.batch import Batch, Ints
from workers.attention.kv import KVCache
from workers.attention.native import pick_attention
from workers.model.runner import ModelRunner
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
        """The longest text it can go on from."""
        return int(self.module.max_model_len)

    @property
    def vocab_size(self) -> int:
        """Ids above are not fed."""
        return int(self.module.vocab_size)


@dataclass(frozen=True)
class Entries:
    """What is fed to a draft: cache entries, and what lies beside their tokens.

    Attributes:
        batch: rows, positions and tokens.
        wanted_N: int64, flat indices of the entries behind which the output is wanted.
        features_TX: the target's, or recycled ones; None where nothing is fed beside tokens.
    """

    batch: Batch
    wanted_N: Ints
    features_TX: torch.Tensor | None = None


class ModuleShape(Protocol):
    """What the draft worker must know of what it runs."""

    @property
    def layers(self) -> tuple[LayerShape, ...]: ...  # noqa: D102
    @property
    def max_model_len(self) -> int: ...  # noqa: D102
    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def dtype(self) -> torch.dtype: ...  # noqa: D102
    @property
    def device(self) -> torch.device: ...  # noqa: D102


class DraftForward(Protocol):
    """Runs what drafts: a language model, or the module of a learned proposer."""

    @property
    def module(self) -> Any:
        """What `build` returned; for a language model, the model."""
        ...

    @property
    def loaded(self) -> ModuleShape:
        """Its context, vocabulary and layers."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks of its cache."""
        ...

    def feed(self, entries: Entries) -> torch.Tensor:
        """Run *entries*, writing their K and V; return what comes behind the wanted ones, `[N, X]`."""
        ...

    def measure(self, num_rows: int) -> dict[int, float]:
        """Return seconds of a forward of 1, 2, 4 ... rows, to *num_rows* at least; nothing where that says little."""
        ...


class ModelForward:
    """A language model as a draft: reads tokens alone."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.module = runner.loaded.model
        self.loaded = runner.loaded
        self.num_blocks = runner.cache.num_blocks

    def feed(self, entries: Entries) -> torch.Tensor:
        """See `DraftForward`; logits `[N, V]`."""
        return self.runner.forward(entries.batch, entries.wanted_N)

    def measure(self, num_rows: int) -> dict[int, float]:
        """See `DraftForward`."""
        return self.runner.measure(num_rows)


class ModuleRunner:
    """One module, its KV cache and its attention. Reads block tables from *slots*; owns nothing else of them."""

    def __init__(self, loaded: LoadedModule, slots: SlotTable, num_blocks: int, block_size: int) -> None:
        self.loaded, self.slots, self.num_blocks, self.block_size = loaded, slots, num_blocks, block_size
        self.module = loaded.module
        self.cache = KVCache(loaded.layers, num_blocks, block_size, loaded.dtype, loaded.device)
        self._attention = pick_attention(self.cache) if loaded.layers else None

    def feed(self, entries: Entries) -> torch.Tensor:
        """See `DraftForward`."""
        batch, attention = entries.batch, self._attention
        with torch.inference_mode():
            tokens_1T, positions_1T = self._tensor(batch.tokens_T), self._tensor(batch.positions_T)
            features_1TX = None if entries.features_TX is None else entries.features_TX.unsqueeze(0)

            def forward() -> torch.Tensor:
                output_1TX: torch.Tensor = self.module(tokens_1T, positions_1T, features_1TX)
                return output_1TX[0]

            if attention is None:
                return forward()[self._index(entries.wanted_N)]
            attention.plan(self._rows(batch))
            return run_with(attention, forward)[self._index(entries.wanted_N)]

    def measure(self, num_rows: int) -> dict[int, float]:
        """See `DraftForward`: most of what a module costs are its heads, which the proposer calls."""
        return {}

    def _rows(self, batch: Batch) -> Rows:
        return Rows(
            batch.starts_R,
            batch.lengths_R,
            batch.offsets_R,
            batch.slots_R,
            self.slots.blocks,
            self.block_size,
            batch.areas,
            batch.lowest_R,
        )

    def _tensor(self, array_T: Ints) -> torch.Tensor:
        return self._index(array_T).unsqueeze(0)

    def _index(self, array_N: Ints) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array_N)).to(self.loaded.device, non_blocking=True)
