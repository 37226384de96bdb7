"""Paged attention for any `transformers` causal LM, through one registered attention function.

The tokens of all rows come flattened, `[1, T]`. For each layer the function writes K and V into the paged
cache and attends row by row, causally by position but for the areas of drafts (`workers.attention.batch.TreeMask`).
What a forward is about (block tables, positions, areas) does not travel through the model: `run_with` makes a backend
current for the time of one forward, and the runner that owns the backend is the only caller.

No mask function is registered: `transformers` then builds no mask at all for this name, which is what we
want, since masks are made here from positions.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface

from protos.errors import ModelError
from workers.attention.batch import Ints, TreeMasks

NAME = "slipstream_paged"
HARMLESS = frozenset({"dropout", "position_ids", "use_cache", "cache_position", "output_attentions"})
"""What models pass along that does not change attention here; anything else we do not know is refused."""

Flags = npt.NDArray[np.bool_]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Rows:
    """The rows of one forward, on the host.

    Attributes:
        starts_R, lengths_R, offsets_R: int64, contiguous; each row's first place, tokens, first flat index.
        slots_R: int64, contiguous; where each row's blocks stand in `blocks_SB`.
        blocks_SB: int32, contiguous, block ids in order.
        areas, lowest_R: as in `workers.attention.batch.Batch`.
    """

    starts_R: Ints
    lengths_R: Ints
    offsets_R: Ints
    slots_R: Ints
    blocks_SB: npt.NDArray[np.int32]
    block_size: int
    areas: TreeMasks | None = None
    lowest_R: Ints | None = None

    @cached_property
    def tables_RB(self) -> Ints:
        """Block ids of the rows, int64; entries behind a row's context are its own first block's.

        So a gather never reads a stranger's.
        """
        contexts_R = self.starts_R + self.lengths_R
        used = -(-int(contexts_R.max()) // self.block_size)
        tables_RB = self.blocks_SB[self.slots_R, :used].astype(np.int64)
        unused_RB = np.arange(used) * self.block_size >= contexts_R[:, None]
        np.copyto(tables_RB, tables_RB[:, :1], where=unused_RB)
        return tables_RB

    @cached_property
    def places_T(self) -> Ints:
        """Index of each token's place in the cache, int64, counted in tokens (block * block_size + offset)."""
        rows_T = np.repeat(np.arange(len(self.starts_R)), self.lengths_R)
        along_T = np.arange(len(rows_T)) + (self.starts_R - self.offsets_R)[rows_T]
        blocks_T = self.tables_RB[rows_T, along_T // self.block_size]
        places_T: Ints = blocks_T * self.block_size + along_T % self.block_size
        return places_T

    @cached_property
    def special_R(self) -> Flags | None:
        """Which rows do not simply see all places up to their own; None where there is no such row."""
        if self.areas is None and self.lowest_R is None:
            return None
        special_R = np.zeros(len(self.starts_R), np.bool_)
        if self.areas is not None:
            special_R |= self.areas.sizes_R > 0
        if self.lowest_R is not None:
            special_R |= self.lowest_R > 0
        return special_R

    def positions(self, members: Ints, places_MX: Ints) -> Ints:
        """Return the positions of places of some rows, int64 `[M, X]`."""
        return places_MX if self.areas is None else self.areas.positions(members[:, None], places_MX)

    def seen(self, members: Ints, queries_MQ: Ints, length: int) -> Flags:
        """Return which of a row's first *length* places its queries see, windows aside: `[M, Q, length]`.

        Args:
            members: the rows.
            queries_MQ: which of its row's tokens each query is.
            length: number of places.
        """
        places_MQ1 = (queries_MQ + self.starts_R[members][:, None])[:, :, None]
        places_L = np.arange(length)
        seen_MQL = places_L <= places_MQ1
        if self.areas is not None:
            first_M11 = self.areas.first_R[members][:, None, None]
            in_area_MQL = self._seen_of_areas(members, queries_MQ, places_L)
            seen_MQL = np.where(places_L < first_M11, seen_MQL, in_area_MQL)
        if self.lowest_R is not None:
            seen_MQL &= places_L >= self.lowest_R[members][:, None, None]
        return seen_MQL

    def _seen_of_areas(self, members: Ints, queries_MQ: Ints, places_L: Ints) -> Flags:
        """Read the bits of the areas' places; False for all others."""
        assert self.areas is not None
        words_MQW = self.areas.seen_TW[queries_MQ + self.offsets_R[members][:, None]]
        bits_MQA = np.unpackbits(words_MQW.astype("<u8", copy=False).view(np.uint8), axis=-1, bitorder="little")
        inside_ML = places_L - self.areas.first_R[members][:, None]
        is_there_ML = (inside_ML >= 0) & (inside_ML < self.areas.sizes_R[members][:, None])
        at_M1L = np.clip(inside_ML, 0, bits_MQA.shape[2] - 1)[:, None, :]
        found_MQL = np.take_along_axis(bits_MQA, np.broadcast_to(at_M1L, (*queries_MQ.shape, len(places_L))), 2)
        seen_MQL: Flags = found_MQL.astype(np.bool_) & is_there_ML[:, None, :]
        return seen_MQL


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
        self, layer: int, query_1HTD: torch.Tensor, key_1GTD: torch.Tensor, value_1GTE: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """Write K and V of the T tokens, then attend.

        Args:
            layer: index of the layer.
            query_1HTD: `[1, heads, T, key_size]`, any strides, last dimension contiguous.
            key_1GTD: `[1, kv_heads, T, key_size]`.
            value_1GTE: `[1, kv_heads, T, value_size]`.
            options: scaling, window, cap and sinks.

        Returns:
            A contiguous `[1, T, heads, value_size]`.
        """
        ...


class _Current(threading.local):
    """The backend of the forward that runs in this thread, and its tokens. Written by `run_with` alone."""

    backend: AttentionBackend | None = None
    num_tokens: int | None = None


_CURRENT = _Current()


def run_with(backend: AttentionBackend, forward: Callable[[], Result], num_tokens: int | None = None) -> Result:
    """Call *forward* with *backend* as the one that serves attention; tokens behind *num_tokens* are filling."""
    previous = _CURRENT.backend, _CURRENT.num_tokens
    _CURRENT.backend, _CURRENT.num_tokens = backend, num_tokens
    try:
        return forward()
    finally:
        _CURRENT.backend, _CURRENT.num_tokens = previous


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
    backend = _CURRENT.backend
    if backend is None:
        raise RuntimeError(f"a model loaded with {NAME} attention runs only through ModelRunner")
    options, size = Options(scaling, window, softcap, sinks), _CURRENT.num_tokens
    if size is None or query.shape[2] == size:
        return backend.attend(layer, query, key, value, options)
    output = _shape(query, key, value).zero_()
    output[:, :size] = backend.attend(layer, query[:, :, :size], key[:, :, :size], value[:, :, :size], options)
    return output


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
