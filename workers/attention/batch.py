"""The input of one forward: the tokens of all rows, flattened without padding, and their block tables."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from protos.config.kv_window import KVWindow
from workers.recurrent.kept_states import KeptStates

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]
WORD = 64


class TreeMask(NamedTuple):
    """The attention mask of a draft tree, or of a block with bidirectional attention, at the end of one row.

    A token's *place* is the index of its K and V along the row's blocks. It equals the token's position, except for
    the draft tokens that a tree mask covers.

    Attributes:
        first: the first place that the mask covers. All places before it hold known tokens.
        positions: the position of every covered place, those fed in earlier forwards included.
        visible: one integer for each of the last tokens that the row feeds: bit j is set if the token attends to place
            `first + j`. Tokens before them attend to no covered place. Each token attends to itself; sliding windows
            and other options of a layer (`workers.attention.backend.Options`) apply in addition.
    """

    first: int
    positions: Seq[int]
    visible: Seq[int]


@dataclass(frozen=True)
class TreeMasks:
    """The tree masks of a forward's R rows and T tokens, in contiguous arrays; A is the size of the largest.

    Attributes:
        first_R: int64; the end of the row if it has no tree mask.
        sizes_R: int64; 0 if it has none.
        positions_RA: int64.
        visible_TW: uint64, bit `j % 64` of word `j // 64` for place `first + j`.
    """

    first_R: Ints
    sizes_R: Ints
    positions_RA: Ints
    visible_TW: Words

    @classmethod
    def of(cls, masks: Seq[TreeMask | None], ends_R: Ints, lengths_R: Ints) -> "TreeMasks":
        """Join the masks of rows that feed `lengths_R` tokens, up to but excluding the places `ends_R`."""
        sizes_R = np.array([0 if mask is None else len(mask.positions) for mask in masks], np.int64)
        largest = max(1, int(sizes_R.max()))
        positions_RA = np.zeros((len(masks), largest), np.int64)
        visible_TW = np.zeros((int(lengths_R.sum()), -(-largest // WORD)), np.uint64)
        first_R = ends_R.copy()
        for r, (mask, end) in enumerate(zip(masks, np.cumsum(lengths_R).tolist(), strict=True)):
            if mask is not None:
                first_R[r] = mask.first
                positions_RA[r, : len(mask.positions)] = mask.positions
                visible_TW[end - len(mask.visible) : end] = _words(mask.visible, visible_TW.shape[1])
        return cls(first_R, sizes_R, positions_RA, visible_TW)

    def positions(self, rows_N: Ints, places_N: Ints) -> Ints:
        """Return the positions of places of some rows, int64, in the shape that both arguments broadcast to."""
        inside_N = places_N - self.first_R[rows_N]
        found_N = self.positions_RA[rows_N, np.clip(inside_N, 0, self.positions_RA.shape[1] - 1)]
        return np.where(inside_N >= 0, found_N, places_N)


def _words(masks: Seq[int], width: int) -> Words:
    """Return *masks* as words, the least significant first, `[N, width]`."""
    data = b"".join([mask.to_bytes(width * WORD // 8, "little") for mask in masks])
    return np.frombuffer(data, "<u8").reshape(len(masks), width)


@dataclass(frozen=True)
class Batch:
    """The rows of one forward. Row r feeds `lengths_R[r]` tokens at places `starts_R[r] ...` of its slot.

    Attributes:
        slots_R, starts_R, lengths_R: int64 `[R]`.
        tokens_T: int64 `[T]`, T = sum of lengths, row after row.
        tree_masks: None if no row has one.
        first_valid_R: int64 `[R]`, contiguous; the first place of each row whose K and V are in the cache. No token
            attends to places before it. None if it is 0 for all rows.
        kept_states: None if no row begins with or keeps any.
    """

    slots_R: Ints
    starts_R: Ints
    lengths_R: Ints
    tokens_T: Ints
    tree_masks: TreeMasks | None = None
    first_valid_R: Ints | None = None
    kept_states: KeptStates | None = None

    @cached_property
    def offsets_R(self) -> Ints:
        """Flat index of each row's first token."""
        if self._is_plain:
            return np.arange(len(self.slots_R))
        return np.cumsum(self.lengths_R) - self.lengths_R

    @cached_property
    def slots_T(self) -> Ints:
        """The slot of every token."""
        return self.slots_R if self._is_plain else np.repeat(self.slots_R, self.lengths_R)

    @cached_property
    def places_T(self) -> Ints:
        """The place of every token along its row's blocks."""
        if self._is_plain:
            return self.starts_R
        return np.arange(len(self.tokens_T)) + np.repeat(self.starts_R - self.offsets_R, self.lengths_R)

    @cached_property
    def positions_T(self) -> Ints:
        """The position of every token in its sequence."""
        if self.tree_masks is None:
            return self.places_T
        return self.tree_masks.positions(np.repeat(np.arange(len(self.slots_R)), self.lengths_R), self.places_T)

    @property
    def _is_plain(self) -> bool:
        """Whether every row feeds one token."""
        return len(self.tokens_T) == len(self.slots_R)

    @classmethod
    def from_history(
        cls,
        tokens_SL: Ints,
        slots_R: Ints,
        starts_R: Ints,
        lengths_R: Ints,
        *,
        tree_masks: TreeMasks | None = None,
        first_valid_R: Ints | None = None,
    ) -> "Batch":
        """Build a batch whose tokens are read from the table `tokens_SL`, by slot and place."""
        rows = cls(slots_R, starts_R, lengths_R, np.empty(int(lengths_R.sum()), np.int64), tree_masks, first_valid_R)
        np.copyto(rows.tokens_T, tokens_SL[rows.slots_T, rows.places_T])
        return rows


@dataclass(frozen=True)
class AttentionMetadata:
    """The rows of one forward as attention needs them: a `Batch` without tokens, with block tables. On the host.

    Attributes:
        starts_R, lengths_R, offsets_R: int64, contiguous; each row's first place, tokens, first flat index.
        slots_R: int64, contiguous; the index of each row's block table in `blocks_SB`.
        blocks_SB: int32, contiguous, block ids in order.
        block_size: tokens of a block.
        tree_masks, first_valid_R: see `Batch`.
        kv_window: which places tokens attend to, in all layers, by the positions of both; None: to all. Options of
            layers apply in addition.
    """

    starts_R: Ints
    lengths_R: Ints
    offsets_R: Ints
    slots_R: Ints
    blocks_SB: npt.NDArray[np.int32]
    block_size: int
    tree_masks: TreeMasks | None = None
    first_valid_R: Ints | None = None
    kv_window: KVWindow | None = None

    @classmethod
    def of(
        cls, batch: Batch, blocks_SB: npt.NDArray[np.int32], block_size: int, kv_window: KVWindow | None = None
    ) -> "AttentionMetadata":
        """Take the rows of *batch*."""
        return cls(
            batch.starts_R,
            batch.lengths_R,
            batch.offsets_R,
            batch.slots_R,
            blocks_SB,
            block_size,
            batch.tree_masks,
            batch.first_valid_R,
            kv_window,
        )

    @cached_property
    def tables_RB(self) -> Ints:
        """Block ids of the rows, int64; entries past a row's context repeat its own first block.

        So a gather never reads blocks of another sequence.
        """
        contexts_R = self.contexts_R
        used = -(-int(contexts_R.max()) // self.block_size)
        tables_RB = self.blocks_SB[self.slots_R, :used].astype(np.int64)
        unused_RB = np.arange(used) * self.block_size >= contexts_R[:, None]
        np.copyto(tables_RB, tables_RB[:, :1], where=unused_RB)
        return tables_RB

    @cached_property
    def cache_index_T(self) -> Ints:
        """Index of each token's K and V in the cache, int64: block * block_size + offset."""
        rows_T = np.repeat(np.arange(len(self.starts_R)), self.lengths_R)
        places_T = np.arange(len(rows_T)) + (self.starts_R - self.offsets_R)[rows_T]
        blocks_T = self.tables_RB[rows_T, places_T // self.block_size]
        cache_index_T: Ints = blocks_T * self.block_size + places_T % self.block_size
        return cache_index_T

    @cached_property
    def is_masked_R(self) -> Flags | None:
        """Which rows need a mask other than the causal one; None if none does."""
        if self.tree_masks is None and self.first_valid_R is None and self.kv_window is None:
            return None
        is_masked_R = np.zeros(len(self.starts_R), np.bool_)
        if self.tree_masks is not None:
            is_masked_R |= self.tree_masks.sizes_R > 0
        if self.first_valid_R is not None:
            is_masked_R |= self.first_valid_R > 0
        if self.kv_window is not None:
            is_masked_R |= self.contexts_R > sum(self.kv_window)
        return is_masked_R

    @property
    def contexts_R(self) -> Ints:
        """The end of each row: places before it hold K and V, those of this forward included."""
        contexts_R: Ints = self.starts_R + self.lengths_R
        return contexts_R

    @property
    def reads_R(self) -> Ints:
        """About how many places the tokens of each row attend to, all of them together."""
        contexts_R = self.contexts_R
        return contexts_R if self.kv_window is None else np.minimum(contexts_R, sum(self.kv_window) + self.lengths_R)

    def blocks_in(self, window: KVWindow, rows_M: Ints, first_M: Ints) -> Ints:
        """Return the blocks that hold what some rows read, as indices along their tables, ascending, int64 `[M, B]`.

        Indices past a row's last block are padding.

        Args:
            window: what tokens attend to.
            rows_M: the rows.
            first_M: the first place, sinks apart, that a token of each row attends to.
        """
        ends_M = -(-self.contexts_R[rows_M] // self.block_size)
        sinks = -(-window.sinks // self.block_size)
        first_M = np.maximum(sinks, first_M // self.block_size)
        recent_MB = first_M[:, None] + np.arange(max(0, (ends_M - first_M).max()))
        return np.concatenate((np.broadcast_to(np.arange(sinks), (len(rows_M), sinks)), recent_MB), axis=1)

    @property
    def first_covered_R(self) -> Ints:
        """The first place that each row's tree mask covers; the end of the row if it has none."""
        return self.contexts_R if self.tree_masks is None else self.tree_masks.first_R

    def positions(self, rows_M: Ints, places_MX: Ints) -> Ints:
        """Return the positions of places of some rows, int64 `[M, X]`."""
        return places_MX if self.tree_masks is None else self.tree_masks.positions(rows_M[:, None], places_MX)

    def visible(self, rows_M: Ints, queries_MQ: Ints, places_ML: Ints) -> Flags:
        """Return which places of some rows their queries attend to, `[M, Q, L]`.

        The options of layers, such as sliding windows, are left out.

        Args:
            rows_M: the rows.
            queries_MQ: the index of each query among its row's tokens.
            places_ML: the places.
        """
        places_MQ = queries_MQ + self.starts_R[rows_M][:, None]
        places_M1L = places_ML[:, None]
        visible_MQL = places_M1L <= places_MQ[:, :, None]
        if self.tree_masks is not None:
            first_M11 = self.tree_masks.first_R[rows_M][:, None, None]
            in_tree_MQL = self._visible_in_trees(self.tree_masks, rows_M, queries_MQ, places_ML)
            visible_MQL = np.where(places_M1L < first_M11, visible_MQL, in_tree_MQL)
        if self.first_valid_R is not None:
            visible_MQL &= places_M1L >= self.first_valid_R[rows_M][:, None, None]
        if self.kv_window is not None:
            keys_M1L = self.positions(rows_M, places_ML)[:, None]
            ages_MQL = self.positions(rows_M, places_MQ)[:, :, None] - keys_M1L
            visible_MQL &= (ages_MQL < self.kv_window.size) | (keys_M1L < self.kv_window.sinks)
        return visible_MQL

    def _visible_in_trees(self, masks: TreeMasks, rows_M: Ints, queries_MQ: Ints, places_ML: Ints) -> Flags:
        """Read the bits of the places that tree masks cover; False for all others."""
        words_MQW = masks.visible_TW[queries_MQ + self.offsets_R[rows_M][:, None]]
        bits_MQA = np.unpackbits(words_MQW.astype("<u8", copy=False).view(np.uint8), axis=-1, bitorder="little")
        inside_ML = places_ML - masks.first_R[rows_M][:, None]
        is_covered_ML = (inside_ML >= 0) & (inside_ML < masks.sizes_R[rows_M][:, None])
        at_M1L = np.clip(inside_ML, 0, bits_MQA.shape[2] - 1)[:, None, :]
        found_MQL = np.take_along_axis(bits_MQA, np.broadcast_to(at_M1L, (*queries_MQ.shape, at_M1L.shape[2])), 2)
        visible_MQL: Flags = found_MQL.astype(np.bool_) & is_covered_ML[:, None, :]
        return visible_MQL
