"""The paged-attention kernel, interpreted, against masks spelt out place by place and against torch."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.config.kv_window import KVWindow
from protos.layers import LayerShape
from tests.workers.attention.test_kv_window import WindowedRow
from tests.workers.attention.test_tree_attention import (
    BLOCK,
    SHAPES,
    OneRow,
    Shape,
    check_against_masks,
    filled,
    normal,
    rows,
    rows_of,
    tree_masks_after,
    tree_row,
)
from workers.attention.backend import Options
from workers.attention.batch import AttentionMetadata
from workers.attention.torch import TorchAttention
from workers.gpu.attention import TritonAttention, device_metadata
from workers.gpu.kernels import attention as kernels
from workers.gpu.kernels.splits import FIRST, first_place, num_splits
from workers.gpu.metadata import DeviceMetadata

HEAD_SIZES: list[Shape] = [
    ((4, 2), (64, 64)),
    ((7, 1), (128, 128)),
    ((2, 2), (192, 128)),
    ((4, 4), (80, 80)),
    ((2, 1), (256, 256)),
]
GROUPED: Shape = ((4, 2), (16, 16))
LATENTS: list[Shape] = [((4, 1), (16, 12, True)), ((20, 1), (288, 256, True)), ((6, 2), (448, 384, True))]
"""Values that are the first numbers of keys. The last ones lie in two tiles of these."""
CPU = torch.device("cpu")
IS_INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
pytestmark = pytest.mark.usefixtures("one_thread")


def attended(
    laid_out: AttentionMetadata, shape: Shape, options: Options, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Attend by the kernel and by torch, over the same cache."""
    (heads, kv_heads), sizes = shape
    tokens, found = int(laid_out.lengths_R.sum()), []
    for make in (TritonAttention, TorchAttention):
        backend = make(filled(LayerShape(kv_heads, *sizes), laid_out.blocks_SB.size, dtype))
        backend.plan(laid_out)
        states = (normal(heads, tokens, sizes[0], 0), normal(kv_heads, tokens, sizes[0], 1))
        states = (*states, normal(kv_heads, tokens, sizes[1], 2))
        found.append(backend.attend(0, *(state.to(dtype) for state in states), options))
    return tuple(found)


layer_options = st.tuples(st.sampled_from([0, 1, 5, 40]), st.sampled_from([0.0, 5.0]), st.booleans())
block_options = st.tuples(st.booleans(), st.booleans())
windows = st.builds(KVWindow, st.sampled_from([1, 3, 21, 100]), st.sampled_from([0, 1, 8, 13, 200]))


def check(
    plain: list[OneRow], shape: Shape, layer: tuple[int, float, bool], block: tuple[bool, bool], window: KVWindow | None
) -> None:
    laid_out = rows_of(plain)
    if window is not None:
        plain = [WindowedRow(row.start, row.length, row.tree_mask, row.first_valid, window) for row in plain]
        laid_out = replace(laid_out, kv_window=window)
    check_against_masks((TritonAttention,), laid_out, plain, shape, layer, block)


@given(
    plain=st.lists(rows(), min_size=1, max_size=3),
    shape=st.sampled_from(SHAPES + LATENTS[:1]),
    layer=layer_options,
    block=block_options,
    window=st.one_of(st.none(), windows),
)
@settings(max_examples=8, deadline=None, derandomize=True)
def test_the_kernel_sees_what_the_masks_say(
    plain: list[OneRow],
    shape: Shape,
    layer: tuple[int, float, bool],
    block: tuple[bool, bool],
    window: KVWindow | None,
) -> None:
    check(plain, shape, layer, block, window)


@pytest.mark.full
@given(
    plain=st.lists(rows(), min_size=1, max_size=5),
    shape=st.sampled_from(SHAPES + HEAD_SIZES + LATENTS),
    layer=layer_options,
    block=block_options,
    window=st.one_of(st.none(), windows),
)
@settings(max_examples=150, deadline=None)
def test_the_kernel_sees_what_the_masks_say_in_full(
    plain: list[OneRow],
    shape: Shape,
    layer: tuple[int, float, bool],
    block: tuple[bool, bool],
    window: KVWindow | None,
) -> None:
    check(plain, shape, layer, block, window)


@pytest.mark.parametrize("shape", HEAD_SIZES + LATENTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_as_torch(shape: Shape, dtype: torch.dtype) -> None:
    """Both round differently: the kernel keeps weights unnormalised."""
    laid_out = rows_of([OneRow(70, 1), tree_row((-1, 0, 0), 9)])
    found, wanted = attended(laid_out, shape, Options(shape[1][0] ** -0.5), dtype)
    exact = attended(laid_out, shape, Options(shape[1][0] ** -0.5), torch.float32)[1]
    error, limit = (found.float() - exact).abs().max(), (wanted.float() - exact).abs().max()
    assert error <= 2 * limit + 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize(("window", "shape"), [(0, GROUPED), (30, GROUPED), (0, LATENTS[0]), (0, LATENTS[1])])
def test_splits_and_one_program_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, window: int, shape: Shape) -> None:
    """Contexts of three splits; one row begins in the middle of its second."""
    laid_out = rows_of([OneRow(2 * FIRST + 9, 3), OneRow(FIRST + 20, 2, first_valid=FIRST + 3), OneRow(0, 1)])
    options = Options(shape[1][0] ** -0.5, window, sinks_H=torch.linspace(-1, 1, shape[0][0]))
    divided, wanted = attended(laid_out, shape, options, torch.float32)
    each = shape[0][0] * num_splits(laid_out.tables_RB.shape[1] * laid_out.block_size) * (shape[1][1] + 2) * 4
    for slots in (0, 2):  # the first row has more tokens than these
        monkeypatch.setattr(kernels, "MAX_WORKSPACE_BYTES", slots * 3 * each)
        whole, _ = attended(laid_out, shape, options, torch.float32)
        assert torch.equal(divided, whole)
    assert (divided - wanted).abs().max() < 1e-5


def test_chunks_and_short_rows_of_one_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The long row has one program for each tile, the short ones one for each split."""
    monkeypatch.setattr(kernels, "SHORT", 4)
    laid_out = rows_of([OneRow(FIRST + 9, 3), OneRow(11, 40), tree_row((-1, 0, 0), FIRST)])
    found, wanted = attended(laid_out, ((2, 2), (16, 16)), Options(0.3), torch.float32)
    assert (found - wanted).abs().max() < 1e-5


def test_a_row_does_not_depend_on_the_others() -> None:
    """Alone and in a batch with longer rows, other grids and trees: the same bits, when interpreted."""
    alone, beside = OneRow(FIRST + 40, 2), [tree_row((-1, 0, 0), 70), OneRow(0, 30)]
    together = rows_of([alone, *beside])
    laid_out = rows_of([alone])
    laid_out.blocks_SB[0] = together.blocks_SB[0, : laid_out.blocks_SB.shape[1]]
    cache = filled(LayerShape(2, 16, 16), together.blocks_SB.size)
    found = []
    for metadata in (laid_out, together):
        backend = TritonAttention(cache)
        backend.plan(metadata)
        tokens = int(metadata.lengths_R.sum())
        states = (normal(4, 36, 16, 0), normal(2, 36, 16, 1), normal(2, 36, 16, 2))
        found.append(backend.attend(0, *(state[:, :, :tokens] for state in states), Options(0.3)))
    alone_2HE, among_2HE = found[0][0], found[1][0, :2]
    # Tiles of other sizes add up products in another order on a GPU.
    assert torch.equal(alone_2HE, among_2HE) if IS_INTERPRETED else (alone_2HE - among_2HE).abs().max() < 1e-6


def padded(metadata: DeviceMetadata, rows: int, tokens: int) -> DeviceMetadata:
    """As buffers of a captured size, full of what must not be read."""

    def pad(tensor: torch.Tensor, size: int, value: int) -> torch.Tensor:
        return torch.cat((tensor, tensor.new_full((size, *tensor.shape[1:]), value)))

    by_row = {
        name: pad(getattr(metadata, name), rows, -(1 << 20))
        for name in ("starts_R", "tables_RB", "first_R", "sizes_R", "positions_RA", "first_valid_R")
    }
    return replace(
        metadata,
        **by_row,
        lengths_R=pad(metadata.lengths_R, rows, 0),
        offsets_R=pad(metadata.offsets_R, rows, len(metadata.rows_T)),
        rows_T=pad(metadata.rows_T, tokens, -1),
        cache_index_T=pad(metadata.cache_index_T, tokens, -1),
        visible_TW=pad(metadata.visible_TW, tokens, -1),
        max_length=metadata.max_length + 3,
        max_blocks=metadata.max_blocks + FIRST,
    )


@pytest.mark.parametrize("plain", [[OneRow(5, 1), OneRow(40, 1)], [OneRow(3, 20), tree_row((-1, -1, 1), 30)]])
def test_padding_changes_nothing_and_gets_zeros(plain: list[OneRow]) -> None:
    laid_out = rows_of(plain)
    tokens = int(laid_out.lengths_R.sum())
    states = [normal(heads, tokens + 3, 16, seed) for seed, heads in enumerate((4, 2, 2))]
    found, caches = [], []
    for pad in (False, True):
        backend = TritonAttention(filled(LayerShape(2, 16, 16), laid_out.blocks_SB.size))
        metadata = device_metadata(laid_out, CPU)
        backend.use(padded(metadata, 2, 3) if pad else metadata)
        found.append(backend.attend(0, *states, Options(0.3)))
        caches.append(torch.cat((backend.cache.keys[0], backend.cache.values[0])))
    assert torch.equal(found[0][:, :tokens], found[1][:, :tokens])
    assert not found[0][:, tokens:].any()
    assert not found[1][:, tokens:].any()
    assert torch.equal(*caches)


def test_only_what_a_window_holds_is_read() -> None:
    """Blocks between sinks and window have an id that no cache has: reading one ends the process."""
    laid_out = replace(rows_of([OneRow(20 * BLOCK, 2)]), kv_window=KVWindow(12, 3))
    wanted = attended(laid_out, ((2, 2), (16, 16)), Options(0.3), torch.float32)
    assert (wanted[0] - wanted[1]).abs().max() < 1e-5
    backend = TritonAttention(filled(LayerShape(2, 16, 16), laid_out.blocks_SB.size))
    laid_out.blocks_SB[0, 1:18] = 1 << 30
    backend.plan(laid_out)
    found = backend.attend(0, *(normal(2, 2, 16, seed) for seed in range(3)), Options(0.3))
    assert torch.equal(found, wanted[0])


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_a_broken_draft_token_reaches_only_its_descendants(softcap: float) -> None:
    laid_out = rows_of([tree_row((-1, -1, 0, 1), 21, first_valid=5), OneRow(4, 1)])
    backend = TritonAttention(filled(LayerShape(2, 24, 24), laid_out.blocks_SB.size))
    query, key, value = (normal(2, 6, 24, seed) for seed in range(3))
    backend.plan(laid_out)
    wanted = backend.attend(0, query, key, value, Options(0.1, 0, softcap))
    for pages in (backend.cache.keys[0], backend.cache.values[0]):
        pages[int(laid_out.blocks_SB[0, 0]), :5] = torch.nan
    for broken, number in ((key, torch.nan), (value, torch.inf)):
        broken[:, :, 2, 20] = number  # node 1, and so node 3
    found = backend.attend(0, query, key, value, Options(0.1, 0, softcap))
    kept = [0, 1, 3, 5]
    assert torch.equal(found[:, kept], wanted[:, kept])
    assert torch.isnan(found[:, [2, 4]]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_soft_caps_are_exact_for_small_scores(dtype: torch.dtype) -> None:
    """A difference of two numbers near 1 has an error of its own, which the cap would multiply by 50."""
    laid_out, shape = rows_of([OneRow(60, 3)]), ((4, 2), (16, 16))
    found, _ = attended(laid_out, shape, Options(0.01, 0, 50.0), dtype)
    exact, _ = attended(laid_out, shape, Options(0.01, 0, 0.0), dtype)
    close, _ = attended(laid_out, shape, Options(0.01, 0, 5e3), dtype)
    assert (close - exact).abs().max() <= 4 * torch.finfo(dtype).eps
    assert (found - exact).abs().max() <= 1e-4 + 4 * torch.finfo(dtype).eps


@pytest.mark.full
@given(mask=tree_masks_after(300), window=st.sampled_from([0, 40]), shape=st.sampled_from(HEAD_SIZES))
@settings(max_examples=30, deadline=None)
def test_trees_after_several_splits(mask: tuple[object, int], window: int, shape: Shape) -> None:
    tree_mask, fed = mask
    row = OneRow(300 + len(tree_mask.positions) - fed, fed, tree_mask)  # type: ignore[attr-defined, arg-type]
    check_against_masks((TritonAttention,), rows_of([row]), [row], shape, (window, 0.0, True), (False, False))


def test_an_fp8_cache_is_scaled() -> None:
    laid_out, generator = rows_of([OneRow(19, 2)]), torch.Generator().manual_seed(3)
    shape = (laid_out.blocks_SB.size, BLOCK, 2, 16)
    stored = [torch.randn(shape, generator=generator).to(torch.float8_e4m3fn) for _ in range(2)]
    query = torch.randn(4, 2, 16, generator=generator)
    metadata = device_metadata(laid_out, CPU)
    found = kernels.paged_attention(query, kernels.LayerPages(*stored, 0.5, 3.0), metadata, Options(0.2))
    pages = kernels.LayerPages(stored[0].float() * 0.5, stored[1].float() * 3.0)
    wanted = kernels.paged_attention(query, pages, metadata, Options(0.2))
    assert torch.allclose(found, wanted, atol=1e-5)


def test_splits_cover_every_place_once_and_grow() -> None:
    starts = [first_place(split) for split in range(60)]
    sizes = np.diff(starts)
    assert starts[0] == 0
    assert set(sizes.tolist()) == {FIRST << level for level in range(8)}
    assert (np.diff(sizes) >= 0).all()
    assert [num_splits(places) for places in (0, 1, FIRST, FIRST + 1, 1 << 17)] == [1, 1, 1, 2, 49]
