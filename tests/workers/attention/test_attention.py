"""The native attention kernel against attention in torch: sizes, windows, caps, sinks, ragged chunks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.layers import LayerShape
from workers.attention import row_groups
from workers.attention.backend import Options
from workers.attention.batch import AttentionMetadata
from workers.attention.kv import KVCache
from workers.attention.native import NativeAttention
from workers.attention.row_groups import CHUNK
from workers.attention.torch import TorchAttention

BLOCK = 16
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def cache(shape: LayerShape, num_blocks: int, dtype: torch.dtype) -> KVCache:
    made = KVCache((shape,), num_blocks, BLOCK, dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for pages in (*made.keys, *made.values):
        pages.copy_(torch.randn(pages.shape, generator=generator))
    return made


def rows_of(lengths: list[tuple[int, int]]) -> AttentionMetadata:
    """Rows of (tokens before, tokens fed), their blocks scattered over the cache."""
    before_R, fed_R = (np.array(part, np.int64) for part in zip(*lengths, strict=True))
    width = int((before_R + fed_R).max()) // BLOCK + 1
    blocks_SB = np.random.default_rng(0).permutation(len(lengths) * width).astype(np.int32).reshape(-1, width)
    return AttentionMetadata(before_R, fed_R, np.cumsum(fed_R) - fed_R, np.arange(len(lengths)), blocks_SB, BLOCK)


def normal(heads: int, tokens: int, size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random `[1, heads, tokens, size]`, with strides as in models: token-major."""
    values = torch.randn(1, tokens, heads, size, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(
    size=st.sampled_from([(64, 64), (128, 128), (24, 24), (48, 32)]),
    heads=st.sampled_from([(8, 4), (4, 4), (6, 1), (1, 1)]),
    lengths=st.lists(st.tuples(st.integers(0, 150), st.integers(1, CHUNK)), min_size=1, max_size=9),
    layer_options=st.tuples(st.sampled_from([0, 1, 20, 100]), st.sampled_from([0.0, 5.0]), st.booleans()),
)
@settings(max_examples=60, deadline=None)
def test_kernel_equals_torch(
    dtype: torch.dtype,
    size: tuple[int, int],
    heads: tuple[int, int],
    lengths: list[tuple[int, int]],
    layer_options: tuple[int, float, bool],
) -> None:
    window, softcap, has_sinks = layer_options
    rows = rows_of(lengths)
    shape = LayerShape(heads[1], *size)
    tokens = int(rows.lengths_R.sum())
    query, key, value = (
        normal(count, tokens, width, dtype, seed)
        for seed, (count, width) in enumerate(((heads[0], size[0]), (heads[1], size[0]), (heads[1], size[1])))
    )
    options = Options(size[0] ** -0.5, window, softcap, torch.linspace(-1, 1, heads[0]) if has_sinks else None)
    found = []
    for backend in (NativeAttention, TorchAttention):
        pages = cache(shape, rows.blocks_SB.size, dtype)
        attention = backend(pages)
        attention.plan(rows)
        found.append(attention.attend(0, query, key, value, options).float())
    assert (found[0] - found[1]).abs().max() <= TOLERANCE[dtype] * max(1.0, found[1].abs().max().item())


@pytest.mark.parametrize("layer_options", [(0, 0.0, False), (20, 0.0, False), (0, 5.0, True)])
@pytest.mark.parametrize("is_broken", [False, True])
def test_long_rows_are_attended_in_parts(
    layer_options: tuple[int, float, bool], is_broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    window, softcap, has_sinks = layer_options
    rows = rows_of([(30, 40), (5, 3), (0, 1), (64, 33)])
    query, key, value = (normal(4, 77, 24, torch.float32, seed) for seed in range(3))
    if is_broken:
        key[:, :, 20], value[:, :, 70] = torch.nan, torch.inf
    options = Options(0.2, window, softcap, torch.linspace(-1, 1, 4) if has_sinks else None)
    found = []
    for max_scores in (row_groups.MAX_SCORES, 300):
        monkeypatch.setattr(row_groups, "MAX_SCORES", max_scores)
        attention = TorchAttention(cache(LayerShape(4, 24, 24), rows.blocks_SB.size, torch.float32))
        attention.plan(rows)
        found.append(attention.attend(0, query, key, value, options))
    assert max(len(group.query_slices) for group in attention._groups) == 11
    assert found[0].isnan().any() == is_broken
    assert torch.allclose(found[0], found[1], atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("size", [24, 64])
@pytest.mark.parametrize("backend", [NativeAttention, TorchAttention])
@pytest.mark.parametrize("starts", [(30, 0), (200, 120), (0, 70)])
def test_a_query_never_touches_what_comes_after_it(
    backend: type[NativeAttention | TorchAttention], size: int, starts: tuple[int, int]
) -> None:
    rows = rows_of([(starts[0], 6), (starts[1], 3)])
    query, key, value = (normal(4, 9, size, torch.float32, seed) for seed in range(3))
    attention = backend(cache(LayerShape(4, size, size), rows.blocks_SB.size, torch.float32))
    attention.plan(rows)
    expected = attention.attend(0, query, key, value, Options(0.1)).clone()
    for broken in (key, value):
        broken[:, :, 4:6] = torch.nan  # the last two tokens of the first row
    found = attention.attend(0, query, key, value, Options(0.1))
    assert torch.equal(found[:, :4], expected[:, :4])
    assert torch.equal(found[:, 6:], expected[:, 6:])
    assert torch.isnan(found[:, 4:6]).all()
