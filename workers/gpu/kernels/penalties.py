"""Repetition, presence and frequency penalties on the device: `workers.sampling.logits_processors`, the same bits.

How often tokens occurred is counted for each sequence, see `workers.gpu.token_counts.TokenCounts`. The draft tokens
before a position are counted on the way up to the newest known token.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from workers.gpu.kernels.shape import power_of_two
from workers.gpu.token_counts import IN_PROMPT

BLOCK = 4096
"""Ids of a block."""
WARPS = 8
_OUTPUT = tl.constexpr(IN_PROMPT - 1)


@triton.jit(do_not_specialize=("columns",))
def count_kernel(
    seen_SV: tl.tensor,
    width: tl.tensor,
    slots_R: tl.tensor,
    new_RC: tl.tensor,
    columns: tl.tensor,
    PADDED: tl.constexpr,
) -> None:
    """Count one row's new tokens, and mark them as counted: -1."""
    row, column = tl.program_id(0), tl.arange(0, PADDED)
    new_C = new_RC + row * columns + column
    id_C = tl.load(new_C, mask=column < columns, other=-1)
    tl.atomic_add(seen_SV + tl.load(slots_R + row) * width + id_C, 1, mask=id_C >= 0)
    tl.store(new_C, tl.full((PADDED,), -1, tl.int64), mask=column < columns)


@triton.jit(do_not_specialize=("first", "each", "queries", "vocab"))
def penalise_kernel(
    logits_NV: tl.tensor,
    stride: tl.tensor,
    seen_SV: tl.tensor,
    width: tl.tensor,
    slots_R: tl.tensor,
    tokens_RQ: tl.tensor,
    parents_RQ: tl.tensor,
    repetition_R: tl.tensor,
    presence_R: tl.tensor,
    frequency_R: tl.tensor,
    first: tl.tensor,
    each: tl.tensor,
    queries: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Lower the logits of one block of ids after the tokens of some columns of a row."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    repetition, presence = tl.load(repetition_R + row), tl.load(presence_R + row)
    frequency = tl.load(frequency_R + row)
    if (repetition == 1.0) & (presence == 0.0) & (frequency == 0.0):
        return
    id_B = block * BLOCK + tl.arange(0, BLOCK)
    seen_B = tl.load(seen_SV + tl.load(slots_R + row) * width + id_B, mask=id_B < vocab, other=0)
    for at in range(each):
        count_B, column = seen_B & _OUTPUT, row * 0 + first + at
        while column > 0:  # up to the newest known token, which is counted
            token = tl.load(tokens_RQ + row * queries + column)
            count_B += (id_B == token).to(tl.int32)
            column = tl.load(parents_RQ + row * queries + column)
        at_B = logits_NV + (row * each + at) * stride + id_B
        logit_B = tl.load(at_B, mask=id_B < vocab, other=0.0)
        lowered_B = logit_B * tl.where(logit_B > 0, tl.div_rn(1.0, repetition), repetition)
        lowered_B = lowered_B - frequency * count_B.to(tl.float32) - presence * (count_B > 0).to(tl.float32)
        tl.store(at_B, lowered_B, mask=(id_B < vocab) & ((seen_B != 0) | (count_B != 0)))


def count_(seen_SV: torch.Tensor, found: Mapping[str, torch.Tensor]) -> None:
    """Count the new known tokens of a round in place, once: they are marked as counted.

    Args:
        seen_SV: `TokenCounts.seen_SV`.
        found: `RoundInputs.on_device`.
    """
    new_RC = found["uncounted_RC"]
    rows, columns = new_RC.shape
    count_kernel[(rows,)](
        seen_SV, seen_SV.stride(0), found["slots_R"], new_RC, columns, PADDED=power_of_two(columns), num_warps=1
    )


def penalise_(
    logits_NV: torch.Tensor, seen_SV: torch.Tensor, found: Mapping[str, torch.Tensor], first: int, each: int
) -> None:
    """Lower the logits of tokens that occurred in place.

    Args:
        logits_NV: float32, *each* of each row of a round: after the tokens of columns *first* and on; rows of any
            stride, columns contiguous.
        seen_SV: `TokenCounts.seen_SV`; the round's known tokens are counted.
        found: `RoundInputs.on_device`.
        first: a column.
        each: how many.
    """
    vocab, (rows, queries) = logits_NV.shape[1], found["tokens_RQ"].shape
    penalise_kernel[rows, -(-vocab // BLOCK)](
        logits_NV,
        logits_NV.stride(0),
        seen_SV,
        seen_SV.stride(0),
        found["slots_R"],
        found["tokens_RQ"],
        found["parents_RQ"],
        found["repetition_R"],
        found["presence_R"],
        found["frequency_R"],
        first,
        each,
        queries,
        vocab,
        BLOCK=BLOCK,
        num_warps=WARPS,
        enable_fp_fusion=False,  # torch rounds products before it subtracts them
    )
