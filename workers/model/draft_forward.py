"""What the draft worker runs: a language model, or the module of a learned proposer."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from protos.layers import LayerShape
from workers.attention.batch import Batch, Ints


class DraftShape(Protocol):
    """Sizes, dtype and device of a draft model."""

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
    """Runs a draft model over its own paged KV cache."""

    @property
    def module(self) -> Any:
        """What `LearnedProposer.build` returned; for a language model, the model."""
        ...

    @property
    def loaded(self) -> DraftShape:
        """Its context length, vocabulary and layers."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks of its cache."""
        ...

    def forward(self, batch: Batch, wanted_N: Ints, features_TX: torch.Tensor | None = None) -> torch.Tensor:
        """Run *batch*, writing its K and V.

        Args:
            batch: rows whose slots hold the blocks for every position fed.
            wanted_N: int64, flat indices of the tokens whose output is returned.
            features_TX: fed along with the tokens, where the module takes features.

        Returns:
            `[N, X]`: hidden states of a module, fp32 logits of a language model.
        """
        ...

    def resumes_at(self, slots_R: Ints, generations_R: Ints, held_R: Ints) -> Ints:
        """Return how many of the `held_R` first tokens of each slot's sequence need not be fed again, int64 `[R]`.

        With recurrent layers these are the tokens up to the last position whose state is kept.
        """
        ...

    def key(self) -> str | None:
        """See `workers.compiled.warming.Compilable`."""
        ...

    def compile_into(self, folder: Path, trial: Callable[[], None]) -> None:
        """See `workers.compiled.warming.Compilable`."""
        ...

    def load_compiled(self, folder: Path) -> None:
        """See `workers.compiled.warming.Compilable`."""
        ...

    def measure(self, max_tokens: int) -> Iterator[tuple[int, float]]:
        """Yield rows and seconds of a forward of 1, 2, 4 ... rows, to *max_tokens* at least; none if not worth it."""
        ...
