"""Gumbel noise keyed by (seed, index, token id): the same number wherever, whenever and however often it is asked.

Nothing is drawn from a stream, so nothing depends on the batch, on preemption or on how many tokens were guessed;
target and draft share the noise by computing it. The same code runs over numpy arrays (sampling on the host) and
torch tensors (any device), in int64 that wraps around.
"""

from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from protos.seeds import INCREMENT, MASK, MULTIPLIERS, SHIFTS

Ints = npt.NDArray[np.int64]
Words = TypeVar("Words", Ints, torch.Tensor)

FRACTION_BITS = 52  # (bits + 1/2) / 2^52 is exact in float64, and never 0 or 1
SCALE = 2.0**-FRACTION_BITS


def signed(word: int) -> int:
    """Return the int64 with the bits of a uint64."""
    return word - (1 << 64) if word >> 63 else word


STEP = signed(INCREMENT)
FACTORS = tuple(signed(factor) for factor in MULTIPLIERS)
KEEP = tuple(MASK >> shift for shift in SHIFTS)  # turns the arithmetic shift of int64 into a logical one


def mix_(words: Words) -> Words:
    """Apply `protos.seeds.mix` to int64 words in place, and return them."""
    words ^= (words >> SHIFTS[0]) & KEEP[0]
    words *= FACTORS[0]
    words ^= (words >> SHIFTS[1]) & KEEP[1]
    words *= FACTORS[1]
    words ^= (words >> SHIFTS[2]) & KEEP[2]
    return words


def row_keys(seeds_N: Ints, index_N: Ints) -> Ints:
    """Return the int64 key of each (seed, index); seeds are uint64 bits held as int64. Shapes `[N]`."""
    return mix_(mix_(seeds_N + STEP) + index_N * STEP)


def fraction_bits(keys: Words, ids: Words) -> Words:
    """Return 52 uniform bits as int64 for keys and token ids of shapes that broadcast."""
    words = mix_(keys + (ids + 1) * STEP)
    words >>= 64 - FRACTION_BITS
    words &= (1 << FRACTION_BITS) - 1
    return words


def gumbel(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise, float64, for int64 keys and ids that broadcast; between -3.6 and 36.8."""
    uniform = (fraction_bits(keys, ids).double() + 0.5) * SCALE
    return -torch.log(-torch.log1p(-uniform))
