"""Paged attention in plain torch operators: any device, every option."""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from workers.attention.backend import Flags, Options, Rows
from workers.attention.batch import Ints
from workers.attention.kv import KVCache

CHUNK = 16
"""Rows that feed more tokens than this are attended one by one."""
PART = 1 << 21
"""Queries x keys of such a row that are attended at a time: scores and masks take memory for each, and each head."""


@dataclass
class RowGroup:
    """Rows attended together, padded to R rows x Q queries x L keys.

    Attributes:
        tokens_RQ: flat index of each query; padding repeats the row's last token. None: tokens are in order.
        real_N: of the queries in `tokens_RQ`, the ones that are not padding, flat; None where all are.
        targets_N: flat index of each real query; None as `tokens_RQ`.
        blocks_N: block ids to gather, R x L / block_size of them, flat.
        positions_RQ: position of each query.
        length: L, whole blocks for several rows, the exact context for one.
        stale_N: gathered places behind a row's context, or below what it has. They are zeroed: whatever another
            sequence left there must not reach this one, not even a NaN behind a mask.
        num_settled: places that every query of the group sees the same of. Behind them, keys and values of a guess
            that are not numbers must not reach the queries before it.
        sight: what each query sees; None where that is all up to its own position.
    """

    tokens_RQ: torch.Tensor | None
    real_N: torch.Tensor | None
    targets_N: torch.Tensor | None
    blocks_N: torch.Tensor
    positions_RQ: torch.Tensor
    length: int
    stale_N: torch.Tensor | None
    num_settled: int
    sight: "AttentionMask | None" = None
    masks: dict[tuple[int, int], torch.Tensor | None] = field(default_factory=dict)

    @property
    def parts(self) -> list[slice]:
        """The queries that are attended at a time; all of several rows'."""
        rows, queries = self.positions_RQ.shape
        step = queries if rows > 1 else max(1, PART // self.length)
        return [slice(first, min(first + step, queries)) for first in range(0, queries, step)]

    def mask_RQL(self, window: int, dtype: torch.dtype, part: slice) -> torch.Tensor | None:
        """Return the additive mask of some queries for *window*, made once a forward; None where every key is seen."""
        key = (window, part.start)
        if key not in self.masks:
            self.masks[key] = self._make_mask(window, dtype, part)
        return self.masks[key]

    def _make_mask(self, window: int, dtype: torch.dtype, part: slice) -> torch.Tensor | None:
        one_query_sees_all = self.positions_RQ.numel() == 1 and self.stale_N is None and self.sight is None
        if one_query_sees_all and not 0 < window < self.length:
            return None
        hidden_RQL = self._hidden(window, part)
        return torch.zeros(hidden_RQL.shape, dtype=dtype, device=hidden_RQL.device).masked_fill_(hidden_RQL, -torch.inf)

    def _hidden(self, window: int, part: slice) -> torch.Tensor:
        positions_RQ = self.positions_RQ[:, part]
        if self.sight is not None:
            return self.sight.hidden(positions_RQ, window, part)
        keys_L = torch.arange(self.length, device=self.positions_RQ.device)
        distance_RQL = positions_RQ.unsqueeze(-1) - keys_L
        hidden_RQL = distance_RQL < 0
        if window:
            hidden_RQL |= distance_RQL >= window
        return hidden_RQL


@dataclass(frozen=True)
class AttentionMask:
    """What queries see where places are not positions: `seen_RQL` aside from windows, `keys_RL` keys' positions."""

    seen_RQL: torch.Tensor
    keys_RL: torch.Tensor

    def hidden(self, positions_RQ: torch.Tensor, window: int, part: slice) -> torch.Tensor:
        """Return what the queries of a part, at these positions, do not see, `[R, Q, L]`."""
        unseen_RQL = ~self.seen_RQL[:, part]
        if not window:
            return unseen_RQL
        return unseen_RQL | (positions_RQ.unsqueeze(-1) - self.keys_RL.unsqueeze(1) >= window)


class TorchAttention:
    """Gathers each row's blocks and calls scaled-dot-product attention. Owns nothing but the plan of one forward."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.device = cache.keys[0].device
        self._places_T = torch.empty(0, dtype=torch.int64)
        self._groups: list[RowGroup] = []
        if self.device.type == "cuda":
            # cuDNN plans anew for every size, on the host and for good; with contexts that grow, that is every step.
            torch.backends.cuda.enable_cudnn_sdp(False)

    def plan(self, rows: Rows) -> None:
        """Group the rows, and make the index tensors that all layers share."""
        self._places_T = self._tensor(rows.places_T)
        self.plan_members(rows, np.arange(len(rows.starts_R)))

    def plan_members(self, rows: Rows, members: Ints) -> None:
        """Plan attention (not the write) for some of the rows only."""
        self._groups = [self._group(rows, group) for group in partition(rows, members)]

    def attend(
        self, layer: int, query_1HTD: torch.Tensor, key_1GTD: torch.Tensor, value_1GTE: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        self.write(layer, key_1GTD[0], value_1GTE[0])
        return self.attend_groups(layer, query_1HTD[0].transpose(0, 1), options).unsqueeze(0)

    def write(self, layer: int, key_GTD: torch.Tensor, value_GTE: torch.Tensor) -> None:
        """Put K and V of the forward's tokens into their places."""
        self.cache.keys[layer].flatten(0, 1).index_copy_(0, self._places_T, key_GTD.transpose(0, 1))
        self.cache.values[layer].flatten(0, 1).index_copy_(0, self._places_T, value_GTE.transpose(0, 1))

    def attend_groups(self, layer: int, query_THD: torch.Tensor, options: Options) -> torch.Tensor:
        """Attend over what stands in the cache; returns `[T, heads, value_size]`."""
        if len(self._groups) == 1 and self._groups[0].tokens_RQ is None:
            return self._attend(layer, query_THD, self._groups[0], options)
        output_THE = query_THD.new_empty(*query_THD.shape[:2], self.cache.shapes[layer].value_size)
        self.attend_groups_into(output_THE, layer, query_THD, options)
        return output_THE

    def attend_groups_into(
        self, output_THE: torch.Tensor, layer: int, query_THD: torch.Tensor, options: Options
    ) -> None:
        """Attend and put the results of the planned rows into *output_THE*, leaving others alone."""
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
        rows, queries = group.positions_RQ.shape
        key_RGLD = self._gather(self.cache.keys[layer], group)
        value_RGLE = self._gather(self.cache.values[layer], group)
        broken_RGL = None
        if group.num_settled < group.length:
            new = slice(group.num_settled, None)
            broken_RGL = without_broken_(key_RGLD[:, :, new], value_RGLE[:, :, new])
        query_RQGSD = query_NHD.reshape(rows, queries, shape.kv_heads, -1, shape.key_size)
        found = []
        for part in group.parts:
            found.append(
                _attend_part(
                    query_RQGSD[:, part],
                    key_RGLD,
                    value_RGLE,
                    options,
                    broken_RGN=broken_RGL,
                    mask_RQL=group.mask_RQL(options.window, query_NHD.dtype, part),
                )
            )
        return torch.cat(found, 1).reshape(rows * queries, -1, shape.value_size)

    def _gather(self, pages: torch.Tensor, group: RowGroup) -> torch.Tensor:
        """Return the group's keys or values, `[R, kv_heads, L, size]`."""
        gathered = pages.index_select(0, group.blocks_N)  # a copy, which may be changed
        if group.stale_N is not None:
            gathered.flatten(0, 1).index_fill_(0, group.stale_N, 0)
        rows = group.positions_RQ.shape[0]
        return gathered.view(rows, -1, *pages.shape[2:])[:, : group.length].transpose(1, 2)

    def _group(self, rows: Rows, members: Ints) -> RowGroup:
        starts_R, lengths_R = rows.starts_R[members], rows.lengths_R[members]
        contexts_R = starts_R + lengths_R
        block_size = self.cache.block_size
        num_blocks = -(-int(contexts_R.max()) // block_size)
        queries_Q = np.minimum(np.arange(int(lengths_R.max())), lengths_R[:, None] - 1)
        several = len(members) > 1
        length = num_blocks * block_size if several else int(contexts_R[0])
        stale_N = _stale(rows, members, length) if several or rows.lowest_R is not None else None
        in_order = len(members) == len(rows.starts_R) and bool((lengths_R == lengths_R[0]).all())
        in_order = in_order and bool((np.diff(members) == 1).all())
        real = np.arange(queries_Q.shape[1]) < lengths_R[:, None]
        tokens_RQ = queries_Q + rows.offsets_R[members][:, None]
        is_special = rows.special_R is not None and bool(rows.special_R[members[0]])
        return RowGroup(
            tokens_RQ=None if in_order else self._tensor(tokens_RQ),
            real_N=None if real.all() else self._tensor(np.flatnonzero(real)),
            targets_N=None if in_order else self._tensor(tokens_RQ[real]),
            blocks_N=self._tensor(rows.tables_RB[members, :num_blocks].reshape(-1)),
            positions_RQ=self._tensor(rows.positions(members, queries_Q + starts_R[:, None])),
            length=length,
            stale_N=None if stale_N is None else self._tensor(stale_N),
            num_settled=0 if is_special else length if queries_Q.shape[1] == 1 else int(starts_R.min()) + 1,
            sight=self._sight(rows, members, queries_Q, length) if is_special else None,
        )

    def _sight(self, rows: Rows, members: Ints, queries_RQ: Ints, length: int) -> AttentionMask:
        keys_RL = rows.positions(members, np.tile(np.arange(length), (len(members), 1)))
        return AttentionMask(self._tensor(rows.seen(members, queries_RQ, length)), self._tensor(keys_RL))

    def _tensor(self, array: Ints | Flags) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)


def partition(rows: Rows, members: Ints) -> list[Ints]:
    """Split rows into groups worth padding to a common shape: long chunks alone, others by similar context.

    Rows that do not simply see all up to their own place are never together with those that do.
    """
    if rows.special_R is None:
        return _alike(rows, members)
    special_M = rows.special_R[members]
    return [group for part in (members[~special_M], members[special_M]) if len(part) for group in _alike(rows, part)]


def _alike(rows: Rows, members: Ints) -> list[Ints]:
    if len(members) == 1:
        return [members]
    contexts_R = rows.starts_R + rows.lengths_R
    groups = [members[i : i + 1] for i in np.flatnonzero(rows.lengths_R[members] > CHUNK)]
    short = members[rows.lengths_R[members] <= CHUNK]
    while len(short):
        # A group reaches down to half of its longest context: padding at most doubles the work.
        longest = contexts_R[short].max()
        together = (contexts_R[short] * 2 >= longest) | (longest <= 4 * CHUNK)
        groups.append(short[together])
        short = short[~together]
    return groups


def _stale(rows: Rows, members: Ints, length: int) -> Ints:
    """Return the gathered places that are not the rows' own: behind their context, or below the lowest they have."""
    places_L, contexts_R = np.arange(length), (rows.starts_R + rows.lengths_R)[members]
    stale_RL = places_L >= contexts_R[:, None]
    if rows.lowest_R is not None:
        stale_RL |= places_L < rows.lowest_R[members][:, None]
    return np.flatnonzero(stale_RL)


def without_broken_(key_RGLD: torch.Tensor, value_RGLE: torch.Tensor) -> torch.Tensor:
    """Zero keys and values that are not numbers, in place; return which these were, `[R, G, L]`.

    A mask is added to scores and multiplies values, so it would let a NaN through to those that must not see it.
    """
    broken_RGL = ~(key_RGLD.isfinite().all(-1) & value_RGLE.isfinite().all(-1))
    key_RGLD.masked_fill_(broken_RGL.unsqueeze(-1), 0)
    value_RGLE.masked_fill_(broken_RGL.unsqueeze(-1), 0)
    return broken_RGL


def _attend_part(
    query_RQGSD: torch.Tensor,
    key_RGLD: torch.Tensor,
    value_RGLE: torch.Tensor,
    options: Options,
    *,
    mask_RQL: torch.Tensor | None,
    broken_RGN: torch.Tensor | None,
) -> torch.Tensor:
    """Attend for some queries; returns `[R, Q, G, S, value_size]`. Of the last N keys, some were *broken_RGN*."""
    rows, queries, groups, share, _ = query_RQGSD.shape
    # The query heads that share a K/V head become queries of that head.
    query_RGMD = query_RQGSD.permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask_R1ML = None if mask_RQL is None else _repeat(mask_RQL, share)
    if options.softcap or options.sinks_H is not None:
        output_RGME = explicit_attention(query_RGMD, key_RGLD, value_RGLE, mask_R1ML, options)
    else:
        output_RGME = F.scaled_dot_product_attention(
            query_RGMD, key_RGLD, value_RGLE, attn_mask=mask_R1ML, scale=options.scaling
        )
    if broken_RGN is not None and mask_R1ML is not None:
        is_seen_R1MN = mask_R1ML[..., -broken_RGN.shape[-1] :] == 0
        sees_broken_RGM1 = (broken_RGN.unsqueeze(2) & is_seen_R1MN).any(-1, keepdim=True)
        output_RGME = output_RGME.masked_fill(sees_broken_RGM1, torch.nan)
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
    """Attention with a soft cap on the scores or sinks, softmax in fp32; returns `[R, G, M, value_size]`."""
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
