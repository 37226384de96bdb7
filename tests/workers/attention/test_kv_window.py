"""Windows with sinks: both backends against masks spelt out, and nothing outside is read, whatever the context."""

import multiprocessing
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.config.kv_window import KVWindow
from protos.layers import LayerShape
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
)
from workers.attention.backend import AttentionBackend, Options
from workers.attention.batch import AttentionMetadata
from workers.attention.native import NativeAttention
from workers.attention.row_groups import CHUNK
from workers.attention.torch import TorchAttention

BACKENDS = (NativeAttention, TorchAttention)
UNSEEN = KVWindow(1, 0)
NOWHERE = 1 << 30
"""The id of a block that no cache has: reading it ends the process, or raises."""


@dataclass(frozen=True)
class WindowedRow(OneRow):
    """A row of which only the window is read."""

    window: KVWindow = UNSEEN

    def sees(self, query: int, key: int, options: Options) -> bool:
        """As without a window, and the key is among the sinks or in the window, by positions."""
        age = self.position(query) - self.position(key)
        return super().sees(query, key, options) and (age < self.window.size or self.position(key) < self.window.sinks)


def attended(make: type[AttentionBackend], laid_out: AttentionMetadata, size: int, options: Options) -> torch.Tensor:
    """Attend with two heads over a filled cache."""
    tokens = int(laid_out.lengths_R.sum())
    backend = make(filled(LayerShape(2, size, size), laid_out.blocks_SB.size))  # type: ignore[call-arg]
    backend.plan(laid_out)
    return backend.attend(0, *(normal(2, tokens, size, seed) for seed in range(3)), options)


@given(
    plain=st.lists(rows(), min_size=1, max_size=5),
    window=st.builds(KVWindow, st.sampled_from([1, 3, 8, 21, 100]), st.sampled_from([0, 1, 4, 8, 13, 200])),
    shape=st.sampled_from(SHAPES),
    layer_options=st.tuples(st.sampled_from([0, 1, 5, 40]), st.sampled_from([0.0, 5.0]), st.booleans()),
    block_options=st.tuples(st.booleans(), st.booleans()),
)
@settings(max_examples=60, deadline=None)
def test_windows_are_masks(
    plain: list[OneRow],
    window: KVWindow,
    shape: Shape,
    layer_options: tuple[int, float, bool],
    block_options: tuple[bool, bool],
) -> None:
    windowed: list[OneRow] = [
        WindowedRow(row.start, row.length, row.tree_mask, row.first_valid, window) for row in plain
    ]
    laid_out = replace(rows_of(plain), kv_window=window)
    check_against_masks(BACKENDS, laid_out, windowed, shape, layer_options, block_options)


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("lengths", [(1, 1, 1), (3, CHUNK + 4, 1)])
def test_contexts_within_the_window_are_attended_as_without_one(
    make: type[AttentionBackend], lengths: tuple[int, ...]
) -> None:
    plain = rows_of([OneRow(before, fed) for before, fed in zip((60, 9, 0), lengths, strict=True)])
    windowed = replace(plain, kv_window=KVWindow(60, 4))
    assert torch.equal(*(attended(make, laid_out, 64, Options(0.1)) for laid_out in (plain, windowed)))


def far_rows(contexts: list[int], fed: int, window: KVWindow) -> AttentionMetadata:
    """Rows whose blocks outside of sinks and window do not exist."""
    laid_out = replace(rows_of([OneRow(context - fed, fed) for context in contexts]), kv_window=window)
    for row, context in enumerate(contexts):
        sinks, first = -(-window.sinks // BLOCK), (context - fed - window.size + 1) // BLOCK
        laid_out.blocks_SB[row, sinks:first] = NOWHERE
    named_RB = laid_out.blocks_SB < NOWHERE
    laid_out.blocks_SB[named_RB] = np.arange(named_RB.sum())
    return laid_out


def attend_far(make: type[AttentionBackend], fed: int) -> None:
    """Attend over long contexts of which few blocks exist."""
    window = KVWindow(20, 4)
    laid_out = far_rows([4000, 300, 150, 2345], fed, window)
    num_blocks = int((laid_out.blocks_SB < NOWHERE).sum())
    backend = make(filled(LayerShape(2, 64, 64), num_blocks))  # type: ignore[call-arg]
    backend.plan(laid_out)
    found = backend.attend(0, *(normal(2, 4 * fed, 64, seed) for seed in range(3)), Options(0.1))
    assert found.isfinite().all()


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("fed", [1, 3, CHUNK + 4])
def test_nothing_outside_sinks_and_window_is_read(make: type[AttentionBackend], fed: int) -> None:
    """In a process of its own, which reading elsewhere would end."""
    process = multiprocessing.get_context("spawn").Process(target=attend_far, args=(make, fed))
    process.start()
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize(("before", "blocks"), [(200, 1 + 4), (20_000, 1 + 4)])
def test_what_torch_gathers_does_not_grow_with_the_context(before: int, blocks: int) -> None:
    laid_out = replace(rows_of([OneRow(before, 1), OneRow(before - 3, 1)]), kv_window=KVWindow(3 * BLOCK, 4))
    backend = TorchAttention(filled(LayerShape(2, 24, 24), laid_out.blocks_SB.size))
    backend.plan(laid_out)
    assert [len(group.blocks_N) for group in backend._groups] == [2 * blocks]


def test_rows_of_different_contexts_are_gathered_together() -> None:
    laid_out = replace(rows_of([OneRow(before, 1) for before in (90, 500, 4000)]), kv_window=KVWindow(16, 4))
    backend = TorchAttention(filled(LayerShape(2, 24, 24), laid_out.blocks_SB.size))
    backend.plan(laid_out)
    assert len(backend._groups) == 1
