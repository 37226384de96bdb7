"""What codes of quantised weights mean, decoded in registers.

Codes are exact in every dtype of activations. So matrices of codes are multiplied, and scales are applied to the sums,
in float32: nothing is rounded between the weight as it is stored and the sum.
"""

import triton
import triton.language as tl

from workers.quantization.weight import Code

INT8, INT4, FP8, FP4 = (tl.constexpr(int(code)) for code in (Code.INT8, Code.INT4, Code.FP8, Code.FP4))


@triton.jit
def decoded(code_NB: tl.tensor, zero_N: tl.tensor, CODE: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """Return the numbers that codes, a byte each, mean; those of FP8 and FP4 divided by what `load_scales` multiplies.

    E4m3 and e2m1 become float16 with an exponent that is too small: by 8 and by 14. Numbers below the smallest exponent
    stay right, since float16 has such numbers, too.
    """
    if CODE == INT8:
        number_NB = (code_NB ^ 0x80).to(tl.float32) - 128.0  # for sm_100, signed bytes take a stack
    elif CODE == INT4:
        number_NB = code_NB.to(tl.float32) - zero_N[:, None]
    else:
        SIGN: tl.constexpr = 7 if CODE == FP8 else 3  # the place of its bit
        FRACTION: tl.constexpr = 3 if CODE == FP8 else 1  # bits; float16 has 10
        bits_NB = code_NB.to(tl.uint16)
        bits_NB = ((bits_NB >> SIGN) << 15) | ((bits_NB & ((1 << SIGN) - 1)) << (10 - FRACTION))
        number_NB = bits_NB.to(tl.float16, bitcast=True).to(tl.float32)
    return number_NB.to(DTYPE)


@triton.jit
def load_bytes(words: tl.tensor, at_N: tl.tensor) -> tl.tensor:
    """Return bytes of 32-bit words, as int32: loads of less than 32 bits are not pipelined."""
    return (tl.load(words + (at_N >> 2)) >> ((at_N & 3) * 8).to(tl.int32)) & 0xFF


@triton.jit
def load_scales(scales: tl.tensor, at_N: tl.tensor, CODE: tl.constexpr) -> tl.tensor:
    """Return scales as float32, with the factor that `decoded` leaves out."""
    if CODE == FP4:
        exponent_N = load_bytes(scales, at_N)  # plus 127, as in float32, where 2 ** -127 is below the smallest exponent
        bits_N = tl.where(exponent_N > 0, exponent_N << 23, 1 << 22)
        scale_N = bits_N.to(tl.float32, bitcast=True) * 16384.0
    else:
        scale_N = tl.load(scales + at_N)
    return scale_N * 256.0 if CODE == FP8 else scale_N


@triton.jit
def load_zeros(zeros: tl.tensor, at_N: tl.tensor, HAS_ZEROS: tl.constexpr) -> tl.tensor:
    """Return zero points as float32; 0 where there are none."""
    return load_bytes(zeros, at_N).to(tl.float32) if HAS_ZEROS else tl.zeros(at_N.shape, tl.float32)
