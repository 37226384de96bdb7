"""Batch-invariant paged attention on GPUs, in torch.

A query's keys, in order of position, are processed `SPLIT` at a time with an online softmax. Every kernel runs with one
shape: `QUERIES` queries, the last ones padding, and `SPLIT` keys, all of which may be masked without changing any bit.
Values were compared with the CPU kernel's, on a CPU; this code has not run on a GPU.
"""

from typing import ClassVar

import numpy as np
import torch

from workers.attention.backend import Options
from workers.attention.batch import AttentionMetadata, Ints
from workers.attention.kv import KVCache, Pages

SPLIT = 128
QUERIES = 16


class SplitAttention:
    """Gathers the keys of each query. Holds the plan of one forward."""

    takes_padding: ClassVar[bool] = False

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.device = cache.device
        empty = torch.empty(0, dtype=torch.int64)
        self._written_T = self._places_TL = self._positions_TL = self._own_T = self._first_T = empty

    def plan(self, metadata: AttentionMetadata) -> None:
        """List the places that every token attends to, in order of position, padded with -1."""
        seen, own = zip(*(_visible(metadata, row) for row in range(len(metadata.starts_R))), strict=True)
        longest = max(len(places) for places_of in seen for places in places_of)
        tokens = sum(map(len, seen))
        places_TL = np.full((-(-tokens // QUERIES) * QUERIES, -(-longest // SPLIT) * SPLIT), -1, np.int64)
        positions_TL = np.zeros_like(places_TL)
        every = ((row, places) for row, places_of in enumerate(seen) for places in places_of)
        for token, (row, places) in enumerate(every):
            blocks = metadata.tables_RB[row, places // metadata.block_size]
            places_TL[token, : len(places)] = blocks * metadata.block_size + places % metadata.block_size
            positions_TL[token, : len(places)] = metadata.positions(np.array([row]), places[None])[0]
        self._written_T = self._tensor(metadata.cache_index_T)
        self._places_TL, self._positions_TL = self._tensor(places_TL), self._tensor(positions_TL)
        first_T = np.repeat(metadata.first_covered_R, metadata.lengths_R)
        self._own_T, self._first_T = (
            self._tensor(np.pad(part_T, (0, len(places_TL) - tokens))) for part_T in (np.concatenate(own), first_T)
        )

    def attend(
        self, layer: int, query_1HTD: torch.Tensor, key_1GTD: torch.Tensor, value_1GTE: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        self.cache.write(layer, self._written_T, key_1GTD[0].transpose(0, 1), value_1GTE[0].transpose(0, 1))
        _, heads, tokens, size = query_1HTD.shape
        query_THD = query_1HTD.new_zeros(len(self._own_T), heads, size)
        query_THD[:tokens] = query_1HTD[0].transpose(0, 1)
        tiles = [self._tile(layer, query_THD[at : at + QUERIES], at, options) for at in range(0, tokens, QUERIES)]
        return torch.cat(tiles)[:tokens].to(query_1HTD.dtype).unsqueeze(0).contiguous()

    def _tile(self, layer: int, query_QHD: torch.Tensor, at: int, options: Options) -> torch.Tensor:
        """Attend for `QUERIES` tokens; fp32 `[Q, heads, value_size]`."""
        shape, heads = self.cache.shapes[layer], query_QHD.shape[1]
        query_QGSD = query_QHD.float().view(QUERIES, shape.kv_heads, -1, shape.key_size) * options.scaling
        state = _State.start(query_QGSD, shape.value_size, options)
        for first in range(0, self._places_TL.shape[1], SPLIT):
            places_QL = self._places_TL[at : at + QUERIES, first : first + SPLIT]
            hidden_QL = self._hidden(at, first, options)
            key_QGLD = _gather(self.cache.key_pages[layer], places_QL)
            value_QGLE = _gather(self.cache.value_pages[layer], places_QL).masked_fill(hidden_QL[:, None, :, None], 0.0)
            state.add(query_QGSD @ key_QGLD.transpose(-1, -2), value_QGLE, hidden_QL, options.softcap)
        return (state.output_QGSE / state.total_QGS1).view(QUERIES, heads, shape.value_size)

    def _hidden(self, at: int, first: int, options: Options) -> torch.Tensor:
        """Return which keys of one split `QUERIES` tokens do not attend to, `[Q, L]`."""
        queries, keys = slice(at, at + QUERIES), slice(first, first + SPLIT)
        own_Q1, positions_QL = self._own_T[queries, None], self._positions_TL[queries, keys]
        hidden_QL = self._places_TL[queries, keys] < 0
        if options.causal_block:
            hidden_QL |= positions_QL > own_Q1
        if options.window:
            from_Q1 = torch.minimum(own_Q1, self._first_T[queries, None]) if options.window_from_block else own_Q1
            hidden_QL |= from_Q1 - positions_QL >= options.window
        return hidden_QL

    def _tensor(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)


class _State:
    """An online softmax over splits, fp32."""

    def __init__(self, largest_QGS1: torch.Tensor, total_QGS1: torch.Tensor, output_QGSE: torch.Tensor) -> None:
        self.largest_QGS1, self.total_QGS1, self.output_QGSE = largest_QGS1, total_QGS1, output_QGSE

    @classmethod
    def start(cls, query_QGSD: torch.Tensor, value_size: int, options: Options) -> "_State":
        """Begin without keys, or with the sinks."""
        lead = query_QGSD.shape[:3]
        total_QGS1 = query_QGSD.new_zeros(*lead, 1)
        largest_QGS1 = torch.full_like(total_QGS1, -torch.inf)
        if options.sinks_H is not None:
            largest_QGS1 = options.sinks_H.float().view(1, *lead[1:], 1).expand(*lead, 1)
            total_QGS1 = torch.ones_like(largest_QGS1)
        return cls(largest_QGS1, total_QGS1, query_QGSD.new_zeros(*lead, value_size))

    def add(self, score_QGSL: torch.Tensor, value_QGLE: torch.Tensor, hidden_QL: torch.Tensor, softcap: float) -> None:
        """Add the keys of one split."""
        if softcap:
            score_QGSL = torch.tanh(score_QGSL / softcap) * softcap
        score_QGSL = score_QGSL.masked_fill(hidden_QL[:, None, None, :], -torch.inf)
        largest_QGS1 = torch.maximum(self.largest_QGS1, score_QGSL.amax(-1, keepdim=True))
        base_QGS1 = largest_QGS1.masked_fill(largest_QGS1 == -torch.inf, 0.0)
        shrink_QGS1 = torch.exp(self.largest_QGS1 - base_QGS1)
        weight_QGSL = torch.exp(score_QGSL - base_QGS1)
        self.total_QGS1 = self.total_QGS1 * shrink_QGS1 + weight_QGSL.sum(-1, keepdim=True)
        self.output_QGSE = self.output_QGSE * shrink_QGS1 + weight_QGSL @ value_QGLE
        self.largest_QGS1 = largest_QGS1


def _visible(metadata: AttentionMetadata, row: int) -> tuple[list[Ints], Ints]:
    """Return the places that each token of a row attends to, ascending, and the tokens' positions."""
    member, queries_1Q = np.array([row]), np.arange(metadata.lengths_R[row])[None]
    start = int(metadata.starts_R[row])
    seen_QL = metadata.visible(member, queries_1Q, np.arange(start + queries_1Q.shape[1])[None])[0]
    return [np.flatnonzero(seen_L) for seen_L in seen_QL], metadata.positions(member, queries_1Q + start)[0]


def _gather(pages: Pages, places_QL: torch.Tensor) -> torch.Tensor:
    """Return keys or values at places, fp32 `[Q, kv_heads, L, size]`."""
    found_NGX = pages.tokens(places_QL.clamp(min=0).flatten(), torch.float32)
    return found_NGX.view(*places_QL.shape, *found_NGX.shape[1:]).transpose(1, 2)
