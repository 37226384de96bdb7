"""8-bit K and V: what is stored, what is read of it, and attention over it against explicit attention."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.layers import LayerShape
from tests.workers.attention.test_tree_attention import (
    BACKENDS,
    BLOCK,
    SHAPES,
    OneRow,
    Shape,
    dense,
    normal,
    rows,
    rows_of,
    tree_row,
)
from workers.attention.backend import Options
from workers.attention.kv import KVCache, Pages, bytes_per_block
from workers.attention.native import NativeAttention
from workers.attention.quantized_kv import LARGEST, dequantize, quantize

CPU = torch.device("cpu")
STORED = (torch.int8, torch.float8_e4m3fn, torch.bfloat16)
QUANTIZED = tuple(LARGEST)
LARGEST_ERROR = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 16 / 448}
"""Half a step at the largest number, relative to it. In E4M3 the numbers from 256 to 448 are 32 apart."""


def cache_of(shape: LayerShape, num_blocks: int, stored: torch.dtype) -> KVCache:
    """A cache that is full of random numbers of very different sizes."""
    made = KVCache((shape,), num_blocks, BLOCK, stored, CPU)
    tokens = num_blocks * BLOCK
    key, value = (_various(tokens, shape.kv_heads, size, seed=size) for size in (shape.key_size, shape.value_size))
    made.write(0, torch.arange(tokens), key, value)
    return made


def _various(tokens: int, heads: int, size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(tokens, heads, 1, generator=generator) * 2 - 1
    return torch.randn(tokens, heads, size, generator=generator) * 2**sizes


def as_fp32(cache: KVCache) -> KVCache:
    """The same cache with dequantised numbers."""
    plain = KVCache(cache.shapes, cache.num_blocks, cache.block_size, torch.float32, CPU)
    every = torch.arange(cache.num_blocks)
    for mine, its in zip((*plain.keys, *plain.values), (*cache.key_pages, *cache.value_pages), strict=True):
        mine.copy_(its.blocks(every, torch.float32))
    return plain


def bits(pages: Pages) -> list[bytes]:
    """Everything that is stored; NaN has several bit patterns, which are all alike."""
    parts = [pages.stored]
    if pages.scales is not None:
        parts.append(pages.scales.masked_fill(pages.scales.isnan(), -1.0))
    return [part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts]


@given(
    plain=st.lists(rows(), min_size=1, max_size=4),
    shape=st.sampled_from([*SHAPES, ((4, 1), (128, 128))]),
    stored=st.sampled_from(STORED),
    layer_options=st.tuples(st.sampled_from([0, 5, 40]), st.sampled_from([0.0, 5.0]), st.booleans()),
    block_options=st.tuples(st.booleans(), st.booleans()),
)
@settings(max_examples=20, deadline=None)
def test_every_backend_attends_over_what_is_stored(
    plain: list[OneRow],
    shape: Shape,
    stored: torch.dtype,
    layer_options: tuple[int, float, bool],
    block_options: tuple[bool, bool],
) -> None:
    """All store the same bits, and attend over the numbers that these stand for, in masks of every kind."""
    (heads, kv_heads), sizes = shape
    laid_out = rows_of(plain)
    tokens = int(laid_out.lengths_R.sum())
    query, key, value = (
        normal(count, tokens, size, seed)
        for seed, (count, size) in enumerate(((heads, sizes[0]), (kv_heads, sizes[0]), (kv_heads, sizes[1])))
    )
    window, softcap, has_sinks = layer_options
    sinks_H = torch.linspace(-1, 1, heads) if has_sinks else None
    options = Options(sizes[0] ** -0.5, window, softcap, sinks_H, *block_options)
    written = []
    for make in BACKENDS:
        cache = cache_of(LayerShape(kv_heads, *sizes), laid_out.blocks_SB.size, stored)
        backend = make(cache)  # type: ignore[call-arg]
        backend.plan(laid_out)
        found = backend.attend(0, query, key, value, options)
        wanted = dense(as_fp32(cache), laid_out, plain, query, options)
        assert (found - wanted).abs().max() <= 2e-5 * max(1.0, wanted.abs().max().item()), make
        written.append(bits(cache.key_pages[0]) + bits(cache.value_pages[0]))
    assert all(one == written[0] for one in written)


@pytest.mark.parametrize("stored", QUANTIZED)
@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [24, 64, 100])
def test_kernel_and_torch_store_the_same_bits(stored: torch.dtype, computed: torch.dtype, size: int) -> None:
    """Zeros, ties, subnormal and huge numbers, NaN and infinity included."""
    tokens = 40
    key = _various(tokens, 2, size, seed=3)
    key[0] = 0
    key[1, :, 0], key[1, :, 1:] = 127, torch.arange(size - 1) / 2  # the scale is 1: halves are ties
    key[2, :, 0], key[2, :, 1:] = 448, torch.arange(size - 1) * 2.0**-10
    key[3], key[4] = key[3] * 1e-30, key[4] * 1e30
    key[5, 0, 3], key[6, 1, 2], key[7, 0, 0] = torch.nan, torch.inf, -torch.inf
    key = key.to(computed)
    laid_out = rows_of([OneRow(0, tokens)])
    cache = KVCache((LayerShape(2, size, size),), laid_out.blocks_SB.size, BLOCK, stored, CPU)
    expected = KVCache((LayerShape(2, size, size),), laid_out.blocks_SB.size, BLOCK, stored, CPU)
    expected.write(0, torch.from_numpy(laid_out.cache_index_T), key, key)
    new = key.unsqueeze(0).transpose(1, 2)
    backend = NativeAttention(cache)
    backend.plan(laid_out)
    backend.attend(0, normal(2, tokens, size, 0).to(computed), new, new, Options(0.1))
    assert bits(cache.key_pages[0]) == bits(expected.key_pages[0]) == bits(cache.value_pages[0])


@pytest.mark.parametrize("stored", QUANTIZED)
def test_errors_are_half_a_step(stored: torch.dtype) -> None:
    numbers_NX = _various(500, 4, 64, seed=1)
    found = quantize(numbers_NX, stored)
    largest_N1 = numbers_NX.abs().amax(-1, keepdim=True)
    error_NX = (dequantize(*found, torch.float32) - numbers_NX).abs()
    # A scale in bf16 is rounded up by less than 1 in 128.
    assert (error_NX <= largest_N1 * LARGEST_ERROR[stored] * (1 + 1 / 128)).all()
    assert found.stored.float().abs().max() == LARGEST[stored]


@pytest.mark.parametrize("stored", QUANTIZED)
def test_a_token_is_stored_alone(stored: torch.dtype) -> None:
    """What is stored of it depends on no other token that is written with it."""
    numbers_TGX = _various(32, 2, 64, seed=5)
    together = quantize(numbers_TGX, stored)
    for at in range(32):
        alone = quantize(numbers_TGX[at : at + 1], stored)
        assert torch.equal(alone.stored[0].view(torch.uint8), together.stored[at].view(torch.uint8))
        assert torch.equal(alone.scales[0], together.scales[at])


@pytest.mark.parametrize("stored", STORED)
def test_moves_take_scales_along(stored: torch.dtype) -> None:
    cache = cache_of(LayerShape(2, 16, 24), 6, stored)
    pages = (cache.key_pages[0], cache.value_pages[0])
    every = torch.arange(6 * BLOCK)
    before = [part.tokens(every, torch.float32) for part in pages]
    moves = np.array([[3, 40], [40, 3], [11, 12]])
    cache.move(moves)
    for part, old in zip(pages, before, strict=True):
        wanted = old.clone()
        wanted[moves[:, 1]] = old[moves[:, 0]]
        assert torch.equal(part.tokens(every, torch.float32), wanted)


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("stored", QUANTIZED)
@pytest.mark.parametrize("size", [16, 64])
def test_broken_tokens_stay_where_they_are(make: type[NativeAttention], stored: torch.dtype, size: int) -> None:
    """NaN in K or V reaches the queries that attend to it, and no others."""
    laid_out = rows_of([tree_row((-1, -1, 0, 1), 21), OneRow(4, 1)])
    query, key, value = (normal(2, 6, size, seed) for seed in range(3))
    backend = make(cache_of(LayerShape(2, size, size), laid_out.blocks_SB.size, stored))
    backend.plan(laid_out)
    wanted = backend.attend(0, query, key, value, Options(0.1)).clone()
    for broken in (key, value):
        broken[:, :, 2, 0] = torch.nan  # node 1, and so node 3
    found = backend.attend(0, query, key, value, Options(0.1))
    for token in (0, 1, 3, 5):
        assert torch.allclose(found[:, token], wanted[:, token], atol=1e-6), token
    assert torch.isnan(found[:, [2, 4]]).all()


@pytest.mark.parametrize(("size", "times"), [(64, 1.93), (128, 1.96)])
def test_blocks_in_the_same_memory(size: int, times: float) -> None:
    """A scale of two bytes for each head of K and of V."""
    shapes = [LayerShape(8, size, size)] * 32
    bf16 = bytes_per_block(shapes, 16, torch.bfloat16)
    for stored in QUANTIZED:
        assert bytes_per_block(shapes, 16, stored) == 16 * 32 * 8 * 2 * (size + 2)
        assert bf16 / bytes_per_block(shapes, 16, stored) >= times
        allocated = KVCache(shapes, 3, 16, stored, CPU)
        every = (*allocated.key_pages, *allocated.value_pages)
        held = sum(part.stored.nbytes + (0 if part.scales is None else part.scales.nbytes) for part in every)
        assert held == 3 * bytes_per_block(shapes, 16, stored)
