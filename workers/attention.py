"""Paged attention for any `transformers` causal LM, through one registered attention function.

The tokens of all rows come flattened, `[1, T]`. For each layer the function writes K and V into the paged
cache and attends row by row, causally by position. What a forward is about (block tables, positions) does
not travel through the model: `run_with` makes a backend current for the time of one forward, and the
runner that owns the backend is the only caller.

No mask function is registered: `transformers` then builds no mask at all for this name, which is what we
want, since masks are made here from positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface

from protos.errors import ModelError

NAME = "slipstream_paged"
HARMLESS = frozenset({"dropout", "position_ids", "use_cache", "cache_position", "output_attentions"})
"""What models pass along that does not change attention here; anything else we do not know is refused."""

Ints = npt.NDArray[np.int64]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Rows:
    """The rows of one forward, on the host; all int64.

    Attributes:
        starts_R, lengths_R, offsets_R: first position, number of tokens, first flat index of each row.
        tables_RB: block ids in order; entries behind a row's context are arbitrary valid ids.
        places_T: index of each token's place in the cache, counted in tokens (block * block_size + offset).
    """

    starts_R: Ints
    lengths_R: Ints
    offsets_R: Ints
    tables_RB: Ints
    places_T: Ints


@dataclass(frozen=True)
class Options:
    """What a layer asks of attention. `window` 0: none; `softcap` 0.0: none; `sinks_H`: gpt_oss's, or None."""

    scaling: float
    window: int = 0
    softcap: float = 0.0
    sinks_H: torch.Tensor | None = None


class AttentionBackend(Protocol):
    """One way to write K and V into pages and attend over them."""

    def plan(self, rows: Rows) -> None:
        """Prepare everything that all layers of the coming forward share."""
        ...

    def attend(
        self, layer: int, query_HTD: torch.Tensor, key_GTD: torch.Tensor, value_GTE: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """Write K and V of the T tokens, then attend.

        Args:
            layer: index of the layer.
            query_HTD: `[heads, T, key_size]`, any strides, last dimension contiguous.
            key_GTD: `[kv_heads, T, key_size]`.
            value_GTE: `[kv_heads, T, value_size]`.
            options: scaling, window, cap and sinks.

        Returns:
            A contiguous `[T, heads, value_size]`.
        """
        ...


class _Current:
    """The backend of the forward that is running. Written by `run_with` alone."""

    backend: AttentionBackend | None = None


def run_with(backend: AttentionBackend, forward: Callable[[], Result]) -> Result:
    """Call *forward* with *backend* as the one that serves attention."""
    previous, _Current.backend = _Current.backend, backend
    try:
        return forward()
    finally:
        _Current.backend = previous


def _op(  # noqa: PLR0917 - the operator's schema
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    layer: int,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    backend = _Current.backend
    if backend is None:
        raise RuntimeError(f"a model loaded with {NAME} attention runs only through ModelRunner")
    options = Options(scaling, window, softcap, sinks)
    return backend.attend(layer, query[0], key[0], value[0], options).unsqueeze(0)


def _shape(query: torch.Tensor, _key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


def _define_op() -> torch.library.Library:
    # An op of its own keeps torch.compile from looking inside. The cache is not declared as mutated: nothing
    # else in a graph touches it, and the data flow of the hidden states alone orders the layers.
    library = torch.library.Library("slipstream", "DEF")  # type: ignore[no-untyped-call]
    library.define(  # type: ignore[no-untyped-call]
        "paged_attention(Tensor query, Tensor key, Tensor value, Tensor? sinks, int layer, float scaling, "
        "int window, float softcap) -> Tensor"
    )
    library.impl("paged_attention", _op, "CPU")  # type: ignore[no-untyped-call]
    library.impl("paged_attention", _op, "CUDA")  # type: ignore[no-untyped-call]
    torch.library.register_fake("slipstream::paged_attention", _shape, lib=library)
    return library


_LIBRARY = _define_op()


def paged_attention(  # noqa: PLR0917 - the signature is transformers'
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The function `transformers` calls in each layer: `[1, heads, T, size]` in, `[1, T, heads, size]` out."""
    for name in others.keys() - HARMLESS:
        if others[name] is not None and others[name] is not False:
            raise ModelError(f"{type(module).__name__} passes {name!r} to attention, which paged attention cannot obey")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = torch.ops.slipstream.paged_attention(
        query, key, value, s_aux, module.layer_idx, scale, sliding_window or 0, softcap or 0.0
    )
    return output, None


AttentionInterface.register(NAME, paged_attention)
