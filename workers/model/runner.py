"""Runs a loaded model over paged KV: a batch of rows in, fp32 logits out."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from protos.config.kv_window import KVWindow
from workers.attention.backend import AttentionBackend, run_with
from workers.attention.batch import AttentionMetadata, Batch, Ints
from workers.attention.kv import KVCache, bytes_per_block
from workers.compile import TRIALS, Forward, Outputs, Weights, check_results, pad_to_sizes
from workers.compiled.graphs import Input, compile_graph, load_graph, read_index
from workers.compiled.recipe import recipe
from workers.device import free_memory, weight_bytes
from workers.model.capture import Taps
from workers.model.loaded import LoadedModel
from workers.quantization.layer import layers_of
from workers.recurrent.mixers import run_with_states
from workers.recurrent.pool import RecurrentStates, ScratchStates, StatePool
from workers.slots import SlotTable

ANY, ONE = GRAPHS = ("any", "one")
"""Names of the compiled graphs of `TRIALS`: for any number of tokens, and for one."""
TIMINGS = 3  # the fastest of so many runs is returned


class CapturedForwards(Protocol):
    """Runs forwards over a runner's cache by other means: see `workers.gpu.forward_graphs`."""

    def run(self, batch: Batch, wanted_N: Ints) -> Outputs | None:
        """As `ModelRunner.run`; None if it cannot run these rows."""
        ...


class ModelRunner:
    """One model, its KV cache and its attention. Reads block tables from *slots*.

    With *taps*, every forward returns features, too. With *kv_window*, it reads no more of the cache than that.
    *prefix_states* is how many states of recurrent layers it keeps for the prefix cache.
    For a draft, see `DraftForward`. *captured* is asked first to run a forward; None: every one runs here.
    """

    captured: CapturedForwards | None = None

    def __init__(
        self,
        loaded: LoadedModel,
        slots: SlotTable,
        num_blocks: int,
        block_size: int,
        taps: Taps | None = None,
        *,
        kv_window: KVWindow | None = None,
        prefix_states: int = 0,
    ) -> None:
        self.loaded, self.module = loaded, loaded.model
        self.slots, self.num_blocks = slots, num_blocks
        self.device = loaded.device
        self.block_size = block_size
        self.cache = KVCache(loaded.layers, num_blocks, block_size, loaded.kv_dtype, loaded.device)
        self.attention = loaded.mode.attention(self.cache)
        self._states: StatePool | None = None
        if loaded.recurrent:
            num_slots = len(slots.known_len)
            self._states = StatePool(loaded.recurrent, num_slots, slots.max_draft, prefix_states, loaded.device)
        run = causal_lm(loaded.model) if taps is None else tapped_lm(loaded.model, taps)
        self._taps, self.kv_window = taps, kv_window
        self._eager = self._run = loaded.mode.wrap(run)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one KV block in all layers."""
        return bytes_per_block(self.loaded.layers, self.block_size, self.loaded.kv_dtype)

    def warm_up(self) -> str:
        """Trace the model if its mode does; return a line for the user."""
        if self.device.type != "cpu":
            return "running eager"
        if self._states is not None:
            return "running eager: models with recurrent layers are not compiled"
        self._run, note = self.loaded.mode.optimize(self._eager, self._trial, self.loaded)
        return note

    def key(self) -> str | None:
        """See `workers.compiled.warming.Compilable`."""
        if self._states is not None or self.device.type != "cpu" or not self.loaded.mode.is_compiled(self.loaded.ranks):
            return None
        taps = () if self._taps is None else self._taps.order
        return recipe((self.loaded.folder,), self.loaded.dtype, taps, layers_of(self.loaded.model))

    def compile_into(self, folder: Path, trial: Callable[[], None]) -> None:
        """See `workers.compiled.warming.Compilable`."""
        weights = Weights(self.loaded.dtype, weight_bytes(self.loaded.model), free_memory())
        trials = zip(TRIALS, GRAPHS, strict=True) if weights.suit_one_token else [(TRIALS[0], ANY)]
        for (num_tokens, num_wanted), name in trials:
            tokens = Input((1, num_tokens), "int64", 1)
            inputs = [tokens, tokens, Input((num_wanted,), "int64", 0)]
            compile_graph(folder, name, self._eager, inputs, weights, single=num_tokens == 1)

    def load_compiled(self, folder: Path) -> None:
        """See `workers.compiled.warming.Compilable`."""
        any_number = load_graph(folder, ANY)
        single = load_graph(folder, ONE) if ONE in read_index(folder) else None

        def forward(tokens_1T: torch.Tensor, positions_1T: torch.Tensor, wanted_N: torch.Tensor) -> Outputs:
            graph = single if single is not None and tokens_1T.shape[1] == 1 else any_number
            logits_NV, *features = graph(tokens_1T, positions_1T, wanted_N)
            return logits_NV, features[0] if features else None

        padded = pad_to_sizes(forward, 2 if single is None else 1)
        for sizes in TRIALS:
            check_results([self._trial(self._eager, *sizes)], [self._trial(padded, *sizes)], self.loaded.dtype)
        self._run = padded

    def _trial(self, forward: Forward, num_tokens: int, num_wanted: int) -> torch.Tensor:
        """Run *forward* on made-up tokens of one row, with a cache of its own; return logits.

        The cache is not quantised: the results of two forwards are compared, and rounding of K and V to 8 bits would
        turn differences in the last bit of fp32 into larger ones.
        """
        start, length = np.zeros(1, np.int64), np.array([num_tokens])
        batch = Batch(start, start, length, (np.arange(num_tokens) * 5 + 1) % self.loaded.vocab_size)
        attention = self._spare_attention(self.loaded.dtype)
        attention.plan(AttentionMetadata.of(batch, np.zeros((1, num_tokens), np.int32), self.block_size))
        return self._call(forward, batch, np.arange(num_wanted), attention)[0]

    def _spare_attention(self, kv_dtype: torch.dtype) -> AttentionBackend:
        """Return attention over one block that no sequence uses."""
        return self.loaded.mode.attention(KVCache(self.loaded.layers, 1, self.block_size, kv_dtype, self.device))

    def measure(self, max_tokens: int) -> Iterator[tuple[int, float]]:
        """See `DraftForward`."""
        for power in range((max_tokens - 1).bit_length() + 1):
            yield 1 << power, self.measure_size(1 << power)

    def measure_size(self, num_tokens: int) -> float:
        """Return seconds of one forward of so many rows of one token, or of several where there are fewer slots.

        May be called while requests are served, but not where forwards are captured: those write to block 0.
        """
        attention = self._spare_attention(self.loaded.kv_dtype)
        return min(self._time(num_tokens, attention) for _ in range(TIMINGS))

    def _time(self, num_tokens: int, attention: AttentionBackend) -> float:
        num_rows = num_tokens if self.captured is None else min(num_tokens, len(self.slots.known_len))
        rows_R, tokens_T = np.arange(num_rows), np.arange(num_tokens) % self.loaded.vocab_size
        batch = Batch(rows_R, np.zeros_like(rows_R), np.bincount(np.arange(num_tokens) % num_rows), tokens_T)
        wanted_N = _padded(rows_R, min(2, num_rows))
        started = time.perf_counter()
        outputs = None if self.captured is None else self.captured.run(batch, wanted_N)
        if outputs is None:
            tables_RB = np.zeros((num_rows, -(-num_tokens // num_rows)), np.int32)
            attention.plan(AttentionMetadata.of(batch, tables_RB, self.block_size))
            states = ScratchStates(batch, self.device) if self._states is not None else None
            outputs = self._call(self._run, batch, wanted_N, attention, states)
        outputs[0].sum().item()  # waits for the device, also on ranks without logits
        return time.perf_counter() - started

    def forward(self, batch: Batch, wanted_N: Ints, features_TX: torch.Tensor | None = None) -> torch.Tensor:
        """Run *batch*, writing its K and V.

        Args:
            batch: rows whose slots hold the blocks for every position fed.
            wanted_N: int64, flat indices of the tokens whose logits are returned.
            features_TX: not read; a draft's module may take features.

        Returns:
            fp32 `[N, V]` on the model's device, valid until the next forward at least.
        """
        return self.run(batch, wanted_N)[0]

    def resumes_at(self, slots_R: Ints, generations_R: Ints, held_R: Ints) -> Ints:
        """See `DraftForward`."""
        return held_R if self._states is None else self._states.latest(slots_R, generations_R, held_R)

    def run(self, batch: Batch, wanted_N: Ints) -> Outputs:
        """As `forward`; return the features `[T, F]` of all tokens, too, or None without taps."""
        outputs = None if self.captured is None else self.captured.run(batch, wanted_N)
        if outputs is not None:
            return outputs
        return self.run_over(self.attention, self.kv_window, batch, wanted_N)

    def run_over(
        self, attention: AttentionBackend, kv_window: KVWindow | None, batch: Batch, wanted_N: Ints
    ) -> Outputs:
        """As `run`, with another attention and window over the same blocks."""
        wanted_M = _padded(wanted_N, 1 if len(batch.tokens_T) == 1 else 2)
        attention.plan(AttentionMetadata.of(batch, self.slots.blocks, self.block_size, kv_window))
        if self._states is not None:
            self._states.begin(batch, self.slots.known_len)
        logits_MV, features_TF = self._call(self._run, batch, wanted_M, attention, self._states)
        return logits_MV[: len(wanted_N)], features_TF

    def call(
        self,
        tokens_1T: torch.Tensor,
        positions_1T: torch.Tensor,
        wanted_N: torch.Tensor,
        attention: AttentionBackend,
    ) -> Outputs:
        """Run the eager model on tensors of its device, with *attention*, which is planned. For graphs."""
        return run_with(attention, lambda: self._eager(tokens_1T, positions_1T, wanted_N))

    def _call(
        self,
        forward: Forward,
        batch: Batch,
        wanted_N: Ints,
        attention: AttentionBackend,
        states: RecurrentStates | None = None,
    ) -> Outputs:
        """Run *forward* with *attention* and *states*, which are planned."""
        # Compiled graphs distinguish tensors made inside and outside inference mode: always make them inside.
        with torch.inference_mode():
            tokens_1T, positions_1T = self._tensor(batch.tokens_T, 1), self._tensor(batch.positions_T, 1)
            wanted = self._tensor(wanted_N)

            def call() -> Outputs:
                return forward(tokens_1T, positions_1T, wanted)

            if states is not None:
                return run_with(attention, lambda: run_with_states(states, call), len(batch.tokens_T))
            return run_with(attention, call, len(batch.tokens_T))

    def _tensor(self, array_N: Ints, *leading: int) -> torch.Tensor:
        """Return a contiguous array as a tensor on the device, with *leading* dimensions of one.

        Strides are set explicitly: numpy's strides of a single element are arbitrary, and others would recompile.
        """
        size = len(array_N)
        tensor = torch.from_numpy(array_N).as_strided((*leading, size), (*(size for _ in leading), 1))
        return tensor.to(self.device, non_blocking=True)


def _padded(wanted_N: Ints, count: int) -> Ints:
    """Pad *wanted_N* with index 0: sizes 0 and 1 would be compiled separately."""
    if len(wanted_N) >= count:
        return wanted_N
    return np.concatenate([wanted_N, np.zeros(count - len(wanted_N), np.int64)])


def causal_lm(model: Any) -> Forward:
    """Return the model as a function of tokens, positions and wanted indices that returns fp32 logits `[N, V]`.

    It calls the model's own head, which includes caps and scales of logits.
    """

    def forward(tokens_1T: torch.Tensor, positions_1T: torch.Tensor, wanted_N: torch.Tensor) -> Outputs:
        output = model(input_ids=tokens_1T, position_ids=positions_1T, use_cache=False, logits_to_keep=wanted_N)
        return output.logits[0].float(), None

    return forward


def tapped_lm(model: Any, taps: Taps) -> Forward:
    """As `causal_lm`, with the states that *taps* capture of every token, `[T, F]`."""

    def forward(tokens_1T: torch.Tensor, positions_1T: torch.Tensor, wanted_N: torch.Tensor) -> Outputs:
        output = model(input_ids=tokens_1T, position_ids=positions_1T, use_cache=False, logits_to_keep=wanted_N)
        return output.logits[0].float(), taps.collect()

    return forward
