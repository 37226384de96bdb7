"""The noise of `workers.sampling.noise` in kernels: the same function of (key, token id)."""

import triton
import triton.language as tl

from protos.seeds import SHIFTS
from workers.sampling.noise import FACTORS, FRACTION_BITS, KEEP, SCALE, STEP

_STEP = tl.constexpr(STEP)
_SHIFT_0, _SHIFT_1, _SHIFT_2 = (tl.constexpr(shift) for shift in SHIFTS)
_KEEP_0, _KEEP_1, _KEEP_2 = (tl.constexpr(keep) for keep in KEEP)
_FACTOR_0, _FACTOR_1 = (tl.constexpr(factor) for factor in FACTORS)
_DROPPED = tl.constexpr(64 - FRACTION_BITS)
_FRACTION = tl.constexpr((1 << FRACTION_BITS) - 1)
_SCALE = tl.constexpr(SCALE)


@triton.jit
def gumbel(key: tl.tensor, id_B: tl.tensor) -> tl.tensor:
    """Return standard Gumbel noise, float64, for an int64 key and token ids.

    log(1 - u) stands for log1p(-u), which the interpreter lacks: u is an odd multiple of 2^-53, so 1 - u is exact.
    """
    word_B = key + (id_B.to(tl.int64) + 1) * _STEP
    word_B ^= (word_B >> _SHIFT_0) & _KEEP_0
    word_B *= _FACTOR_0
    word_B ^= (word_B >> _SHIFT_1) & _KEEP_1
    word_B *= _FACTOR_1
    word_B ^= (word_B >> _SHIFT_2) & _KEEP_2
    uniform_B = (((word_B >> _DROPPED) & _FRACTION).to(tl.float64) + 0.5) * _SCALE
    return -tl.log(-tl.log(1.0 - uniform_B))
