"""Runs a loaded target as a draft: the same weights and KV cache, of which a window is read."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from protos.config.kv_window import KVWindow
from workers.attention.batch import Batch, Ints
from workers.compile import CompileError
from workers.gpu.attention import attention_of
from workers.model.runner import ModelRunner


class WindowedRunner:
    """The target of this process, over a window of its own KV cache. See `DraftForward`.

    It writes K and V of what it is fed into the target's cache. Where the target runs compiled, so does it.

    Args:
        runner: of the target.
        kv_window: what is read.
        max_model_len: the longest context to draft for; None: the target's.
    """

    def __init__(self, runner: ModelRunner, kv_window: KVWindow, max_model_len: int | None = None) -> None:
        longest = runner.loaded.max_model_len
        self.loaded = replace(runner.loaded, max_model_len=min(max_model_len or longest, longest))
        self.module, self.num_blocks = runner.module, runner.num_blocks
        self._runner, self._kv_window = runner, kv_window
        self._attention = attention_of(runner.cache)

    def forward(self, batch: Batch, wanted_N: Ints, features_TX: torch.Tensor | None = None) -> torch.Tensor:
        """See `DraftForward`; fp32 logits."""
        return self._runner.run_over(self._attention, self._kv_window, batch, wanted_N)[0]

    def resumes_at(self, slots_R: Ints, generations_R: Ints, held_R: Ints) -> Ints:
        """See `DraftForward`."""
        return held_R

    def key(self) -> str | None:
        """Return None: there is nothing to compile but the target."""
        return None

    def compile_into(self, folder: Path, trial: Callable[[], None]) -> None:
        """See `workers.compiled.warming.Compilable`."""
        raise CompileError("a target that drafts is compiled as the target")

    def load_compiled(self, folder: Path) -> None:
        """See `workers.compiled.warming.Compilable`."""
        raise CompileError("a target that drafts is compiled as the target")

    def measure(self, max_tokens: int) -> Iterator[tuple[int, float]]:
        """See `DraftForward`."""
        return self._runner.measure(max_tokens)
