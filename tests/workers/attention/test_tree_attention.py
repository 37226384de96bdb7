"""Attention over drafts: kernel and torch against explicit masks, computed place by place in plain Python."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.draft import Draft
from protos.layers import LayerShape
from workers.attention.backend import AttentionBackend, Options
from workers.attention.batch import AttentionMetadata, TreeMask, TreeMasks
from workers.attention.kv import KVCache
from workers.attention.native import NativeAttention
from workers.attention.torch import TorchAttention
from workers.invariant.attention import InvariantAttention
from workers.invariant.attention_cuda import SplitAttention

BLOCK = 8
BACKENDS = (NativeAttention, TorchAttention, InvariantAttention, SplitAttention)
Shape = tuple[tuple[int, int], tuple[int, ...]]
SHAPES: list[Shape] = [((4, 2), (64, 64)), ((4, 4), (24, 16)), ((6, 1), (16, 16))]
"""Heads of queries and of K and V; sizes of keys and of values, and whether keys hold the values."""


@dataclass(frozen=True)
class OneRow:
    """A row that feeds *length* tokens from place *start*; there are no K and V before *first_valid*."""

    start: int
    length: int
    tree_mask: TreeMask | None = None
    first_valid: int = 0

    def position(self, place: int) -> int:
        mask = self.tree_mask
        return place if mask is None or place < mask.first else mask.positions[place - mask.first]

    def sees(self, query: int, key: int, options: Options) -> bool:
        """Whether the token at place *query* attends to the key at place *key*, by the rules one at a time."""
        window, position = options.window, self.position(query)
        if options.causal_block and self.position(key) > position:
            return False
        if options.window_from_block and self.tree_mask is not None:
            position = min(position, self.tree_mask.first)
        if key < self.first_valid or (window and position - self.position(key) >= window):
            return False
        if self.tree_mask is None or key < self.tree_mask.first:
            return key <= query
        since_end = self.start + self.length - query
        if since_end > len(self.tree_mask.visible):
            return False
        return bool(self.tree_mask.visible[-since_end] >> (key - self.tree_mask.first) & 1)


def rows_of(rows: list[OneRow]) -> AttentionMetadata:
    """The rows, their blocks scattered over the cache."""
    starts_R, lengths_R, first_valid_R = (
        np.array(part, np.int64)
        for part in zip(*((row.start, row.length, row.first_valid) for row in rows), strict=True)
    )
    width = int((starts_R + lengths_R).max()) // BLOCK + 1
    blocks_SB = np.random.default_rng(0).permutation(len(rows) * width).astype(np.int32).reshape(-1, width)
    tree_masks = None
    if any(row.tree_mask for row in rows):
        tree_masks = TreeMasks.of([row.tree_mask for row in rows], starts_R + lengths_R, lengths_R)
    offsets_R = np.cumsum(lengths_R) - lengths_R
    return AttentionMetadata(
        starts_R,
        lengths_R,
        offsets_R,
        np.arange(len(rows)),
        blocks_SB,
        BLOCK,
        tree_masks,
        first_valid_R if first_valid_R.any() else None,
    )


@st.composite
def tree_masks_after(draw: st.DrawFn, known: int) -> tuple[TreeMask, int]:
    """A mask after *known* tokens, and how many of its tokens are fed now: a tree, perhaps grown in two steps,
    or a block in which every token attends to random others."""
    size = draw(st.one_of(st.integers(1, 8), st.integers(30, 70)))
    dice = random.Random(draw(st.integers(0, 10_000)))
    fed = draw(st.integers(1, size))
    if draw(st.booleans()):
        draft = Draft((0,) * size, tuple(dice.randrange(-1, node) for node in range(size)))
        positions = [known - 1 + depth for depth in draft.depths()]
        return TreeMask(known, positions, draft.ancestor_masks()[size - fed :]), fed
    seen = [dice.getrandbits(size) | 1 << node for node in range(size - fed, size)]
    return TreeMask(known, [known + dice.randrange(size) for _ in range(size)], seen), fed


@st.composite
def rows(draw: st.DrawFn) -> OneRow:
    known = draw(st.integers(0, 70))
    kind = draw(st.sampled_from(["plain", "gap", "tree", "tree with a gap"]))
    first_valid = draw(st.integers(0, known)) if "gap" in kind else 0
    if "tree" not in kind:
        return OneRow(known, draw(st.integers(1, 20)), first_valid=first_valid)
    tree_mask, fed = draw(tree_masks_after(known))
    before = draw(st.integers(0, min(3, known - first_valid))) if fed == len(tree_mask.positions) else 0
    return OneRow(known + len(tree_mask.positions) - fed - before, fed + before, tree_mask, first_valid)


def filled(shape: LayerShape, num_blocks: int, dtype: torch.dtype = torch.float32) -> KVCache:
    made = KVCache((shape,), num_blocks, BLOCK, dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for pages in (*made.keys, *made.values):
        pages.copy_(torch.randn(pages.shape, generator=generator))
    return made


def normal(heads: int, tokens: int, size: int, seed: int) -> torch.Tensor:
    return torch.randn(1, tokens, heads, size, generator=torch.Generator().manual_seed(seed)).transpose(1, 2)


def dense(
    cache: KVCache, rows: AttentionMetadata, plain: list[OneRow], query: torch.Tensor, options: Options
) -> torch.Tensor:
    """Attend token by token, over visible places only; K and V are in *cache* already."""
    found = []
    for r, row in enumerate(plain):
        blocks = rows.blocks_SB[r]
        for query_place in range(row.start, row.start + row.length):
            places = [key for key in range(row.start + row.length) if row.sees(query_place, key, options)]
            at = torch.tensor([int(blocks[key // BLOCK]) * BLOCK + key % BLOCK for key in places])
            found.append(_one(cache, at, query[0, :, len(found)], options))
    return torch.stack(found).unsqueeze(0)


def _one(cache: KVCache, at_L: torch.Tensor, query_HD: torch.Tensor, options: Options) -> torch.Tensor:
    keys_LGD, values_LGE = (pages[0].flatten(0, 1)[at_L].double() for pages in (cache.keys, cache.values))
    share = query_HD.shape[0] // keys_LGD.shape[1]
    heads = []
    for head, query_D in enumerate(query_HD.double()):
        scores_L = keys_LGD[:, head // share] @ query_D * options.scaling
        if options.softcap:
            scores_L = (scores_L / options.softcap).tanh() * options.softcap
        sink = [] if options.sinks_H is None else [options.sinks_H[head].double().view(1)]
        weights_L = torch.cat([scores_L, *sink]).softmax(0)[: len(at_L)]
        heads.append(weights_L @ values_LGE[:, head // share])
    return torch.stack(heads).float()


def check_against_masks(  # noqa: PLR0917 - the drawn values
    backends: Sequence[type[AttentionBackend]],
    laid_out: AttentionMetadata,
    wanted_rows: list[OneRow],
    shape: Shape,
    layer_options: tuple[int, float, bool],
    block_options: tuple[bool, bool],
) -> None:
    """Compare backends with attention over the places that *wanted_rows* see.

    *shape*: query and K/V heads, and sizes of keys and values; *layer_options*: window, soft cap, and whether there are
    sinks.
    """
    (heads, kv_heads), sizes = shape
    window, softcap, has_sinks = layer_options
    tokens = int(laid_out.lengths_R.sum())
    query, key, value = (
        normal(heads, tokens, sizes[0], 0),
        normal(kv_heads, tokens, sizes[0], 1),
        normal(kv_heads, tokens, sizes[1], 2),
    )
    sinks_H = torch.linspace(-1, 1, heads) if has_sinks else None
    options = Options(sizes[0] ** -0.5, window, softcap, sinks_H, *block_options)
    for make in backends:
        cache = filled(LayerShape(kv_heads, *sizes), laid_out.blocks_SB.size)
        backend = make(cache)  # type: ignore[call-arg]
        backend.plan(laid_out)
        found = backend.attend(0, query, key, value, options)
        wanted = dense(cache, laid_out, wanted_rows, query, options)
        assert (found - wanted).abs().max() <= 1e-5 * max(1.0, wanted.abs().max().item()), make


@given(
    plain=st.lists(rows(), min_size=1, max_size=5),
    shape=st.sampled_from(SHAPES),
    layer_options=st.tuples(st.sampled_from([0, 1, 5, 40]), st.sampled_from([0.0, 5.0]), st.booleans()),
    block_options=st.tuples(st.booleans(), st.booleans()),
)
@settings(max_examples=30, deadline=None)
def test_kernel_torch_and_masks_spelt_out_agree(
    plain: list[OneRow],
    shape: Shape,
    layer_options: tuple[int, float, bool],
    block_options: tuple[bool, bool],
) -> None:
    check_against_masks(BACKENDS, rows_of(plain), plain, shape, layer_options, block_options)


def tree_row(parents: tuple[int, ...], known: int, first_valid: int = 0) -> OneRow:
    draft = Draft((0,) * len(parents), parents)
    tree_mask = TreeMask(known, [known - 1 + depth for depth in draft.depths()], draft.ancestor_masks())
    return OneRow(known - 1, len(parents) + 1, tree_mask, first_valid)


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_a_node_never_touches_what_is_beside_it(make: type[AttentionBackend], size: int, softcap: float) -> None:
    laid_out = rows_of([tree_row((-1, -1, 0, 1), 21, first_valid=5), OneRow(4, 1)])
    cache = filled(LayerShape(2, size, size), laid_out.blocks_SB.size)
    query, key, value = (normal(2, 6, size, seed) for seed in range(3))
    backend = make(cache)
    backend.plan(laid_out)
    wanted = backend.attend(0, query, key, value, Options(0.1, 0, softcap)).clone()
    gap = [int(laid_out.blocks_SB[0, 0]), slice(0, 5)]
    for pages in (cache.keys[0], cache.values[0]):
        pages[gap[0], gap[1]] = torch.nan
    for broken in (key, value):
        broken[:, :, 2] = torch.nan  # node 1, and so node 3
    found = backend.attend(0, query, key, value, Options(0.1, 0, softcap))
    for token in (0, 1, 3, 5):
        assert torch.allclose(found[:, token], wanted[:, token], atol=1e-6), token
    assert torch.isnan(found[:, [2, 4]]).all()


def test_rows_without_an_area_are_computed_as_if_alone() -> None:
    cache = filled(LayerShape(2, 64, 64), 64)
    alone = rows_of([OneRow(0, 1), OneRow(33, 4)])
    together = rows_of([OneRow(0, 1), OneRow(33, 4), tree_row((-1, 0, 0), 12)])
    together.blocks_SB[:2, : alone.blocks_SB.shape[1]] = alone.blocks_SB
    together.blocks_SB[2] = np.arange(40, 40 + together.blocks_SB.shape[1])
    query, key, value = (normal(2, 9, 64, seed) for seed in range(3))
    found = []
    for laid_out, tokens in ((alone, 5), (together, 9)):
        backend = NativeAttention(cache)
        backend.plan(laid_out)
        found.append(backend.attend(0, query[:, :, :tokens], key[:, :, :tokens], value[:, :, :tokens], Options(0.1)))
    assert torch.equal(found[0], found[1][:, :5])


def test_a_mask_of_one_token_may_have_any_number_of_words() -> None:
    size = 200
    tree_mask = TreeMask(3, [3] * size, [1 << size - 1 | 1 << 130 | 1])
    laid_out = rows_of([OneRow(3 + size - 1, 1, tree_mask)])
    assert laid_out.tree_masks is not None
    seen = laid_out.visible(np.array([0]), np.array([[0]]), np.arange(3 + size)[None])
    assert np.flatnonzero(seen).tolist() == [0, 1, 2, 3, 133, 202]
    assert laid_out.tree_masks.visible_TW.shape == (1, math.ceil(size / 64))
