"""Groups of rows that are attended together in torch: padded to a common shape, with their masks."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from protos.config.kv_window import KVWindow
from workers.attention.backend import Options
from workers.attention.batch import AttentionMetadata, Flags, Ints

CHUNK = 16
"""Rows that feed more tokens than this are attended one by one."""
MAX_SCORES = 1 << 21
"""Queries x keys of such a row that are attended at a time. Scores and masks take memory for each, times heads."""


@dataclass
class RowGroup:
    """Rows attended together, padded to R rows x Q queries x L keys.

    Attributes:
        tokens_RQ: flat index of each query; padding repeats the row's last token. None: tokens are in order.
        real_N: indices of the queries in the flattened `tokens_RQ` that are not padding; None if all are real.
        targets_N: flat index of each real query; None as `tokens_RQ`.
        blocks_N: block ids to gather, R x L / block_size of them, flat.
        positions_RQ: position of each query.
        length: L, whole blocks for several rows or with a window, the exact context for one row.
        stale_N: gathered places past a row's context, before its first valid one, or in no query's window. They are
            zeroed: what another sequence left there must not reach this one, not even a NaN that a mask hides.
        num_settled: places visible to all queries of the group. NaN or infinite keys and values of draft tokens past
            them must not reach the queries before them.
        mask: which places each query attends to; None for the causal mask.
    """

    tokens_RQ: torch.Tensor | None
    real_N: torch.Tensor | None
    targets_N: torch.Tensor | None
    blocks_N: torch.Tensor
    positions_RQ: torch.Tensor
    length: int
    stale_N: torch.Tensor | None
    num_settled: int
    mask: "AttentionMask | None" = None
    additive_masks: dict[tuple[int, bool, bool, int], torch.Tensor | None] = field(default_factory=dict)

    @property
    def query_slices(self) -> list[slice]:
        """The queries that are attended at a time; for several rows, all of them."""
        rows, queries = self.positions_RQ.shape
        step = queries if rows > 1 else max(1, MAX_SCORES // self.length)
        return [slice(first, min(first + step, queries)) for first in range(0, queries, step)]

    def mask_RQL(self, options: Options, dtype: torch.dtype, queries: slice) -> torch.Tensor | None:
        """Return the additive mask of some queries, None if every key is visible; once a forward for equal layers."""
        key = (options.window, options.window_from_block, options.causal_block, queries.start)
        if key not in self.additive_masks:
            self.additive_masks[key] = self._make_mask(options, dtype, queries)
        return self.additive_masks[key]

    def _make_mask(self, options: Options, dtype: torch.dtype, queries: slice) -> torch.Tensor | None:
        is_one_full_query = self.positions_RQ.numel() == 1 and self.stale_N is None and self.mask is None
        if is_one_full_query and not 0 < options.window < self.length:
            return None
        hidden_RQL = self._hidden(options, queries)
        return torch.zeros(hidden_RQL.shape, dtype=dtype, device=hidden_RQL.device).masked_fill_(hidden_RQL, -torch.inf)

    def _hidden(self, options: Options, queries: slice) -> torch.Tensor:
        positions_RQ = self.positions_RQ[:, queries]
        if self.mask is not None:
            return self.mask.hidden(positions_RQ, options, queries)
        keys_L = torch.arange(self.length, device=self.positions_RQ.device)
        distance_RQL = positions_RQ.unsqueeze(-1) - keys_L
        hidden_RQL = distance_RQL < 0
        if options.window:
            hidden_RQL |= distance_RQL >= options.window
        return hidden_RQL


@dataclass(frozen=True)
class AttentionMask:
    """An explicit mask.

    Attributes:
        visible_RQL: options of layers left out.
        key_positions_RL: int64.
        first_R1: int64, the first place that each row's tree mask covers, which is also the first one's position.
    """

    visible_RQL: torch.Tensor
    key_positions_RL: torch.Tensor
    first_R1: torch.Tensor

    def hidden(self, positions_RQ: torch.Tensor, options: Options, queries: slice) -> torch.Tensor:
        """Return which places some queries, at these positions, do not attend to, `[R, Q, L]`."""
        hidden_RQL = ~self.visible_RQL[:, queries]
        keys_R1L = self.key_positions_RL.unsqueeze(1)
        if options.causal_block:
            hidden_RQL |= keys_R1L > positions_RQ.unsqueeze(-1)
        if options.window:
            from_RQ = torch.minimum(positions_RQ, self.first_R1) if options.window_from_block else positions_RQ
            hidden_RQL |= from_RQ.unsqueeze(-1) - keys_R1L >= options.window
        return hidden_RQL


def group_rows(metadata: AttentionMetadata, rows_M: Ints, device: torch.device) -> list[RowGroup]:
    """Return groups of the rows *rows_M*, their tensors on *device*."""
    return [_group(metadata, group, device) for group in partition(metadata, rows_M)]


def partition(metadata: AttentionMetadata, rows_M: Ints) -> list[Ints]:
    """Split rows into groups that are padded to a common shape: long chunks alone, others by similar context.

    Rows with an explicit mask and rows with the causal one are never in one group.
    """
    if metadata.is_masked_R is None:
        return _by_context(metadata, rows_M)
    is_masked_M = metadata.is_masked_R[rows_M]
    kinds = (rows_M[~is_masked_M], rows_M[is_masked_M])
    return [group for rows in kinds if len(rows) for group in _by_context(metadata, rows)]


def _by_context(metadata: AttentionMetadata, rows_M: Ints) -> list[Ints]:
    if len(rows_M) == 1:
        return [rows_M]
    reads_R = metadata.reads_R
    groups = [rows_M[i : i + 1] for i in np.flatnonzero(metadata.lengths_R[rows_M] > CHUNK)]
    short = rows_M[metadata.lengths_R[rows_M] <= CHUNK]
    while len(short):
        # A group includes contexts down to half of its longest: padding at most doubles the work.
        longest = reads_R[short].max()
        together = (reads_R[short] * 2 >= longest) | (longest <= 4 * CHUNK)
        groups.append(short[together])
        short = short[~together]
    return groups


def _group(metadata: AttentionMetadata, rows_M: Ints, device: torch.device) -> RowGroup:
    lengths_M = metadata.lengths_R[rows_M]
    queries_MQ = np.minimum(np.arange(int(lengths_M.max())), lengths_M[:, None] - 1)
    positions_MQ = metadata.positions(rows_M, queries_MQ + metadata.starts_R[rows_M][:, None])
    in_order = len(rows_M) == len(metadata.starts_R) and bool((lengths_M == lengths_M[0]).all())
    in_order = in_order and bool((np.diff(rows_M) == 1).all())
    is_real_MQ = np.arange(queries_MQ.shape[1]) < lengths_M[:, None]
    tokens_MQ = queries_MQ + metadata.offsets_R[rows_M][:, None]
    is_masked = metadata.is_masked_R is not None and bool(metadata.is_masked_R[rows_M[0]])
    window = metadata.kv_window if is_masked else None
    keys = _all_keys(metadata, rows_M) if window is None else _keys_in(window, metadata, rows_M, positions_MQ.min(1))
    mask = _mask(metadata, rows_M, queries_MQ, keys.places_ML, device) if is_masked else None
    return RowGroup(
        tokens_RQ=None if in_order else to_device(tokens_MQ, device),
        real_N=None if is_real_MQ.all() else to_device(np.flatnonzero(is_real_MQ), device),
        targets_N=None if in_order else to_device(tokens_MQ[is_real_MQ], device),
        blocks_N=to_device(keys.blocks_N, device),
        positions_RQ=to_device(positions_MQ, device),
        length=keys.places_ML.shape[1],
        stale_N=None if keys.stale_N is None else to_device(keys.stale_N, device),
        num_settled=_num_settled(metadata, rows_M, keys, is_masked=is_masked),
        mask=mask,
    )


class _Keys(NamedTuple):
    """What a group gathers: cache blocks, flat; the places that these hold, `[M, L]`; flat indices of stale ones."""

    blocks_N: Ints
    places_ML: Ints
    stale_N: Ints | None


def _all_keys(metadata: AttentionMetadata, rows_M: Ints) -> _Keys:
    contexts_M, block_size = metadata.contexts_R[rows_M], metadata.block_size
    num_blocks = -(-int(contexts_M.max()) // block_size)
    is_several = len(rows_M) > 1
    length = num_blocks * block_size if is_several else int(contexts_M[0])
    places_ML = np.broadcast_to(np.arange(length), (len(rows_M), length))
    has_stale = is_several or metadata.first_valid_R is not None
    stale_N = np.flatnonzero(_is_stale(metadata, rows_M, places_ML)) if has_stale else None
    return _Keys(metadata.tables_RB[rows_M, :num_blocks].reshape(-1), places_ML, stale_N)


def _keys_in(window: KVWindow, metadata: AttentionMetadata, rows_M: Ints, lowest_M: Ints) -> _Keys:
    """As `_all_keys`, of the blocks with sinks and window only; *lowest_M* is each row's lowest fed position.

    What tree masks cover is gathered in any case: its places are not in the order of positions.
    """
    first_M = np.minimum(lowest_M - window.size + 1, metadata.first_covered_R[rows_M])
    blocks_MB, block_size = metadata.blocks_in(window, rows_M, first_M), metadata.block_size
    places_ML = (blocks_MB[:, :, None] * block_size + np.arange(block_size)).reshape(len(rows_M), -1)
    tables_RB = metadata.tables_RB
    held_MB = tables_RB[rows_M[:, None], np.minimum(blocks_MB, tables_RB.shape[1] - 1)]
    is_old_ML = (places_ML < first_M[:, None]) & (places_ML >= window.sinks)
    is_stale_ML = _is_stale(metadata, rows_M, places_ML) | is_old_ML
    return _Keys(held_MB.reshape(-1), places_ML, np.flatnonzero(is_stale_ML))


def _num_settled(metadata: AttentionMetadata, rows_M: Ints, keys: _Keys, *, is_masked: bool) -> int:
    if metadata.lengths_R[rows_M].max() == 1 and (not is_masked or metadata.tree_masks is None):
        return int(keys.places_ML.shape[1])
    return 0 if is_masked else int(metadata.starts_R[rows_M].min()) + 1


def _mask(
    metadata: AttentionMetadata, rows_M: Ints, queries_MQ: Ints, places_ML: Ints, device: torch.device
) -> AttentionMask:
    visible_MQL = metadata.visible(rows_M, queries_MQ, places_ML)
    first_M1 = metadata.first_covered_R[rows_M][:, None]
    return AttentionMask(
        to_device(visible_MQL, device),
        to_device(metadata.positions(rows_M, places_ML).copy(), device),  # torch takes no read-only views
        to_device(first_M1, device),
    )


def _is_stale(metadata: AttentionMetadata, rows_M: Ints, places_ML: Ints) -> Flags:
    """Return which gathered places hold no K and V of their row."""
    is_stale_ML: Flags = places_ML >= metadata.contexts_R[rows_M][:, None]
    if metadata.first_valid_R is not None:
        is_stale_ML |= places_ML < metadata.first_valid_R[rows_M][:, None]
    return is_stale_ML


def to_device(array: Ints | Flags, device: torch.device) -> torch.Tensor:
    """Return *array* as a contiguous tensor on *device*."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
