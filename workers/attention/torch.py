"""Paged attention in plain torch operators: any device, every option."""

from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from workers.attention.backend import Options
from workers.attention.batch import AttentionMetadata, Ints
from workers.attention.kv import KVCache, Pages
from workers.attention.row_groups import RowGroup, group_rows, to_device


class TorchAttention:
    """Gathers each row's blocks and calls scaled-dot-product attention. Holds the plan of one forward."""

    takes_padding: ClassVar[bool] = False

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.device = cache.device
        self._cache_index_T = torch.empty(0, dtype=torch.int64)
        self._groups: list[RowGroup] = []
        if self.device.type == "cuda":
            # cuDNN makes and keeps a plan for every size, on the host. Contexts grow, so that is one each step.
            torch.backends.cuda.enable_cudnn_sdp(False)

    def plan(self, metadata: AttentionMetadata) -> None:
        """Group the rows, and make the index tensors that all layers share."""
        self._cache_index_T = to_device(metadata.cache_index_T, self.device)
        self.plan_rows(metadata, np.arange(len(metadata.starts_R)))

    def plan_rows(self, metadata: AttentionMetadata, rows_M: Ints) -> None:
        """Plan attention (not the write) for some of the rows only."""
        self._groups = group_rows(metadata, rows_M, self.device)

    def attend(
        self, layer: int, query_1HTD: torch.Tensor, key_1GTD: torch.Tensor, value_1GTE: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        self.write(layer, key_1GTD[0], value_1GTE[0])
        return self.attend_groups(layer, query_1HTD[0].transpose(0, 1), options).unsqueeze(0)

    def write(self, layer: int, key_GTD: torch.Tensor, value_GTE: torch.Tensor) -> None:
        """Write K and V of the forward's tokens into the cache."""
        self.cache.write(layer, self._cache_index_T, key_GTD.transpose(0, 1), value_GTE.transpose(0, 1))

    def attend_groups(self, layer: int, query_THD: torch.Tensor, options: Options) -> torch.Tensor:
        """Attend over the cache; return `[T, heads, value_size]`."""
        if len(self._groups) == 1 and self._groups[0].tokens_RQ is None:
            return self._attend(layer, query_THD, self._groups[0], options)
        output_THE = query_THD.new_empty(*query_THD.shape[:2], self.cache.shapes[layer].value_size)
        self.attend_groups_into(output_THE, layer, query_THD, options)
        return output_THE

    def attend_groups_into(
        self, output_THE: torch.Tensor, layer: int, query_THD: torch.Tensor, options: Options
    ) -> None:
        """Attend and write the results of the planned rows into *output_THE*; leave other rows unchanged."""
        for group in self._groups:
            self._attend_into(output_THE, layer, query_THD, group, options)

    def _attend_into(
        self, output_THE: torch.Tensor, layer: int, query_THD: torch.Tensor, group: RowGroup, options: Options
    ) -> None:
        if group.tokens_RQ is None or group.targets_N is None:
            output_THE.copy_(self._attend(layer, query_THD, group, options))
            return
        padded_NHE = self._attend(layer, query_THD[group.tokens_RQ.flatten()], group, options)
        if group.real_N is not None:
            padded_NHE = padded_NHE[group.real_N]
        output_THE.index_copy_(0, group.targets_N, padded_NHE)

    def _attend(self, layer: int, query_NHD: torch.Tensor, group: RowGroup, options: Options) -> torch.Tensor:
        """Attend for the N = R x Q queries of one group; returns a contiguous `[N, heads, value_size]`."""
        shape = self.cache.shapes[layer]
        rows, num_queries = group.positions_RQ.shape
        key_RGLD = _gather(self.cache.key_pages[layer], group, query_NHD.dtype)
        value_RGLE = _gather(self.cache.value_pages[layer], group, query_NHD.dtype)
        broken_RGN = None
        if group.num_settled < group.length:
            new = slice(group.num_settled, None)
            broken_RGN = without_broken_(key_RGLD[:, :, new], value_RGLE[:, :, new])
        query_RQGSD = query_NHD.reshape(rows, num_queries, shape.kv_heads, -1, shape.key_size)
        outputs = [
            attend_queries(
                query_RQGSD[:, queries],
                key_RGLD,
                value_RGLE,
                options,
                broken_RGN=broken_RGN,
                mask_RQL=group.mask_RQL(options, query_NHD.dtype, queries),
            )
            for queries in group.query_slices
        ]
        return torch.cat(outputs, 1).reshape(rows * num_queries, -1, shape.value_size)


def _gather(pages: Pages, group: RowGroup, dtype: torch.dtype) -> torch.Tensor:
    """Return the group's keys or values in *dtype*, `[R, kv_heads, L, size]`: a copy, which may be modified."""
    gathered = pages.blocks(group.blocks_N, dtype)
    if group.stale_N is not None:
        gathered.flatten(0, 1).index_fill_(0, group.stale_N, 0)
    rows = group.positions_RQ.shape[0]
    return gathered.view(rows, -1, *gathered.shape[2:])[:, : group.length].transpose(1, 2)


def without_broken_(key_RGLD: torch.Tensor, value_RGLE: torch.Tensor) -> torch.Tensor:
    """Zero NaN and infinite keys and values in place; return which these were, `[R, G, L]`.

    Masked weights are 0, and 0 times NaN is NaN: a mask alone would not keep them from other queries.
    """
    broken_RGL = ~(key_RGLD.isfinite().all(-1) & value_RGLE.isfinite().all(-1))
    key_RGLD.masked_fill_(broken_RGL.unsqueeze(-1), 0)
    value_RGLE.masked_fill_(broken_RGL.unsqueeze(-1), 0)
    return broken_RGL


def attend_queries(
    query_RQGSD: torch.Tensor,
    key_RGLD: torch.Tensor,
    value_RGLE: torch.Tensor,
    options: Options,
    *,
    mask_RQL: torch.Tensor | None,
    broken_RGN: torch.Tensor | None,
) -> torch.Tensor:
    """Attend for some queries; return `[R, Q, G, S, value_size]`.

    *broken_RGN*: which of the last N keys were NaN or infinite. Queries that attend to one get NaN.
    """
    rows, queries, groups, share, _ = query_RQGSD.shape
    # Query heads that share a K/V head become queries of that head.
    query_RGMD = query_RQGSD.permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask_R1ML = None if mask_RQL is None else _repeat(mask_RQL, share)
    if options.softcap or options.sinks_H is not None:
        output_RGME = explicit_attention(query_RGMD, key_RGLD, value_RGLE, mask_R1ML, options)
    else:
        output_RGME = F.scaled_dot_product_attention(
            query_RGMD, key_RGLD, value_RGLE, attn_mask=mask_R1ML, scale=options.scaling
        )
    if broken_RGN is not None and mask_R1ML is not None:
        is_visible_R1MN = mask_R1ML[..., -broken_RGN.shape[-1] :] == 0
        attends_broken_RGM1 = (broken_RGN.unsqueeze(2) & is_visible_R1MN).any(-1, keepdim=True)
        output_RGME = output_RGME.masked_fill(attends_broken_RGM1, torch.nan)
    return output_RGME.view(rows, groups, share, queries, -1).permute(0, 3, 1, 2, 4)


def _repeat(mask_RQL: torch.Tensor, share: int) -> torch.Tensor:
    """Repeat the queries' mask for each of *share* heads: `[R, 1, share * Q, L]`."""
    return mask_RQL.unsqueeze(1).expand(-1, share, -1, -1).flatten(1, 2).unsqueeze(1)


def explicit_attention(
    query_RGMD: torch.Tensor,
    key_RGLD: torch.Tensor,
    value_RGLE: torch.Tensor,
    mask_R1ML: torch.Tensor | None,
    options: Options,
) -> torch.Tensor:
    """Attention with a soft cap on scores or with sinks, softmax in fp32; return `[R, G, M, value_size]`."""
    scores = torch.matmul(query_RGMD, key_RGLD.transpose(-1, -2)).float() * options.scaling
    if options.softcap:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask_R1ML is not None:
        scores = scores + mask_R1ML
    if options.sinks_H is None:
        return torch.matmul(torch.softmax(scores, -1).to(value_RGLE.dtype), value_RGLE)
    groups, queries = scores.shape[1:3]
    share = options.sinks_H.numel() // groups
    sinks_G1M1 = options.sinks_H.float().view(groups, share, 1).expand(-1, -1, queries // share).reshape(groups, -1, 1)
    with_sinks = torch.cat([scores, sinks_G1M1.expand(scores.shape[0], -1, -1, -1)], -1)
    weights = torch.softmax(with_sinks, -1)[..., :-1]
    return torch.matmul(weights.to(value_RGLE.dtype), value_RGLE)
