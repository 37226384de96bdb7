"""Gumbel noise that is a function of (seed, index, token id).

The noise is no stream of random numbers, so it does not depend on the batch, on preemption or on the number of draft
tokens; target and draft share it by computing it. The same code runs on numpy arrays (sampling on the host) and torch
tensors (any device), in int64 that wraps around.
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
DRAFT = signed(0xD1342543DE82EF95)
ACCEPT = signed(0xA0761D6478BD642F)
"""Noise streams of rejection sampling: for sampling draft tokens, and for accepting them."""
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


def stream_seeds(seeds_N: Ints, stream: int, known_N: Ints) -> Ints:
    """Return the int64 seeds of a noise stream for the round that begins with `known_N` known tokens. Shapes `[N]`.

    Streams are independent of each other, and of the noise of the seeds themselves.
    """
    return row_keys(mix_(seeds_N + stream), known_N)


def path_keys(keys_N: Ints, paths_ND: Ints) -> Ints:
    """Return the int64 keys of nodes of a tree, by the D tokens on the way to each; *keys_N* where D is 0."""
    for tokens_N in paths_ND.T:
        keys_N = mix_(keys_N + (tokens_N + 1) * STEP)
    return keys_N


def fraction_bits(keys: Words, ids: Words) -> Words:
    """Return 52 uniform bits as int64 for keys and token ids of shapes that broadcast."""
    words = mix_(keys + (ids + 1) * STEP)
    words >>= 64 - FRACTION_BITS
    words &= (1 << FRACTION_BITS) - 1
    return words


def uniform(keys: Ints, ids: Ints) -> npt.NDArray[np.float64]:
    """Return uniform numbers in the open interval (0, 1), for int64 keys and ids that broadcast."""
    numbers: npt.NDArray[np.float64] = (fraction_bits(keys, ids).astype(np.float64) + 0.5) * SCALE
    return numbers


def gumbel(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise, float64, for int64 keys and ids that broadcast; between -3.6 and 36.8."""
    uniform = (fraction_bits(keys, ids).double() + 0.5) * SCALE
    return -torch.log(-torch.log1p(-uniform))
