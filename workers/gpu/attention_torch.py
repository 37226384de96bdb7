"""Attention over `DeviceMetadata` in torch's operators: shapes depend on the captured size alone, and nothing is read
on the host, so that a graph can repeat it.

It gathers whole block tables, so that a step costs as much as its longest context allows. It is for devices without
Triton, and the definition that kernels are compared with.
"""

from typing import ClassVar, Protocol, runtime_checkable

import torch

from workers.attention.backend import AttentionBackend, Options
from workers.attention.batch import WORD, AttentionMetadata
from workers.attention.kv import KVCache
from workers.attention.torch import attend_queries, without_broken_
from workers.gpu.metadata import DeviceMetadata

MAX_PLACES = 1 << 18
"""Places of K and V, of all rows of a size together, that are gathered at most."""


@runtime_checkable
class DeviceAttention(AttentionBackend, Protocol):
    """An attention backend whose plan is on the device."""

    def use(self, metadata: DeviceMetadata) -> None:
        """Attend over these rows from now on; the tensors may change between forwards, their shapes do not."""
        ...


def device_attention(backend: AttentionBackend, cache: KVCache) -> DeviceAttention:
    """Return *backend* if it takes plans on the device, else attention over *cache* that does."""
    return backend if isinstance(backend, DeviceAttention) else StaticTorchAttention(cache)


def most_rows(attention: DeviceAttention | None, places: int) -> int | None:
    """Return how many rows with block tables of *places* a size may have; None if any number, as without attention."""
    return MAX_PLACES // places if isinstance(attention, StaticTorchAttention) else None


class StaticTorchAttention:
    """See `DeviceAttention`. Rows of a captured size feed their tokens at a stride of `max_length`, or fewer."""

    takes_padding: ClassVar[bool] = True

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self._metadata: DeviceMetadata | None = None
        self._masks: dict[tuple[int, bool, bool], torch.Tensor] = {}

    def plan(self, metadata: AttentionMetadata) -> None:
        """Raise: this attention takes plans on the device only."""
        raise RuntimeError("StaticTorchAttention takes DeviceMetadata: call use")

    def use(self, metadata: DeviceMetadata) -> None:
        """See `DeviceAttention`."""
        self._metadata, self._masks = metadata, {}

    @property
    def _rows(self) -> DeviceMetadata:
        assert self._metadata is not None, "use is called before a forward"
        return self._metadata

    def attend(
        self, layer: int, query_1HTD: torch.Tensor, key_1GTD: torch.Tensor, value_1GTE: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        rows = self._rows
        self._write(self.cache.keys[layer], key_1GTD[0].transpose(0, 1))
        if not self.cache.shapes[layer].values_in_keys:
            self._write(self.cache.values[layer], value_1GTE[0].transpose(0, 1))
        key_RGLD, value_RGLE = self._gather(self.cache.keys[layer]), self._gather(self.cache.values[layer])
        broken_RGL = without_broken_(key_RGLD, value_RGLE)
        query_RQHD = query_1HTD[0].transpose(0, 1)[self._tokens_RQ.flatten()]
        shape = self.cache.shapes[layer]
        query_RQGSD = query_RQHD.reshape(*self._tokens_RQ.shape, shape.kv_heads, -1, shape.key_size)
        output_RQGSE = attend_queries(
            query_RQGSD,
            key_RGLD,
            value_RGLE,
            options,
            broken_RGN=broken_RGL,
            mask_RQL=self._mask(options, query_RQHD.dtype),
        )
        output_NHE = output_RQGSE.reshape(self._tokens_RQ.numel(), -1, shape.value_size)
        return output_NHE[self._query_T].masked_fill(rows.rows_T[:, None, None] < 0, 0.0).unsqueeze(0)

    def _write(self, pages: torch.Tensor, new_TGD: torch.Tensor) -> None:
        """Write into the cache. Padding repeats what the first real token writes, or what is there if there is none."""
        flat = pages.flatten(0, 1)
        is_padding_T = self._rows.cache_index_T < 0
        first_1 = (~is_padding_T).int().argmax(0, keepdim=True)
        place_1 = self._rows.cache_index_T.index_select(0, first_1).clamp_min(0)
        is_all_padding = is_padding_T.all()
        again_1GD = torch.where(is_all_padding, flat.index_select(0, place_1), new_TGD.index_select(0, first_1))
        at_T = torch.where(is_padding_T, place_1, self._rows.cache_index_T)
        flat.index_copy_(0, at_T, torch.where(is_padding_T[:, None, None], again_1GD, new_TGD))

    def _gather(self, pages: torch.Tensor) -> torch.Tensor:
        """Return each row's keys or values `[R, kv_heads, L, size]`, zero where the row has none."""
        rows = self._rows
        gathered = pages.index_select(0, rows.tables_RB.flatten())
        found_RLGD = gathered.view(len(rows.starts_R), -1, *pages.shape[2:])
        places_L = torch.arange(found_RLGD.shape[1], device=found_RLGD.device)
        ends_R1 = (rows.starts_R + rows.lengths_R)[:, None]
        is_stale_RL = (places_L >= ends_R1) | (places_L < rows.first_valid_R[:, None])
        return found_RLGD.masked_fill(is_stale_RL[:, :, None, None], 0.0).transpose(1, 2)

    @property
    def _tokens_RQ(self) -> torch.Tensor:
        """Flat index of each row's queries; past its last one, that one again."""
        rows = self._rows
        within_Q = torch.arange(rows.max_length, device=rows.starts_R.device)
        last_R1 = (rows.lengths_R - 1).clamp_min(0)[:, None]
        return (rows.offsets_R[:, None] + torch.minimum(within_Q, last_R1)).long()

    @property
    def _query_T(self) -> torch.Tensor:
        """The index of each token among the flattened queries; 0 for padding."""
        rows = self._rows
        row_T = rows.rows_T.clamp_min(0).long()
        within_T = torch.arange(len(row_T), device=row_T.device) - rows.offsets_R[row_T]
        return torch.where(rows.rows_T < 0, 0, row_T * rows.max_length + within_T)

    def _mask(self, options: Options, dtype: torch.dtype) -> torch.Tensor:
        """Return the additive mask `[R, Q, L]`, once a forward for equal layers."""
        key = (options.window, options.window_from_block, options.causal_block)
        if key not in self._masks:
            hidden_RQL = ~self._visible(options)
            self._masks[key] = torch.zeros(hidden_RQL.shape, dtype=dtype, device=hidden_RQL.device).masked_fill_(
                hidden_RQL, -torch.inf
            )
        return self._masks[key]

    def _visible(self, options: Options) -> torch.Tensor:
        """Return which places each query attends to. Padding attends to the first place, so that it stays finite."""
        rows = self._rows
        length = rows.max_blocks * rows.block_size
        places_L = torch.arange(length, device=rows.starts_R.device)
        last_R1 = (rows.lengths_R - 1).clamp_min(0)[:, None]
        within_RQ = torch.minimum(torch.arange(rows.max_length, device=places_L.device), last_R1)
        places_RQ = rows.starts_R[:, None] + within_RQ
        visible_RQL = places_L <= places_RQ[:, :, None]
        if rows.visible_TW.shape[1]:
            inside_RL = places_L - rows.first_R[:, None]
            visible_RQL = torch.where((inside_RL >= 0)[:, None], self._in_tree(inside_RL), visible_RQL)
        visible_RQL &= (places_L >= rows.first_valid_R[:, None])[:, None]
        position_RL, position_RQ = self._positions(places_L[None]), self._positions(places_RQ)
        if options.causal_block:
            visible_RQL &= position_RL[:, None] <= position_RQ[:, :, None]
        if options.window:
            from_RQ = torch.minimum(position_RQ, rows.first_R[:, None]) if options.window_from_block else position_RQ
            visible_RQL &= from_RQ[:, :, None] - position_RL[:, None] < options.window
        is_padding_R11 = (rows.lengths_R == 0)[:, None, None]
        return torch.where(is_padding_R11, places_L == 0, visible_RQL)

    def _in_tree(self, inside_RL: torch.Tensor) -> torch.Tensor:
        """Return which places, counted from the first that a tree mask covers, it lets each query see, `[R, Q, L]`."""
        rows = self._rows
        words_RQW = rows.visible_TW[self._tokens_RQ]
        at_RL = inside_RL.clamp(0, words_RQW.shape[2] * WORD - 1).long()
        word_RQL = words_RQW.gather(2, (at_RL // WORD)[:, None].expand(-1, words_RQW.shape[1], -1))
        bit_RQL = (word_RQL >> (at_RL % WORD)[:, None]) & 1
        return (bit_RQL != 0) & (inside_RL < rows.sizes_R[:, None])[:, None]

    def _positions(self, places_RX: torch.Tensor) -> torch.Tensor:
        """Return the positions of places of each row."""
        rows = self._rows
        inside_RX = places_RX - rows.first_R[:, None]
        at_RX = inside_RX.clamp(0, rows.positions_RA.shape[1] - 1).long()
        return torch.where(inside_RX >= 0, rows.positions_RA.gather(1, at_RX), places_RX)
