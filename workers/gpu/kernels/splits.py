"""How keys are divided among programs, and how what these found is joined.

Splits are fixed ranges of places: 8 of 256, then 8 of 512, 8 of 1,024 and so on. They depend on nothing in the batch,
their number grows with the logarithm of the context, and none holds more than an eighth of the places before it but for
the first ones. What the splits of one query found is joined in their order, by one function, whether one program goes
through them or each has a program of its own. So both give the same result.
"""

import triton
import triton.language as tl

FIRST = 256
PER_LEVEL = 8

LOG2_E = tl.constexpr(1.4426950408889634)


def first_place(split: int) -> int:
    """Return the first place of a split."""
    level, within = divmod(split, PER_LEVEL)
    return FIRST * PER_LEVEL * ((1 << level) - 1) + within * (FIRST << level)


def num_splits(places: int) -> int:
    """Return how many splits the first *places* places have; at least 1."""
    count = 1
    while first_place(count) < places:
        count += 1
    return count


@triton.jit
def split_start(split: tl.tensor) -> tl.tensor:
    """As `first_place`, its numbers spelt out: interpreted kernels cannot combine constants with Python's integers."""
    scale = 1 << (split >> 3)
    return (scale - 1) * 2048 + (split & 7) * scale * 256


@triton.jit
def count_splits(places: tl.tensor) -> tl.tensor:
    """As `num_splits`."""
    count = 1
    while split_start(count) < places:
        count += 1
    return count


@triton.jit
def initial(sinks: tl.tensor, head_M: tl.tensor, live_M: tl.tensor, HAS_SINKS: tl.constexpr) -> tl.tuple:
    """Return the greatest score (in units of log 2) and the total weight before any key: nothing, or the sinks."""
    if HAS_SINKS:
        greatest_M = tl.load(sinks + head_M, mask=live_M, other=0.0).to(tl.float32) * LOG2_E
        total_M = tl.full(head_M.shape, 1.0, tl.float32)
    else:
        greatest_M = tl.full(head_M.shape, -float("inf"), tl.float32)
        total_M = tl.full(head_M.shape, 0.0, tl.float32)
    return greatest_M, total_M


@triton.jit
def join(
    greatest_M: tl.tensor,
    total_M: tl.tensor,
    sum_ME: tl.tensor,
    next_greatest_M: tl.tensor,
    next_total_M: tl.tensor,
    next_sum_ME: tl.tensor,
) -> tl.tuple:
    """Return greatest score, total weight and weighted sum of two sets of keys, the later one given second."""
    joint_M = tl.maximum(greatest_M, next_greatest_M)
    base_M = tl.where(joint_M == -float("inf"), 0.0, joint_M)
    before_M, after_M = tl.exp2(greatest_M - base_M), tl.exp2(next_greatest_M - base_M)
    total_M = total_M * before_M + next_total_M * after_M
    return joint_M, total_M, sum_ME * before_M[:, None] + next_sum_ME * after_M[:, None]
