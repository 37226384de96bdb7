"""Attention over plans on the device, in torch and in Triton, equals `TorchAttention` over the same rows."""

from typing import Any

import numpy as np
import pytest
import torch

from protos.layers import LayerShape
from workers.attention.backend import Options
from workers.attention.batch import AttentionMetadata, Batch, TreeMask, TreeMasks
from workers.attention.kv import KVCache
from workers.attention.torch import TorchAttention
from workers.gpu.attention import TritonAttention
from workers.gpu.attention_torch import StaticTorchAttention
from workers.gpu.metadata import DeviceMetadata

BLOCK, BLOCKS, HEADS, GROUPS, SIZE = 4, 24, 4, 2, 8
TABLES_SB = np.array([[5, 2, 9, 11, 20, 21], [1, 7, 3, 4, 22, 23], [13, 6, 8, 10, 14, 15]], np.int32)


def cache(seed: int) -> KVCache:
    made = KVCache((LayerShape(GROUPS, SIZE, SIZE),), BLOCKS, BLOCK, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    for pages in (*made.keys, *made.values):
        pages.normal_(generator=generator)
    return made


def on_device(
    metadata: AttentionMetadata, stride: int, padding: int, first_padding: int | None = None
) -> tuple[DeviceMetadata, torch.Tensor]:
    """Lay rows out at a *stride*, with *padding* rows from *first_padding* on, after all others if it is None.

    Return the flat index of every real token, too.
    """
    count = len(metadata.starts_R)
    rows = count + padding
    first = count if first_padding is None else first_padding
    real_R = np.array([*range(first), *range(first + padding, rows)])

    def ints(values: Any, fill: int, dtype: Any) -> torch.Tensor:
        whole = np.full((rows, *np.shape(values)[1:]), fill, dtype)
        whole[real_R] = values
        return torch.from_numpy(whole)

    within = [np.arange(length) + r * stride for r, length in zip(real_R, metadata.lengths_R.tolist(), strict=True)]
    real_T = np.concatenate(within)
    rows_T, index_T = np.full(rows * stride, -1, np.int32), np.full(rows * stride, -1, np.int64)
    rows_T[real_T] = np.repeat(real_R, metadata.lengths_R)
    index_T[real_T] = metadata.cache_index_T
    masks = metadata.tree_masks
    words_TW = np.zeros((rows * stride, 1 if masks is None else masks.visible_TW.shape[1]), np.int64)
    if masks is not None:
        words_TW[real_T] = masks.visible_TW.view(np.int64)
    valid_R = np.zeros(count, np.int64) if metadata.first_valid_R is None else metadata.first_valid_R
    found = DeviceMetadata(
        starts_R=ints(metadata.starts_R, 0, np.int32),
        lengths_R=ints(metadata.lengths_R, 0, np.int32),
        offsets_R=torch.arange(0, rows * stride, stride, dtype=torch.int32),
        tables_RB=ints(TABLES_SB[:count], 0, np.int32),
        rows_T=torch.from_numpy(rows_T),
        cache_index_T=torch.from_numpy(index_T),
        first_R=ints(metadata.first_covered_R, 0, np.int32),
        sizes_R=ints(np.zeros(count) if masks is None else masks.sizes_R, 0, np.int32),
        positions_RA=ints(np.zeros((count, 1)) if masks is None else masks.positions_RA, 0, np.int32),
        visible_TW=torch.from_numpy(words_TW),
        first_valid_R=ints(valid_R, 0, np.int32),
        block_size=BLOCK,
        max_length=stride,
        max_blocks=TABLES_SB.shape[1],
    )
    return found, torch.from_numpy(real_T)


def tree(first: int) -> TreeMask:
    """Return the mask of a tree of two branches after one known token, all fed at once."""
    return TreeMask(first, [first, first, first + 1, first + 1], [0b0001, 0b0010, 0b0101, 0b1010])


CASES: dict[str, dict[str, Any]] = {
    "one token": {"starts": [9, 0, 17], "lengths": [1, 1, 1]},
    "chains": {"starts": [9, 3, 17], "lengths": [4, 1, 3]},
    "gap": {"starts": [9, 8, 17], "lengths": [2, 1, 5], "first_valid": [0, 6, 3]},
    "trees": {"starts": [9, 3, 12], "lengths": [5, 5, 2], "trees": [10, 4, None]},
}
OPTIONS = {
    "plain": Options(0.4),
    "window": Options(0.4, window=6),
    "from the block": Options(0.4, window=5, window_from_block=True),
    "causal block": Options(0.4, causal_block=True),
    "softcap": Options(0.4, softcap=3.0),
    "sinks": Options(0.4, sinks_H=torch.linspace(-1.0, 1.0, HEADS)),
}


@pytest.mark.parametrize("backend", [StaticTorchAttention, TritonAttention])
@pytest.mark.parametrize("padding", [(0, None), (2, None), (2, 1)], ids=["none", "last", "in the middle"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_equals_the_ordinary_one(
    case: dict[str, Any],
    options: Options,
    padding: tuple[int, int | None],
    backend: type[StaticTorchAttention | TritonAttention],
) -> None:
    starts_R, lengths_R = np.array(case["starts"]), np.array(case["lengths"])
    masks = None
    if "trees" in case:
        chosen = [None if first is None else tree(first) for first in case["trees"]]
        masks = TreeMasks.of(chosen, starts_R + lengths_R, lengths_R)
    valid_R = np.array(case["first_valid"]) if "first_valid" in case else None
    count = int(lengths_R.sum())
    batch = Batch(np.arange(3), starts_R, lengths_R, np.zeros(count, np.int64), masks, valid_R)
    metadata = AttentionMetadata.of(batch, TABLES_SB, BLOCK)
    generator = torch.Generator().manual_seed(7)
    query, key, value = (torch.randn(1, heads, count, SIZE, generator=generator) for heads in (HEADS, GROUPS, GROUPS))
    ordinary, static = TorchAttention(cache(1)), backend(cache(1))
    ordinary.plan(metadata)
    expected = ordinary.attend(0, query, key, value, options)
    rows, real_T = on_device(metadata, 6, *padding)
    static.use(rows)
    spread = [each.new_full((1, each.shape[1], len(rows.rows_T), SIZE), 3.0) for each in (query, key, value)]
    for target, source in zip(spread, (query, key, value), strict=True):
        target[:, :, real_T] = source
    found = static.attend(0, spread[0], spread[1], spread[2], options)
    torch.testing.assert_close(found[:, real_T], expected, rtol=1e-5, atol=1e-5)
    assert not found[:, rows.rows_T < 0].any()
    for ours, theirs in zip(
        (*static.cache.keys, *static.cache.values), (*ordinary.cache.keys, *ordinary.cache.values), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_a_round_of_padding_alone_leaves_the_cache_as_it_is() -> None:
    static, before = StaticTorchAttention(cache(1)), cache(1)
    nothing = Batch(np.arange(1), np.zeros(1, np.int64), np.ones(1, np.int64), np.zeros(1, np.int64))
    rows, _ = on_device(AttentionMetadata.of(nothing, TABLES_SB, BLOCK), 1, 1)
    rows.rows_T.fill_(-1)
    rows.cache_index_T.fill_(-1)
    rows.lengths_R.fill_(0)
    static.use(rows)
    new = torch.ones(1, GROUPS, 2, SIZE)
    output = static.attend(0, torch.ones(1, HEADS, 2, SIZE), new, new, Options(1.0))
    assert not output.any()
    assert torch.equal(static.cache.keys[0], before.keys[0])


def test_what_another_sequence_left_never_reaches_a_row() -> None:
    static, clean = StaticTorchAttention(cache(1)), StaticTorchAttention(cache(1))
    static.cache.values[0][9, 3:].fill_(torch.nan)  # past the context of row 0
    static.cache.keys[0][20].fill_(torch.inf)
    batch = Batch(np.arange(3), np.array([9, 3, 5]), np.array([2, 1, 1]), np.zeros(4, np.int64))
    rows, real_T = on_device(AttentionMetadata.of(batch, TABLES_SB, BLOCK), 2, 0)
    new = torch.ones(1, GROUPS, 6, SIZE)
    outputs = []
    for attention in (static, clean):
        attention.use(rows)
        outputs.append(attention.attend(0, torch.ones(1, HEADS, 6, SIZE), new, new, Options(1.0))[:, real_T])
    assert torch.equal(*outputs)
