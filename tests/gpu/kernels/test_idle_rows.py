"""Rows that feed nothing may lie between others, as in graphs of drafts, and nothing is written beside the outputs."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from protos.layers import LayerShape
from tests.gpu.kernels.test_attention import CPU, GROUPED, IS_INTERPRETED, LATENTS
from tests.workers.attention.test_tree_attention import OneRow, Shape, filled, normal, rows_of
from workers.attention.backend import Options
from workers.gpu.attention import TritonAttention, device_metadata
from workers.gpu.kernels import attention as kernels
from workers.gpu.kernels.splits import FIRST

pytestmark = pytest.mark.usefixtures("one_thread")

GUARD = 1 << 14


def watched_memory(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, int]]:
    """Surround memory that is allocated from now on by sevens; return it, with the number of elements between them."""
    made, plain = list[tuple[torch.Tensor, int]](), torch.Tensor.new_empty

    def new_empty(tensor: torch.Tensor, size: Any, dtype: torch.dtype | None = None, **others: Any) -> torch.Tensor:
        if others:  # asked by the interpreter
            return plain(tensor, size, dtype=dtype, **others)
        count = math.prod(size)
        whole = torch.full((count + 2 * GUARD,), 7.0, dtype=dtype or tensor.dtype)
        made.append((whole, count))
        return whole[GUARD : GUARD + count].view(size)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    return made


@pytest.mark.parametrize("is_divided", [True, False])
@pytest.mark.parametrize("shape", [GROUPED, LATENTS[1]])
def test_rows_that_feed_nothing_lie_between_others(
    monkeypatch: pytest.MonkeyPatch, shape: Shape, is_divided: bool
) -> None:
    """As where drafts catch up: a row has six places, of which it feeds the last ones. Two wide heads fill a tile."""
    (heads, kv_heads), sizes = shape
    feeding = {1: OneRow(FIRST + 9, 2), 3: OneRow(2 * FIRST + 40, 5), 4: OneRow(7, 1)}
    packed = rows_of(list(feeding.values()))
    metadata = device_metadata(packed, CPU)
    lengths_R = torch.zeros(6, dtype=torch.int32)
    lengths_R[list(feeding)] = metadata.lengths_R
    offsets_R = torch.arange(6, dtype=torch.int32) * 6 + 6 - lengths_R.clamp_min(1)
    at_T = torch.cat([offsets_R[row] + torch.arange(lengths_R[row]) for row in feeding])

    def by_row(given: torch.Tensor) -> torch.Tensor:
        spread = torch.full((6, *given.shape[1:]), 1 << 20, dtype=given.dtype)
        spread[list(feeding)] = given
        return spread

    def by_token(given: torch.Tensor, fill: int) -> torch.Tensor:
        spread = torch.full((36, *given.shape[1:]), fill, dtype=given.dtype)
        spread[at_T] = given
        return spread

    names = ("starts_R", "tables_RB", "first_R", "sizes_R", "positions_RA", "first_valid_R")
    spread = replace(
        metadata,
        **{name: by_row(getattr(metadata, name)) for name in names},
        lengths_R=lengths_R,
        offsets_R=offsets_R,
        rows_T=by_token(
            torch.repeat_interleave(torch.tensor(list(feeding), dtype=torch.int32), lengths_R[[1, 3, 4]]), -1
        ),
        cache_index_T=by_token(metadata.cache_index_T, -1),
        visible_TW=by_token(metadata.visible_TW, 0),
        max_length=6,
    )
    if not is_divided:
        monkeypatch.setattr(kernels, "MAX_WORKSPACE_BYTES", 0)
    states = [
        normal(*given) for given in ((heads, 8, sizes[0], 0), (kv_heads, 8, sizes[0], 1), (kv_heads, 8, sizes[1], 2))
    ]
    found, guards = [], watched_memory(monkeypatch)
    for each, fed in (
        (metadata, states),
        (spread, [by_token(state[0].transpose(0, 1), 3).transpose(0, 1)[None] for state in states]),
    ):
        backend = TritonAttention(filled(LayerShape(kv_heads, *sizes), packed.blocks_SB.size))
        backend.use(each)
        found.append(backend.attend(0, *fed, Options(sizes[0] ** -0.5))[0])
    assert torch.equal(found[1][at_T], found[0]) if IS_INTERPRETED else (found[1][at_T] - found[0]).abs().max() < 1e-5
    assert not found[1][spread.rows_T < 0].any()
    assert bool(guards) == is_divided
    for whole, size in guards:
        assert (whole[:GUARD] == 7.0).all()
        assert (whole[GUARD + size :] == 7.0).all()
